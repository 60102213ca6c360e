"""Where microbatches stay in the organisation of their trainer, a replica has nothing to do with peers of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.pipeline.messages import (
    ADOPT,
    BACKWARD,
    EVALUATE,
    FORWARD,
    RECALL,
    RESEND,
    TARGETS,
    TRAINER_RECALL,
    Adopt,
    Backward,
    Evaluate,
    Forward,
    Recall,
    Resend,
    Targets,
    TrainerRecall,
)
from swarm.pipeline.stage.admission import Participants
from swarm.security.borders import OPEN, Borders
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.pipeline import (
    ACTIVATION_BYTES,
    ALIEN,
    DOWN,
    ME,
    ROUTE,
    TRAINER,
    UP,
    DialClock,
    ReplicaScene,
    TrainerSide,
    chosen,
    enter,
    microbatch,
    places,
    sealed,
    tensor,
    token_ids,
)

OWN = {**dict.fromkeys(ROUTE, "st-mary"), TRAINER: "st-mary"}
FIELDS: dict[str, Any] = {"step": 1, "microbatch": microbatch(0), "route": ROUTE}
"""Of a message that is right but for who is whose."""
CHOSEN = chosen(**FIELDS, attempt=0)
SEAMS: dict[str, tuple[PeerId, Callable[[], Any], bytes]] = {
    "forward": (UP, lambda: sealed(Forward, UP, tensor(1.0), **CHOSEN, hop=1), tensor(1.0)),
    "backward": (DOWN, lambda: sealed(Backward, DOWN, tensor(1.0), **CHOSEN, hop=1), tensor(1.0)),
    "targets": (TRAINER, lambda: Targets(**CHOSEN), token_ids()),
    "resend": (TRAINER, lambda: Resend(**CHOSEN, hop=2), b""),
    "adopt": (TRAINER, lambda: Adopt(**CHOSEN, hop=1, within_s=1.0), b""),
    "recall": (UP, lambda: Recall(**FIELDS, hop=1, what="gradient"), b""),
    "evaluate": (TRAINER, lambda: Evaluate(step=1, microbatch=microbatch(0), hop=1), tensor(1.0)),
}

RPCS: dict[str, Any] = {
    rpc.name.rpartition("/")[2]: rpc for rpc in (FORWARD, BACKWARD, TARGETS, RESEND, ADOPT, RECALL, EVALUATE)
}


def abroad(*peers: PeerId) -> Participants:
    open_ = places(len(ROUTE))
    return Participants(open_.trainers, open_.stages, Borders({**OWN, **dict.fromkeys(peers, "charite")}))


# Rows that are evaluated have no route: their trainer takes them from stage to stage.
@pytest.mark.parametrize(
    ("seam", "foreign"),
    [(seam, foreign) for seam in SEAMS for foreign in (TRAINER, UP, DOWN) if seam != "evaluate" or foreign == TRAINER],
)
async def test_replica_refuses_what_a_peer_of_another_organisation_brings_or_asks(
    scene: ReplicaScene, seam: str, foreign: PeerId
) -> None:
    caller, body, payload = SEAMS[seam]
    scene.server.open_step(1, abroad(foreign))
    with pytest.raises(Refused, match="is not of the organisation of"):
        await scene.boxes[caller].endpoint.call(ME, RPCS[seam], body(), timeout_s=5, payload=payload)
    assert not scene.part.held


@pytest.mark.parametrize("seam", ["forward", "backward"])
async def test_replica_takes_the_same_of_its_own_organisation(scene: ReplicaScene, seam: str) -> None:
    caller, body, payload = SEAMS[seam]
    scene.server.open_step(1, abroad())
    await scene.boxes[caller].call(ME, body(), payload)


async def test_nothing_that_is_retained_is_handed_abroad(scene: ReplicaScene) -> None:
    await scene.there(x=3.0)
    body = Recall(**FIELDS, hop=1, what="output")
    scene.server.open_step(1, abroad())
    given = await scene.boxes[DOWN].endpoint.call(ME, RECALL, body, timeout_s=5, max_reply_bytes=64)
    assert len(given[1]) == 32
    scene.server.open_step(1, abroad(DOWN))
    with pytest.raises(Refused, match="organisation"):
        await scene.boxes[DOWN].endpoint.call(ME, RECALL, body, timeout_s=5, max_reply_bytes=64)


async def test_trainer_gives_nothing_of_its_own_to_a_host_abroad() -> None:
    trainer, near, far, _ = await enter(SimNetwork(DialClock()), TRAINER, UP, ALIEN, DOWN)
    borders = Borders({**OWN, ALIEN: "charite"})
    stages = [[one for one in replicas if borders.near(TRAINER, one)] for replicas in ([UP, ALIEN], [DOWN])]
    side = TrainerSide(trainer, stages, hosted=True)
    side.part.step = 2
    side.trainer.open_step(3, stages, 1, (0, 20))

    async def ask(host: SimEndpoint) -> int:
        body = TrainerRecall(step=3, microbatch=microbatch(20), route=(host.peer, DOWN), what="output")
        _, payload = await host.call(TRAINER, TRAINER_RECALL, body, timeout_s=5, max_reply_bytes=ACTIVATION_BYTES)
        return len(payload)

    assert await ask(near) > 0
    with pytest.raises(Refused, match="goes to stage 0 only"):
        await ask(far)


def test_who_is_of_no_organisation_is_near_nobody() -> None:
    borders = Borders({"a": "x", "b": "x", "c": "y"})
    assert [borders.near("a", other) for other in "abcd"] == [True, True, False, False]
    assert not borders.near("d", "d")
    assert OPEN.near("a", "d")
    OPEN.check("a", "bcd")

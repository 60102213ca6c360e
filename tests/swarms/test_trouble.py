"""What happens to a run when queues are full, peers die, or someone lies."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import PeerError, Refused, RunEnded, Violation, WrongStep
from swarm.events import Accumulated, HopMoved, RunStarted, StepClosed
from swarm.ids import MicrobatchId, PeerId
from swarm.membership import roles
from swarm.network.protocols import Rpc
from swarm.pipeline.messages import FORWARD, OUTPUT, Forward, Output
from swarm.pipeline.stage.admission import StageSettings
from swarm.step.calls import first_leaf
from swarm.step.messages import LEASE, RECONCILE, Lease, Reconcile
from tests.harness.expect import eventually
from tests.harness.swarm import LocalSwarm


async def test_busy_replicas_are_routed_around_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tight(**limits: Any) -> StageSettings:
        return StageSettings(**{**limits, "max_queue": 1, "max_under_way": 1})

    monkeypatch.setattr(roles, "StageSettings", tight)
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, max_in_flight=6, batch={"microbatches_per_step": 12})
    await swarm.run()

    moves = swarm.events(HopMoved)
    assert moves, "the fault did not fire: no replica was ever busy"
    assert {move.reason.split(":")[0] for move in moves} == {"busy"}
    accumulated = Counter((event.part, event.microbatch) for event in swarm.events(Accumulated))
    assert set(accumulated.values()) == {1}
    assert len(accumulated) == 2 * 3 * 12
    assert len({event.record for event in swarm.events(StepClosed) if event.step == 3}) == 1


async def _quietly(work: Any) -> None:
    """A member's run, whose calls fail once its neighbour is dead."""
    try:
        await work
    except* (PeerError, RunEnded):
        pass


async def test_members_refuse_strangers_and_liars(tmp_path: Path) -> None:
    """In a run that goes on, a host tries what only a leader, a trainer or a neighbour may do."""
    swarm = LocalSwarm(tmp_path, hosts=2, trainers=1, run={"steps": 4000}, batch={"microbatches_per_step": 1})
    await swarm.open()
    trainer = swarm.peers["trainer-0"].endpoint.peer
    microbatch = MicrobatchId(trainer, "0" * 16, 9, 9)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_quietly(peer.run())) for peer in swarm.peers.values()]
        await eventually(lambda: len(swarm.events(StepClosed)) > 8, what="two steps closed")
        started = swarm.events(RunStarted)[0]
        route = tuple(PeerId(m["peer"]) for stage in (0, 1) for m in started.roster if m["part"] == f"stage-{stage}")
        liar = next(peer.endpoint for peer in swarm.peers.values() if peer.endpoint.peer == route[0])
        about: dict[str, Any] = {"step": 1, "microbatch": microbatch, "attempt": 0, "route": route}
        forward = Forward(**about, chosen=bytes(64), hop=1, seal=bytes(64))
        to_itself = forward.model_copy(update={"route": (route[1], route[0])})
        of_a_host = forward.model_copy(update={"microbatch": MicrobatchId(liar.peer, "0" * 16, 0, 0)})
        attempts: list[tuple[Rpc[Any, Any], Any, type[PeerError]]] = [
            (FORWARD, forward, WrongStep),
            (FORWARD, to_itself, Refused),
            (FORWARD, of_a_host, Refused),
            (RECONCILE, Reconcile(step=1, term=0, committed=(), live=(), attempts={}), WrongStep),
            (LEASE, Lease(step=1, term=0, total=1), WrongStep),
            (OUTPUT, Output(step=1, microbatch=microbatch, attempt=0, seal=bytes(64)), Refused),
        ]
        for rpc, body, expected in attempts:
            target = trainer if rpc is OUTPUT else route[1]
            payload = b"x" if rpc is FORWARD else b""
            with pytest.raises(expected):
                await liar.call(target, rpc, body, timeout_s=5, payload=payload)
        for task in tasks:
            task.cancel()
    for peer in swarm.peers.values():
        await peer.endpoint.close()
        await peer.around.device.close()


def test_first_leaf_of_nested_groups_is_a_plain_exception() -> None:
    inner = ExceptionGroup("inner", [Violation("x"), Refused("y")])
    assert isinstance(first_leaf(ExceptionGroup("outer", [inner])), Violation)

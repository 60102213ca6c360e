"""A trainer's journeys among replicas that are busy, gone, late, or send what they should not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from blake3 import blake3

from swarm.errors import BugError, Busy, Ending, PeerError, Refused, RunEnded, Violation, WrongStep
from swarm.events import HopMoved, JourneyCompleted, JourneyStarted
from swarm.ids import JourneyKey, PeerId
from swarm.pipeline.messages import TARGETS, TRAINER_RECALL, Blocked, HopReport, InputGradient, Output, TrainerRecall
from swarm.pipeline.seals import NOTHING, Content, told_digest
from swarm.pipeline.stage.admission import Participants
from swarm.pipeline.trainer.journey import FinishedJourney
from swarm.security.signing import receipt_bytes
from swarm.sim.network import SimNetwork
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import (
    RUN,
    TRAINER,
    Crew,
    FakeLeader,
    LoopClock,
    Mailbox,
    TrainerSide,
    enter,
    microbatch,
    quick,
    sealed,
    sign,
    stop,
    tensor,
    token_ids,
    turns,
)

A0, A1, B0, B1 = (PeerId(name) for name in ("a0", "a1", "b0", "b1"))
NAN = float("nan")


def unsealed(content: bytes) -> bytes:
    """What a receipt signs of one that shows no signatures under what came."""
    return told_digest(content, (b"", b""))


async def test_trainer_feeds_its_lease_and_every_stage_counts_each_microbatch_once() -> None:
    crew = await Crew.of([[A0, A1], [B0, B1]])
    leader = await crew.feed(9)
    everything = {microbatch(position) for position in range(9)}
    assert {journey.key.microbatch for journey in leader.finished} == everything
    for stage in ((A0, A1), (B0, B1)):
        assert crew.held(*stage) == everything
        assert sum(len(crew.replicas[peer].part.held) for peer in stage) == 9
    assert set(crew.side.part.held) == everything
    for journey in leader.finished:
        for stage, (replica, receipt) in enumerate(zip(journey.route, journey.receipts, strict=True)):
            assert receipt.signature == sign(replica, receipt_bytes(RUN, journey.key, stage, receipt.digest))
    assert len(crew.side.events.of(JourneyStarted)) == len(crew.side.events.of(JourneyCompleted)) == 9
    assert crew.side.trainer.cursor == (0, 9)


COUNTS, GIVEN_UP = "a" * 16, "b" * 16


async def test_trainer_feeds_the_step_that_follows_the_record_it_was_told_of() -> None:
    crew = await Crew.of([[A0], [B0, B1]])
    crew.side.trainer.open_step(1, crew.stages, 1, None, (COUNTS, ""))
    for replica in crew.replicas.values():
        replica.server.open_step(1, Participants.of([TRAINER], crew.stages), COUNTS)
    crew.strike(1, "backward", crew.kill)  # the one who takes over recalls from both sides
    leader = await crew.feed(4)
    assert {journey.key.after for journey in leader.finished} == {COUNTS}
    assert len(leader.finished) == len(crew.held(A0)) == 4


async def test_trainer_that_lacks_tensors_recalls_them_from_the_step_it_is_in() -> None:
    crew = await Crew.of([[A0], [B0]], retention_bytes=1)
    crew.side.trainer.open_step(1, crew.stages, 1, None, (COUNTS, ""))
    for replica in crew.replicas.values():
        replica.server.open_step(1, Participants.of([TRAINER], crew.stages), COUNTS)
    async with crew.working():
        await FakeLeader(2).fed_by(crew.side.trainer)
        assert len(crew.side.part.held) == 2
        await crew.side.trainer.settle(1, {})
    assert not crew.side.part.held


async def test_trainer_takes_nothing_late_of_a_lineage_that_was_given_up_and_gives_nothing_for_it() -> None:
    network = SimNetwork(LoopClock())
    home, *others = await enter(network, TRAINER, A0, B0)
    side, (a, b) = TrainerSide(home, [[A0], [B0]], in_flight=1), [Mailbox(other) for other in others]
    side.trainer.open_step(1, [[A0], [B0]], 1, None, (COUNTS, ""))
    feeding = asyncio.create_task(side.trainer.feed(1, FakeLeader(1)))
    await eventually(lambda: a.of("forward"))
    assert a.of("forward")[0].after == COUNTS
    key: Any = {"step": 1, "microbatch": microbatch(0), "attempt": 0}
    with pytest.raises(Refused, match="no such microbatch"):
        await b.call(TRAINER, sealed(Output, B0, tensor(3.0), **key, hop=2, after=GIVEN_UP), tensor(3.0))
    wanted = TrainerRecall(step=1, microbatch=microbatch(0), route=(A0, B0), what="output", after=GIVEN_UP)
    with pytest.raises(WrongStep, match="follows another record"):
        await a.endpoint.call(TRAINER, TRAINER_RECALL, wanted, timeout_s=5, max_reply_bytes=32)
    await b.call(TRAINER, sealed(Output, B0, tensor(2.0), **key, hop=2, after=COUNTS), tensor(2.0))
    await stop(feeding)


async def test_trainer_without_a_lease_feeds_nothing() -> None:
    crew = await Crew.of([[A0], [B0]])
    leader = await crew.feed(0)
    assert (leader.asked, leader.finished, crew.side.trainer.cursor) == (1, [], (0, 0))


async def test_trainer_with_hosted_ends_takes_the_loss_from_the_last_stage() -> None:
    crew = await Crew.of([[A0], [B0, B1]], hosted=True)
    leader = await crew.feed(5)
    assert {(journey.loss_sum, journey.tokens) for journey in leader.finished} == {(3.0, 2)}
    assert len(crew.held(B0, B1)) == 5


@pytest.mark.parametrize("hosted", [False, True], ids=["private", "hosted"])
async def test_trainer_waits_while_all_replicas_are_busy_and_finishes(hosted: bool) -> None:
    limits = {"max_queue": 1, "max_under_way": 1}
    crew = await Crew.of([[A0, A1], [B0]], limits=limits, hosted=hosted, in_flight=6)
    leader = await crew.feed(12)
    assert len(leader.finished) == len(crew.held(B0)) == len(crew.held(A0, A1)) == 12
    assert {move.reason.split(":")[0] for move in crew.side.events.of(HopMoved)} == {"busy"}
    assert crew.side.suspected == {}


async def test_trainer_moves_a_hop_whose_replica_is_gone_and_suspects_it() -> None:
    crew = await Crew.of([[A0], [B0, B1]])
    crew.network.kill(B0)
    leader = await crew.feed(4)
    assert len(leader.finished) == len(crew.held(B1)) == 4
    moves = crew.side.events.of(HopMoved)
    assert {(move.stage, move.old, move.new, move.late) for move in moves} == {(1, B0, B1, False)}
    assert set(crew.side.suspected) == {B0}
    assert all(journey.route == (A0, B1) for journey in leader.finished)


class DeafLeader(FakeLeader):
    """Leases, and does not acknowledge anything."""

    async def complete(self, journey: FinishedJourney) -> None:
        """See :class:`~swarm.pipeline.trainer.trainer.StepLeader`."""
        self.finished.append(journey)
        await asyncio.Event().wait()


async def test_trainer_whose_reports_are_not_acknowledged_goes_on_feeding() -> None:
    crew = await Crew.of([[A0], [B0]], in_flight=1)
    leader = DeafLeader(4)
    async with crew.working():
        feeding = asyncio.create_task(crew.side.trainer.feed(1, leader))
        await eventually(lambda: len(leader.finished) == 4)
        await stop(feeding)
    assert crew.side.events.of(JourneyCompleted) == []
    assert not crew.side.trainer._under_way()


async def test_trainer_whose_leader_does_not_count_a_microbatch_goes_on() -> None:
    crew = await Crew.of([[A0], [B0]])
    leader = FakeLeader(3)
    leader.error = Refused("no more were leased")
    async with crew.working():
        feeding = asyncio.create_task(crew.side.trainer.feed(1, leader))
        await eventually(lambda: len(crew.side.part.held) == 3 and not crew.side.trainer._under_way())
        assert not feeding.done()
        await stop(feeding)
    assert crew.side.events.of(JourneyCompleted) == []


@pytest.mark.parametrize("error", [BugError("a broken invariant"), RunEnded("the run is over", Ending.FAILED)])
async def test_trainer_ends_with_what_its_leader_object_raises(error: Exception) -> None:
    crew = await Crew.of([[A0], [B0]])
    leader = FakeLeader(3)
    leader.error = error
    async with crew.working():
        with pytest.raises(type(error)) as caught:
            await crew.side.trainer.feed(1, leader)
    assert caught.value is error
    assert crew.side.trainer._under_way() == []


# --- replicas that only take notes -----------------------------------------------------------------------------------


def _hash(value: float) -> bytes:
    return blake3(tensor(value)).digest()


CONTENTS = (
    Content(_hash(1.0), _hash(2.0), _hash(2.0), _hash(1.0)),
    Content(_hash(2.0), _hash(1.0), _hash(1.0), _hash(2.0)),
)
"""What both replicas got and sent: 1 between trainer and replica, 2 between the two."""
HOSTED = (
    CONTENTS[0]._replace(input=blake3(token_ids()).digest(), sent=NOTHING),
    CONTENTS[1]._replace(output=NOTHING, gradient=blake3(token_ids()).digest()),
)
A0_SAID = CONTENTS[0].to_wire()


class Walk:
    """One journey under way from ``tr`` through ``a0`` and ``b0``, which do nothing by themselves."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    async def __aenter__(self) -> Walk:
        self.network = SimNetwork(LoopClock())
        endpoints = await enter(self.network, TRAINER, A0, B0, B1)
        self.side = TrainerSide(endpoints[0], [[A0], [B0]], **self._options)
        self.boxes = {endpoint.peer: Mailbox(endpoint) for endpoint in endpoints[1:]}
        self.leader = FakeLeader(self._options.get("in_flight", 1))
        self.feeding = asyncio.create_task(self.side.trainer.feed(1, self.leader))
        return self

    async def __aexit__(self, *details: Any) -> None:
        self.feeding.cancel()
        await asyncio.gather(self.feeding, return_exceptions=True)
        assert self.side.trainer._under_way() == []

    async def started(self) -> Walk:
        await eventually(lambda: self.boxes[A0].of("forward"))
        return self

    async def send(self, by: PeerId, verb: str, *, x: float | bytes = 1.0, **changes: Any) -> None:
        kinds = {"output": Output, "gradient": InputGradient, "hop": HopReport, "blocked": Blocked}
        fields: dict[str, Any] = {"step": 1, "microbatch": microbatch(0), "attempt": 0}
        if verb == "hop":
            hop = 0 if by == A0 else 1
            tokens = changes.get("tokens", 0) if self._options.get("hosted") else 0
            content = (HOSTED if self._options.get("hosted") else CONTENTS)[hop].to_wire()
            receipt = sign(by, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), hop, unsealed(content), tokens))
            fields |= {"hop": hop, "direction": "backward", "queued_s": 0.0, "compute_s": 0.1, "receipt": receipt}
            fields |= {"content": content}
        if verb == "blocked":
            fields |= {"hop": 1, "direction": "forward", "peer": B0, "code": "violation", "reason": "a value is NaN"}
        payload = (x if isinstance(x, bytes) else tensor(x)) if verb in ("output", "gradient") else b""
        if verb in ("output", "gradient"):
            hop = 2 if verb == "output" else -1
            body = sealed(kinds[verb], by, payload, **(fields | changes | {"hop": hop}))
        else:
            body = kinds[verb](**(fields | changes))
        await self.boxes[by].call(TRAINER, body, payload)

    async def walk_home(self) -> None:
        await self.send(B0, "output")
        await eventually(lambda: self.boxes[B0].of("backward"))
        await self.send(B0, "hop")
        await self.send(A0, "hop")
        await self.send(A0, "gradient")
        await self.leader.over.wait()


FORGERIES: list[tuple[str, PeerId, str, dict[str, Any], type[PeerError]]] = [
    ("output of another stage", A0, "output", {}, Refused),
    ("output of a stranger", B1, "output", {}, Refused),
    ("output of an attempt to come", B0, "output", {"attempt": 1}, Refused),
    ("output with nobody's signature", B0, "output", {"seal": bytes(64)}, Violation),
    ("output too long", B0, "output", {"x": tensor(1.0) + b"\0"}, Violation),
    ("output of an unknown microbatch", B0, "output", {"microbatch": microbatch(5)}, Refused),
    ("output of another step", B0, "output", {"step": 2}, Refused),
    ("gradient of another stage", B0, "gradient", {}, Refused),
    ("gradient of an attempt to come", A0, "gradient", {"attempt": 1}, Refused),
    ("gradient too short", A0, "gradient", {"x": b"\0"}, Violation),
    ("report of a stranger", B1, "hop", {}, Refused),
    ("report for another hop", A0, "hop", {"hop": 1}, Refused),
    ("report for a hop that is not", A0, "hop", {"hop": 2}, Refused),
    ("report of an attempt to come", A0, "hop", {"attempt": 1}, Refused),
    ("report without a receipt", A0, "hop", {"receipt": b""}, Refused),
    ("report with a forged receipt", A0, "hop", {"receipt": bytes(64)}, Refused),
    ("report with a receipt for other hashes", A0, "hop", {"content": CONTENTS[1].to_wire()}, Refused),
    ("report without hashes", A0, "hop", {"content": b""}, Violation),
    ("report with a receipt of another stage", A0, "hop",
     {"receipt": sign(A0, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 1, unsealed(A0_SAID)))}, Refused),
    ("report with a receipt of another step", A0, "hop",
     {"receipt": sign(A0, receipt_bytes(RUN, JourneyKey(2, microbatch(0), 0), 0, unsealed(A0_SAID)))}, Refused),
    ("report with a receipt of another lineage", A0, "hop",
     {"receipt": sign(A0, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0, "ab"), 0, unsealed(A0_SAID)))}, Refused),
    ("report with a receipt for tokens that only the loss counts", A0, "hop",
     {"receipt": sign(A0, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 0, unsealed(A0_SAID), 3)), "tokens": 3},
     Refused),
    ("blocked by a stranger", B1, "blocked", {}, Refused),
    ("blocked by an attempt to come", A0, "blocked", {"attempt": 1}, Refused),
    ("blocked two hops away", A0, "blocked", {"hop": 3}, Refused),
    ("blocked in another's name", A0, "blocked", {"peer": A0, "code": "failed"}, Refused),
]  # fmt: skip


@pytest.mark.parametrize("forgery", [lie[1:] for lie in FORGERIES], ids=[lie[0] for lie in FORGERIES])
async def test_trainer_refuses_mail(forgery: tuple[PeerId, str, dict[str, Any], type[PeerError]]) -> None:
    by, verb, changes, error = forgery
    async with Walk() as walk:
        await walk.started()
        with pytest.raises(error):
            await walk.send(by, verb, **changes)
        await walk.walk_home()
        assert len(walk.leader.finished) == 1


@pytest.mark.parametrize("lacking", Content._fields)
async def test_trainer_refuses_a_receipt_that_does_not_say_all_that_came_and_was_sent(lacking: str) -> None:
    said = CONTENTS[0]._replace(**{lacking: NOTHING}).to_wire()
    receipt = sign(A0, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 0, unsealed(said)))
    async with Walk() as walk:
        await walk.started()
        with pytest.raises(Refused, match=f"does not say what its {lacking} is"):
            await walk.send(A0, "hop", content=said, receipt=receipt)
        await walk.walk_home()


async def test_trainer_does_not_hold_its_own_crowd_against_a_replica() -> None:
    """What waits there is what was sent there: only what the replica computes says how much it can take."""
    async with Walk() as walk:
        await walk.started()
        await walk.send(A0, "hop", direction="forward", queued_s=5.0, compute_s=0.0)
        assert walk.side.wiring.statistics()[0][A0].average_s == 0.0
        await walk.walk_home()


async def test_trainer_takes_repeated_mail_once() -> None:
    async with Walk() as walk:
        await walk.started()
        for _ in range(2):
            await walk.send(B0, "output")
            await walk.send(A0, "hop")
        await eventually(lambda: walk.boxes[B0].of("backward"))
        await walk.walk_home()
        assert len(walk.boxes[B0].of("backward")) == 1


async def test_trainer_refuses_mail_of_a_journey_that_is_over() -> None:
    async with Walk() as walk:
        await walk.started()
        await walk.walk_home()
        for by, verb in ((B0, "output"), (A0, "gradient"), (A0, "hop"), (A0, "blocked")):
            with pytest.raises(Refused, match="no such microbatch"):
                await walk.send(by, verb)


async def test_trainer_given_an_output_that_is_no_number_wants_it_of_another() -> None:
    async with Walk() as walk:
        walk.side.wiring.add(1, B1)
        await walk.started()
        await walk.send(B0, "output", x=NAN)
        await eventually(lambda: walk.boxes[A0].of("resend"))
        (again,) = walk.boxes[A0].of("resend")
        assert (again.route, again.attempt, again.hop) == ((A0, B1), 1, 1)
        await walk.send(B1, "output", attempt=1)
        await eventually(lambda: walk.boxes[B1].of("backward"))
        assert walk.side.wiring.statistics()[1][B0].on_probation


async def test_trainer_given_a_gradient_that_is_no_number_sets_the_microbatch_aside() -> None:
    async with Walk() as walk:
        await walk.started()
        await walk.send(B0, "output")
        await walk.send(B0, "hop")
        said = CONTENTS[0]._replace(sent=_hash(NAN)).to_wire()
        receipt = sign(A0, receipt_bytes(RUN, JourneyKey(1, microbatch(0), 0), 0, unsealed(said)))
        await walk.send(A0, "hop", content=said, receipt=receipt)
        await walk.send(A0, "gradient", x=NAN)
        await walk.leader.over.wait()
        assert walk.leader.aside == {microbatch(0): "the trainer's own part: a value is not finite in float32"}
        assert walk.side.part.held == {}


async def test_trainer_with_hosted_ends_brings_its_targets_again_to_a_busy_replica() -> None:
    async with Walk(hosted=True) as walk:
        walk.boxes[B0].errors[TARGETS] = Busy("full")
        await walk.started()
        await turns()
        del walk.boxes[B0].errors[TARGETS]
        await eventually(lambda: walk.boxes[B0].of("targets"))
        await walk.send(A0, "hop")
        await walk.send(B0, "hop", loss_sum=2.5, tokens=2)
        await walk.leader.over.wait()
        assert [(journey.loss_sum, journey.tokens) for journey in walk.leader.finished] == [(2.5, 2)]


@pytest.mark.parametrize("claim", [{"tokens": 1}, {"tokens": 3}, {"tokens": 0}, {"loss_sum": -1.0}], ids=str)
async def test_trainer_with_hosted_ends_believes_no_loss_that_cannot_be_and_asks_another(claim: dict[str, Any]) -> None:
    async with Walk(hosted=True, pace=quick()) as walk:
        walk.side.wiring.add(1, B1)
        await walk.started()
        await eventually(lambda: walk.boxes[B0].of("targets"))
        await walk.send(A0, "hop", direction="forward")
        with pytest.raises(Refused, match="tokens of 2"):
            await walk.send(B0, "hop", **{"loss_sum": 2.5, "tokens": 2} | claim)
        await eventually(lambda: walk.boxes[A0].of("resend"))
        again = walk.boxes[A0].of("resend")[0]
        assert again.route == (A0, B1)
        await walk.send(B1, "hop", loss_sum=2.5, tokens=2, attempt=again.attempt)
        await walk.send(A0, "hop", attempt=again.attempt)
        await walk.leader.over.wait()
        assert [journey.route for journey in walk.leader.finished] == [(A0, B1)]


async def test_trainer_keeps_no_more_under_way_than_it_may_and_cancelled_leaves_nothing() -> None:
    async with Walk(in_flight=3) as walk:
        walk.leader.quota = 10
        await eventually(lambda: len(walk.boxes[A0].of("forward")) == 3)
        await turns()
        assert (walk.leader.leased, len(walk.side.trainer._under_way())) == (3, 3)
        assert walk.side.trainer.cursor == (0, 3)

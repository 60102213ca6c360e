"""Hops that others of their stage compute again: what they find, and what becomes of the microbatch."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from torch import Tensor

from swarm.compression.dense import FLOAT32
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Violation, WrongStep
from swarm.events import HopAudited
from swarm.ids import JourneyKey, MicrobatchId, PeerId, StepWork
from swarm.models.spec import TensorSpec, token_spec
from swarm.pipeline.activity import AuditCounts
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.messages import AUDIT, RECALL, Audit, Audited, Recall
from swarm.pipeline.recall import Errand
from swarm.pipeline.seals import NOTHING, hash_of, told_digest
from swarm.pipeline.stage.admission import Participants
from swarm.pipeline.stage.auditing import MAX_AUDITS, Found, compared, far_rows
from swarm.pipeline.trainer.audits import (
    AT_LEAST_S,
    NEWCOMER_SHARE,
    PATIENCE,
    SILENT_S,
    STANDING,
    Audits,
    HopClaim,
    share_of,
)
from swarm.pipeline.trainer.hops import Receipt
from swarm.security.signing import audit_bytes, receipt_bytes
from tests.harness.expect import eventually
from tests.harness.rigs.clocks import FakeClock
from tests.harness.rigs.pipeline import RUN, TRAINER, CheapPart, Crew, FakeLeader, microbatch, sign, specs, verify

A, A1, A2, A3, B, B1 = (PeerId(name) for name in ("a0", "a1", "a2", "a3", "b0", "b1"))
THREE = [[A, A1, A2], [B]]


class Wrong(CheapPart):
    """Hands back another gradient."""

    by = 0.5

    def backward_input(self, graph: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        gradient, rest = super().backward_input(graph, grad_output)
        return None if gradient is None else gradient * (1 + self.by), rest


def audits_of(crew: Crew, share: float = 1.0) -> Audits:
    """Have all hops of a crew's journeys computed again by the others of the stage, in their order."""
    context = crew.side.context

    def judges(key: JourneyKey, hop: int, peer: PeerId) -> Collection[PeerId]:
        return [other for other in crew.stages[hop] if other != peer]

    made = context.audits = Audits(
        run=RUN, endpoint=context.endpoint, clock=context.clock, verify=verify, judges=judges,
        share=share, chance=lambda: 0.1, within_s=5.0,
    )  # fmt: skip
    return made


async def audited(stages: Any = THREE, **options: Any) -> Crew:
    crew = await Crew.of(stages, **options)
    audits_of(crew)
    return crew


async def played(crew: Crew, quota: int = 6) -> FakeLeader:
    """Feed the quota, then settle, as at a step's closing."""
    leader = FakeLeader(quota)
    async with crew.working():
        await leader.fed_by(crew.side.trainer)
        await crew.settle(crew.assigned(leader))
    return leader


def told(crew: Crew) -> dict[str, set[PeerId]]:
    """Whose hops there were, by what came of them."""
    found: dict[str, set[PeerId]] = {}
    for event in crew.side.events.of(HopAudited):
        found.setdefault(event.outcome, set()).add(event.peer)
    return found


# --- what becomes of a microbatch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosted", [False, True])
async def test_honest_hops_pass_and_change_nothing(hosted: bool) -> None:
    stages = [[A, A1, A2], [B, B1]]
    usual, crew = await Crew.of(stages, hosted=hosted), await audited(stages, hosted=hosted)
    await played(usual)
    leader = await played(crew)
    outcomes = crew.side.events.of(HopAudited)
    assert [event.reason for event in outcomes if event.outcome != "passed"] == []
    assert len(outcomes) == 12
    assert crew.side.trainer.activity().audits == AuditCounts(12)
    assert (leader.aside, leader.accused, len(leader.finished)) == ({}, [], 6)
    assert crew.sums() == usual.sums()


@pytest.mark.parametrize("lie", ["output", "gradient"])
async def test_hop_that_most_find_wrong_is_done_again_by_others_and_its_replica_accused(lie: str) -> None:
    honest, crew = await Crew.of([[A1], [B]]), await audited()
    if lie == "output":
        crew.replicas[A].part.scale = 3.0
    else:
        crew.replicas[A].part.backward_input = Wrong().backward_input  # type: ignore[method-assign]
    leader = await played(crew)
    assert told(crew)["failed"] == {A}
    assert "disputed" not in told(crew)
    assert all(A not in journey.route for journey in leader.finished)
    assert (leader.aside, len(leader.finished)) == ({}, 6)
    for claim, found in leader.accused:  # before it was found out it judged others
        assert [one.auditor for one in found if one.wrong] == ([A1, A2] if claim.accused == A else [A])
        for one in found:
            signed = audit_bytes(RUN, claim.key, 0, claim.accused, claim.receipt.signature, one.wrong)
            assert verify(one.auditor, signed, one.signature)
    accused = [claim.accused for claim, _ in leader.accused]
    assert A in accused
    await played(honest)
    assert crew.sums() == honest.sums()
    assert crew.side.part.held == honest.side.part.held
    assert crew.side.trainer.activity().audits.wrong == accused.count(A)


@pytest.mark.parametrize("closed", [False, True], ids=["in time", "not any more"])
async def test_microbatch_is_reported_when_its_leader_knows_who_did_it_wrong(
    closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    crew, leader, known, told = await audited(), FakeLeader(6), asyncio.Event(), set[MicrobatchId]()
    crew.replicas[A].part.scale = 3.0

    async def accuse(claim: HopClaim, found: object) -> None:
        told.add(claim.key.microbatch)
        await known.wait()

    leader.accuse = accuse  # type: ignore[method-assign]
    async with crew.working():
        feeding = asyncio.create_task(leader.fed_by(crew.side.trainer))
        await eventually(lambda: told and len(told) + len(leader.finished) == 6)
        assert told.isdisjoint(one.key.microbatch for one in leader.finished)
        (leader.over if closed else known).set()
        await feeding
    assert len(leader.finished) == 6 - closed * len(told)
    assert caplog.text.count("step 1, its leader has not said that it knows what") == closed * len(told)


async def test_of_two_that_differ_neither_is_accused_and_the_other_does_the_hop() -> None:
    crew = await audited([[A, A1], [B]])
    crew.replicas[A].part.scale = 3.0
    leader = await crew.feed(6)
    assert (leader.aside, leader.accused, len(leader.finished)) == ({}, [], 6)
    disputed = [event for event in crew.side.events.of(HopAudited) if event.outcome == "disputed"]
    assert disputed
    assert len(disputed) == len({event.microbatch for event in disputed}), "a stage is doubted once"
    assert not crew.side.wiring.on_probation(now=0.0), "nobody knows which of them is right"


@pytest.mark.parametrize("stage", [[A, A1], [A, A1, A2], [A, A1, A2, A3]])
async def test_auditor_that_calls_what_is_right_wrong_stands_alone(stage: list[PeerId]) -> None:
    crew = await audited([stage, [B]])
    answer = crew.replicas[A1].server._auditing

    async def lies(*about: Any) -> Any:
        return Found("wrong", "because I say so")

    answer._judge = lies  # type: ignore[method-assign]
    leader = await crew.feed(6)
    assert (leader.aside, len(leader.finished)) == ({}, 6)
    assert "failed" not in told(crew)
    if len(stage) == 2:
        assert told(crew)["disputed"] == {A}
        assert leader.accused == []
    else:
        assert {[one.auditor for one in found if one.wrong][0] for _, found in leader.accused} == {A1}
        assert "disputed" not in told(crew)


async def test_what_nobody_can_judge_counts_and_is_told() -> None:
    crew = await audited([[A], [B, B1]])
    for peer in (B, B1):
        crew.replicas[peer].server._auditing._open[TRAINER] = MAX_AUDITS
    leader = await crew.feed(2)
    assert len(leader.finished) == 2
    assert {event.outcome for event in crew.side.events.of(HopAudited)} == {"unjudged"}
    reasons = {event.stage: event.reason for event in crew.side.events.of(HopAudited)}
    assert reasons[0] == "the stage has no other replica that is there"
    assert "hops are computed again" in reasons[1]
    assert crew.side.trainer.activity().audits == AuditCounts(4, unjudged=4)


async def test_dead_auditor_is_passed_over() -> None:
    crew = await audited()
    crew.side.context.replicas.gone = lambda: {A1}
    crew.kill(A1)
    leader = await crew.feed(4)
    assert len(leader.finished) == 4
    assert {event.by for event in crew.side.events.of(HopAudited) if event.stage == 0} <= {(A,), (A2,)}


class Judges:
    """What replicas say of a hop of A; those that say nothing are silent."""

    def __init__(self, **said: str) -> None:
        self.clock, self.said, self.asked = FakeClock(), said, list[tuple[PeerId, float]]()
        self.losses: dict[str, float] = {}

    async def call(self, peer: PeerId, rpc: Any, body: Audit, *, timeout_s: float) -> Any:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self.asked.append((peer, timeout_s))
        verdict: Any = self.said.get(peer)
        if verdict is None:
            await self.clock.sleep(timeout_s)
            raise DeadlineMissed("no answer", peer=peer)
        await self.clock.sleep(0.5)
        signed = audit_bytes(RUN, body.key, body.hop, A, body.receipt, wrong=verdict == "wrong")
        return Audited(verdict=verdict, loss_sum=self.losses.get(peer, 0.0), signature=sign(peer, signed)), b""

    def audits(self, judges: Collection[PeerId], chance: Callable[[], float] = lambda: 0.0) -> Audits:
        """Have these judge."""
        return Audits(
            run=RUN, endpoint=self, clock=self.clock, verify=verify,  # type: ignore[arg-type]
            judges=lambda key, hop, peer: list(judges), share=1.0, chance=chance,
        )  # fmt: skip


CLAIM = HopClaim(JourneyKey(1, microbatch(0), 0, ""), (A, B), 0, Receipt(bytes(64)))


async def test_judge_that_lets_others_wait_has_as_long_as_they_need_and_is_not_asked_again_soon() -> None:
    judges = Judges(a2="right")
    audits = judges.audits([A2])
    assert (await audits.judge(CLAIM)).outcome == "passed"
    audits.judges = lambda key, hop, peer: [A1, A2]
    assert [(await audits.judge(CLAIM)).by for _ in range(3)] == [(A2,)] * 3
    await judges.clock.sleep(SILENT_S)
    await audits.judge(CLAIM)
    soon = AT_LEAST_S + PATIENCE * 0.5
    assert [one for one in judges.asked if one[0] == A1] == [(A1, soon), (A1, soon)]


async def test_who_is_asked_first_nobody_knows_but_the_trainer() -> None:
    judges, drawn = Judges(a1="right", a2="right", a3="right"), random.Random(0)
    audits = judges.audits([A1, A2, A3], drawn.random)
    for _ in range(20):
        await audits.judge(CLAIM)
    assert {peer for peer, _ in judges.asked} == {A1, A2, A3}


@pytest.mark.parametrize(
    ("said", "outcome", "against"),
    [
        ({"a1": "withheld", "a2": "right"}, "passed", ()),
        ({"a1": "withheld", "a2": "withheld"}, "withheld", (A1, A2)),
        ({"a1": "withheld", "a2": "unjudged"}, "withheld", (A1,)),
    ],
)
async def test_one_that_says_that_it_was_given_nothing_is_not_enough(
    said: dict[str, str], outcome: str, against: tuple[PeerId, ...]
) -> None:
    found = await Judges(**said).audits([A1, A2]).judge(CLAIM)
    assert (found.outcome, found.against) == (outcome, against)


@pytest.mark.parametrize(
    ("losses", "outcome", "against"),
    [
        ({"a1": 9.0, "a2": 4.0}, "passed", ()),
        ({"a1": 9.0, "a2": 9.0}, "disputed", (A1, A2)),
        ({"a1": 9.0}, "disputed", (A1,)),
    ],
)
async def test_one_that_alone_has_another_loss_keeps_no_hop_from_counting(
    losses: dict[str, float], outcome: str, against: tuple[PeerId, ...]
) -> None:
    judges = Judges(**dict.fromkeys(losses, "right"))
    judges.losses = losses
    claim = CLAIM._replace(receipt=Receipt(bytes(64), loss_sum=4.0, tokens=2))
    found = await judges.audits([PeerId(peer) for peer in losses]).judge(claim)
    assert (found.outcome, found.against) == (outcome, against)


def give_nothing(crew: Crew, *peers: PeerId) -> list[str]:
    """From now on these do not give again what they got or sent."""
    asked = list[str]()
    for peer in peers:
        recalls = crew.replicas[peer].server._recalls

        async def refuse(caller: PeerId, body: Recall, incoming: Any, peer: PeerId = peer) -> Any:
            asked.append(f"{peer}: {body.what}")
            raise Refused("never")

        recalls.answer = refuse  # type: ignore[method-assign]
    return asked


async def test_what_a_replica_does_not_give_its_neighbours_do() -> None:
    crew = await audited()
    asked = give_nothing(crew, A, A1, A2)
    leader = await crew.feed(3)
    assert len(asked) >= 6
    assert len(leader.finished) == 3
    assert {event.outcome for event in crew.side.events.of(HopAudited) if event.stage == 0} == {"passed"}


async def test_hop_of_who_does_not_give_what_it_was_computed_from_is_done_by_another() -> None:
    crew = await audited()
    give_nothing(crew, A, B)
    leader = await crew.feed(6)
    assert (leader.aside, leader.accused, len(leader.finished)) == ({}, [], 6)
    assert told(crew)["withheld"] == {A}
    assert all(A not in journey.route for journey in leader.finished)


async def test_journey_is_not_told_of_before_its_hops_are_judged_and_can_be_given_up_meanwhile() -> None:
    crew = await audited()
    waits, begun = asyncio.Event(), asyncio.Event()
    for peer in (A, A1, A2):
        auditing = crew.replicas[peer].server._auditing
        honest = auditing._judge

        async def late(*about: Any, honest: Any = honest) -> Any:
            begun.set()
            await waits.wait()
            return await honest(*about)

        auditing._judge = late  # type: ignore[method-assign]
    async with crew.working():
        leader = FakeLeader(1)
        feeding = asyncio.create_task(crew.side.trainer.feed(1, leader))
        await asyncio.wait_for(begun.wait(), 60)
        await eventually(lambda: crew.held(B))
        assert leader.finished == []
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        assert crew.side.trainer._under_way() == []
        waits.set()
        await eventually(lambda: all(crew.replicas[peer].server._auditing._open.total() == 0 for peer in (A, A1, A2)))
        assert leader.finished == []


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.03, 0.05, 0.25, 0.5, 1.0])
def test_the_more_hops_were_found_right_the_fewer_are_drawn_and_no_fewer_than_of_all(least: float) -> None:
    shares = [share_of(least, checked) for checked in range(STANDING + 1)]
    assert shares[0] == pytest.approx(max(least, NEWCOMER_SHARE))
    assert shares == sorted(shares, reverse=True)
    assert all(share >= least for share in shares)
    assert {share_of(least, checked) for checked in (STANDING, 10**9)} == {least}


@pytest.mark.parametrize(("said", "left"), [("right", 6), ("unjudged", 5), ("withheld", 0), ("wrong", 0)])
async def test_only_what_was_found_right_counts_and_what_does_not_count_begins_it_anew(said: str, left: int) -> None:
    audits = Judges(a1=said).audits([A1], lambda: 0.1)
    audits.share, audits.checked[A] = 0.05, 5
    assert audits.draws(A), "a replica of which five hops were found right"
    found = await audits.judge(CLAIM)
    assert found.counts == (left > 0)
    assert audits.checked[A] == left
    assert audits.draws(A) is (left < 6)
    audits.checked[A] = STANDING
    assert not audits.draws(A)


@pytest.mark.parametrize("said", ["right", "unjudged", "withheld", "wrong"])
async def test_replica_with_which_the_run_began_is_known_until_a_hop_of_it_does_not_count(said: str) -> None:
    audits = Judges(a1=said).audits([A1], lambda: 0.1)
    audits.share, audits.known = 0.05, {A}
    assert not audits.draws(A)
    assert audits.draws(A1)
    found = await audits.judge(CLAIM)
    assert audits.draws(A) is not found.counts


async def test_lie_that_a_neighbour_covers_is_not_proven_and_does_not_count() -> None:
    crew = await audited()
    crew.replicas[A].part.scale *= 1.5
    crew.replicas[A].server._recalls.output = AsyncMock(side_effect=Refused("never"))  # type: ignore[method-assign]
    asked_for = give_nothing(crew, B)
    leader = await played(crew)
    assert asked_for
    assert told(crew)["withheld"] == {A}
    assert A not in {claim.accused for claim, _ in leader.accused}, "as a judge it calls others' hops wrong"
    assert {one.route[0] for one in leader.finished} <= {A1, A2}


# --- what an auditor takes --------------------------------------------------------------------------------------------


async def asked(crew: Crew, peer: PeerId, caller: PeerId = TRAINER, *, signed: int = 0, **changes: Any) -> Any:
    """What a replica answers when it is asked to judge the first hop of the first microbatch of a crew, whose receipt
    is ``signed`` with so many tokens."""
    state = next(iter(crew.replicas[A].server._table))
    content, seals = state.hashes.content.to_wire(), (state.hashes.input.signature, state.hashes.gradient.signature)
    receipt = sign(A, receipt_bytes(RUN, state.key, 0, told_digest(content, seals), signed))
    fields: dict[str, Any] = state.key._asdict() | {
        "route": (A, B), "hop": 0, "content": content, "seals": seals, "receipt": receipt, "tokens": 0,
    }  # fmt: skip
    endpoint = crew.side.context.endpoint if caller == TRAINER else crew.replicas[caller].endpoint
    said, _ = await endpoint.call(peer, AUDIT, Audit(**fields | changes), timeout_s=5)
    return said


@pytest.mark.parametrize(
    ("peer", "caller", "changes", "error", "said"),
    [
        (A1, B, {}, Refused, "only its trainer"),
        (A1, A2, {}, Refused, "only its trainer"),
        (B, TRAINER, {}, Refused, "this is stage 1"),
        (A, TRAINER, {}, Refused, "itself"),
        (A1, TRAINER, {"route": (A2, B)}, Violation, "not of a2"),
        (A1, TRAINER, {"receipt": bytes(64)}, Violation, "not of a0"),
        (A1, TRAINER, {"content": bytes(128)}, Violation, "not of a0"),
        (A1, TRAINER, {"tokens": 7}, Violation, "not of a0"),
        (A1, TRAINER, {"route": (A, A2)}, Refused, "does not hold the stage"),
        (A1, TRAINER, {"step": 3}, WrongStep, "step 1 is"),
        (A1, TRAINER, {"step": 2}, WrongStep, "not open"),
        (A1, TRAINER, {"after": "ff" * 8}, WrongStep, "another record"),
    ],
)
async def test_what_an_auditor_does_not_take(
    peer: PeerId, caller: PeerId, changes: dict[str, Any], error: type[PeerError], said: str
) -> None:
    crew = await Crew.of(THREE)
    crew.side.context.replicas.gone = lambda: {A1, A2}
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        assert (await asked(crew, A1)).verdict == "right"
        with pytest.raises(error, match=said):
            await asked(crew, peer, caller, **changes)
        auditing = crew.replicas[A1].server._auditing
        auditing._open[TRAINER] = MAX_AUDITS
        assert (await asked(crew, A1)).verdict == "right", "it is known already"
        auditing._said.clear()
        with pytest.raises(Busy):
            await asked(crew, A1)


async def test_word_on_one_receipt_is_none_on_another_with_other_tokens() -> None:
    crew = await Crew.of(THREE)
    crew.side.context.replicas.gone = lambda: {A1, A2}
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        said = [await asked(crew, A1, signed=tokens, tokens=tokens) for tokens in (0, 7, 0)]
    assert [one.verdict for one in said] == ["right", "wrong", "right"]


async def test_one_of_several_trainers_leaves_others_half_of_a_judge_and_has_no_more_judged_than_it_feeds() -> None:
    crew, another = await Crew.of(THREE, limits={"max_fed": 2}), PeerId("tr-2")
    crew.side.context.replicas.gone = lambda: {A1, A2}
    judge = crew.replicas[A1].server
    auditing = judge._auditing
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        auditing._open[TRAINER] = MAX_AUDITS // 2
        assert (await asked(crew, A1)).verdict == "right", "nobody else asks"
        auditing._said.clear()
        now = judge._rules.participants
        judge._rules.participants = Participants(now.trainers | {another}, now.stages)
        with pytest.raises(Busy, match="2 of them of tr"):
            await asked(crew, A1)
        auditing._open = Counter({another: MAX_AUDITS // 2})
        assert (await asked(crew, A1)).verdict == "right"
        auditing._said.clear()
        with pytest.raises(Refused, match="2 hops of tr"):
            await asked(crew, A1)


@pytest.mark.parametrize("factor", [1 + 2e-7, 1 + 1e-3])
async def test_what_differs_in_the_last_bits_is_right_and_what_differs_more_is_not(factor: float) -> None:
    crew = await Crew.of(THREE)
    crew.side.context.replicas.gone = lambda: {A1, A2}
    crew.replicas[A1].part.scale *= factor
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        recalls, fetched = crew.replicas[B].server._recalls, list[str]()
        honest = recalls.retained

        def retained(work: StepWork, what: Any) -> Any:
            fetched.append(what)
            return honest(work, what)

        recalls.retained = retained  # type: ignore[method-assign]
        said = await asked(crew, A1)
        assert await asked(crew, A1) == said
    assert fetched == ["input"], "only where the hashes differ, and once"
    if factor < 1 + 1e-5:
        assert said.verdict == "right"
    else:
        assert (said.verdict, said.reason) == (
            "wrong",
            "the output: 2 of 2 rows are further out than 2e-05 of their length",
        )


@pytest.mark.parametrize("what", ["output", "sent"])
async def test_what_a_receipt_does_not_say_is_not_wrong(what: str) -> None:
    crew = await Crew.of(THREE)
    crew.side.context.replicas.gone = lambda: {A1, A2}
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        setattr(next(iter(crew.replicas[A].server._table)).hashes, what, NOTHING)
        assert (await asked(crew, A1)).verdict == "unjudged"


async def test_what_a_replica_sent_to_nobody_it_gives_who_judges_it() -> None:
    crew = await Crew.of(THREE)
    crew.side.context.replicas.gone = lambda: {A1, A2}
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        crew.replicas[A].part.scale *= 1 + 2e-7  # another machine, whose output B was not sent
        state = next(iter(crew.replicas[A].server._table))
        payload = await crew.replicas[A].server._recalls.output(Errand.of(state, 5.0))
        state.hashes.output = await hash_of(payload)
        assert (await asked(crew, A1)).verdict == "right"


async def test_judging_changes_nothing_of_what_the_judge_adds_of_the_same_microbatch() -> None:
    crew, work = await Crew.of(THREE), StepWork(1, microbatch(0))
    crew.side.context.replicas.gone = lambda: {A1, A2}
    did, judges = (crew.replicas[peer].compute.bounds for peer in (A, A1))
    for bounds in (did, judges):
        bounds.open(0, (1.0, 1e9), 1.0)
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        judges.came(work, 0.25)
        before = judges.of(work)
        assert (await asked(crew, A1)).verdict == "right"
        assert judges.of(work) == before != did.of(work)


class Less(CheapPart):
    """Takes nearly as much away as comes, or less."""

    def __init__(self, output: float, gradient: float) -> None:
        super().__init__()
        self.less = output, gradient

    def forward(self, x: torch.Tensor, *, seed: int, work: StepWork, graph: bool = True) -> tuple[torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        return x - self.less[0], super().forward(x, seed=seed, work=work, graph=graph)[1]

    def backward_input(self, graph: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        gradient, rest = super().backward_input(graph, grad_output)
        return None if gradient is None else gradient - 1 - self.less[1], rest


@pytest.mark.parametrize("at", [0, 1], ids=["output", "gradient"])
@pytest.mark.parametrize(("of", "away", "verdict"), [(1 - 1e-6, 2.4e-7, "unjudged"), (0.5, 1e-3, "wrong")])
async def test_where_the_last_bits_decide_nobody_is_called_wrong(at: int, of: float, away: float, verdict: str) -> None:
    crew = await Crew.of(THREE)
    crew.side.context.replicas.gone = lambda: {A1, A2}
    for peer, more in ((A, 0.0), (A1, away)):
        less = [0.25, 0.25]  # of 1, what comes, and of 2
        less[at] = (1 + at) * (of + more)
        part = Less(*less)
        crew.replicas[peer].part.forward = part.forward  # type: ignore[method-assign]
        crew.replicas[peer].part.backward_input = part.backward_input  # type: ignore[method-assign]
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        said = await asked(crew, A1)
    assert said.verdict == verdict
    assert said.reason.startswith(("the output: ", "the gradient of the input: ")[at])
    assert ("hangs on the last bits" in said.reason) is (verdict == "unjudged")


@pytest.mark.parametrize("what", ["input", "received"])
async def test_what_came_is_given_to_who_sent_it_and_to_who_holds_the_same_stage(what: Any) -> None:
    crew = await Crew.of([[A, A1, A2], [B, B1]])
    crew.side.context.replicas.gone = lambda: {A1, A2, B1}
    async with crew.working():
        await FakeLeader(1).fed_by(crew.side.trainer)
        body = Recall(step=1, microbatch=microbatch(0), route=(A, B), hop=0, what=what)

        async def ask(caller: PeerId) -> Any:
            return await crew.replicas[caller].endpoint.call(A, RECALL, body, timeout_s=5, max_reply_bytes=32)

        assert memoryview((await ask(A1))[1]).nbytes == 32
        allowed = what == "received"
        for other in (B, B1):
            if allowed and other == B:
                await ask(other)
                continue
            with pytest.raises(Refused, match="goes to"):
                await ask(other)
        next(iter(crew.replicas[A].server._table)).clear()
        with pytest.raises(Refused, match="not held any more"):
            await ask(A1)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_rows_are_measured_by_their_own_length_or_the_usual() -> None:
    right = torch.ones(4, 16)
    right[3] = 0.0
    said = right.clone()
    said[0] *= 1 + 5e-6
    said[1] *= 1 + 2e-5
    said[3] = 1e-9
    assert far_rows(right, said, 1e-5).tolist() == [False, True, False, False]
    said[3] = 1e-7
    assert far_rows(right, said, 1e-5).tolist() == [False, True, False, True]


def test_where_most_rows_are_nothing_the_usual_length_is_that_of_the_others() -> None:
    right = torch.zeros(8, 16)
    right[:2], right[2] = 1.0, 1e-12
    said = right.clone()
    said[2] *= -1
    assert far_rows(right, said, 1e-5).tolist() == [False] * 8
    assert far_rows(torch.zeros(2, 4), torch.zeros(2, 4), 1e-5).tolist() == [False, False]


def answers(right: Tensor, said: Tensor, *, mixture: bool = False) -> str:
    boundary = BoundarySpecs(
        activation=TensorSpec((1, *right.shape), "float32"), tokens=token_spec(1, len(right)), codec=FLOAT32,
        hosted=False,
    )  # fmt: skip
    ours, theirs = (bytes(boundary.codec.encode(one[None], None)) for one in (right, said))  # type: ignore[arg-type]
    return compared(boundary, ours, theirs, 1, "backward", mixture=mixture).verdict


def test_no_lie_has_one_machine_call_wrong_what_another_finds_right() -> None:
    ours = torch.ones(2, 16, dtype=torch.float64)
    theirs, found = ours * (1 + 3e-6), set[tuple[str, str]]()  # honest machines
    for lie in torch.linspace(0.0, 3e-5, 400, dtype=torch.float64):
        said = (ours * (1 - lie)).float()
        found.add((answers(ours.float(), said), answers(theirs.float(), said)))
    assert {("right", "right"), ("wrong", "wrong")} < found
    assert found.isdisjoint({("right", "wrong"), ("wrong", "right")})


def test_row_that_another_expert_computes_may_be_different_but_not_of_any_length() -> None:
    right = torch.ones(100, 16)
    said = right.clone()
    said[3] = -0.5
    assert (answers(right, said), answers(right, said, mixture=True)) == ("wrong", "right")
    said[3] = 1e6
    assert answers(right, said, mixture=True) == "wrong"


def test_payload_of_another_length_or_with_other_rows_is_not_the_same() -> None:
    boundary = specs()
    one = bytes(boundary.codec.encode(torch.ones(1, 2, 4), None))  # type: ignore[arg-type]
    assert compared(boundary, one, one, 1, "forward") == Found("right")
    with pytest.raises(Violation):
        compared(boundary, one, one[:-4], 1, "forward")

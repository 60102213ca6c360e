"""How a run starts, and how it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from swarm.consensus.placement import Candidate, assign_stages
from swarm.consensus.records import NO_RECORD, CloseRecord, Contribution, acceptance_bytes
from swarm.consensus.slowness import Barred
from swarm.consensus.trials import Tally, Trial
from swarm.errors import OutOfSync, Refused, RunEnded
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId
from swarm.membership.founding_record import FoundingTimeout as Waits
from swarm.membership.founding_record import Origin, enough, found, founding_record, gather_candidates, genesis
from swarm.models.spec import SplitConfig
from swarm.network.protocols import AnyMethod
from swarm.schema import Empty
from swarm.sim.network import SimNetwork
from swarm.step.calls import StepCalls
from swarm.step.messages import DECIDE, PROPOSE, Accepted, Decide, Propose
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.membership import RUN, FakeClock, sign

TWO_STAGES = SplitConfig(stages=2).parts

DIGESTS = {PartName("stage-0"): "0" * 64, PartName("stage-1"): "1" * 64, ENDS: "2" * 64}
ORIGIN = Origin(digests=DIGESTS)
ORIGIN_OF_ONE = Origin(digests={PartName("stage-0"): "0" * 64, ENDS: "2" * 64})
JUDGED = Trial(times=1, until=50, tallies={"stage-0": Tally(words=9)})


def candidate(peer: str, role: Any, stage: int | None = None) -> Candidate:
    return Candidate(peer=peer, role=role, name=peer, stage=stage, addresses=())


CANDIDATES = [
    candidate("F", "bootstrap"),
    candidate("A", "stage"),
    candidate("B", "stage", 0),
    candidate("T", "trainer"),
]


async def test_gathering_without_enough_ends_saying_who_is_missing() -> None:
    clock = FakeClock()

    async def candidates() -> Sequence[Candidate]:
        return CANDIDATES[:2]

    with pytest.raises(RunEnded, match="after 60 s 1 of 2 stage hosts and 0 of 1 trainers"):
        await gather_candidates(candidates, clock, enough=lambda found: enough(found, 2, 1), patience_s=60)
    assert 60 < clock.now < 61


def test_genesis_starts_the_chain_and_every_cursor() -> None:
    roster, _ = assign_stages(CANDIDATES, TWO_STAGES)
    first = genesis(RUN, roster, DIGESTS)
    assert (first.step, first.previous, first.committed, first.loss) == (0, NO_RECORD, (), 0.0)
    assert first.cursors == {"T": (0, 0)}
    assert first.members.columns() == (("B",), ("A",))


def test_founding_record_continues_where_the_checkpoint_s_record_ended() -> None:
    roster, _ = assign_stages(CANDIDATES, TWO_STAGES)
    microbatch = MicrobatchId(PeerId("T"), "0" * 16, 0, 6)
    closed = genesis(RUN, roster, DIGESTS).model_copy(
        update={
            "step": 40,
            "committed": (Contribution(microbatch=microbatch, tokens=1, loss_sum=1.0, route=("A",)),),
            "cursors": {"T": (1, 7), "gone": (0, 3)},
            "previous": "9" * 64,
        }
    )
    closed = closed.model_copy(update={"trials": {"T": Trial(tallies={"stage-0": Tally(words=9)}), "U": JUDGED}})
    others = [*CANDIDATES, candidate("U", "trainer")]
    again, _ = assign_stages(others, TWO_STAGES)
    record = founding_record(RUN, again, Origin.after(closed))
    assert record.founding
    assert (record.step, record.previous, record.digests) == (40, closed.hash(), closed.digests)
    assert record.cursors == {"T": (1, 7), "gone": (0, 3), "U": (0, 0)}
    assert record.trials == {"U": Trial(times=1, until=50)}
    assert record.members.peers == again.peers


def test_founding_record_of_a_run_resumed_twice_follows_the_same_record_and_keeps_out_whom_that_did() -> None:
    roster, _ = assign_stages(CANDIDATES, TWO_STAGES)
    barred, rests = {"L": Barred(times=1, until=300)}, {"T": Trial(times=1, until=99)}
    first = founding_record(
        RUN, roster, Origin(digests=DIGESTS, step=40, previous="9" * 64, barred=barred, trials=rests)
    )
    assert (first.barred, first.trials, first.members.unfed) == (barred, rests, {"T": 99})
    assert founding_record(RUN, roster, Origin.after(first)) == first
    start = genesis(RUN, roster, DIGESTS)
    assert founding_record(RUN, roster, Origin.after(start)) == start


class Newcomer:
    """Accepts what the founder proposes, or does what the test says instead."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.on_propose: Callable[[CloseRecord], None] = lambda record: None
        self.on_decide: Callable[[Decide], None] = lambda decision: None
        self.decided: list[Decide] = []

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [PROPOSE.handled(self._propose), DECIDE.handled(self._decide)]

    async def _propose(self, caller: PeerId, body: Propose) -> Accepted:
        self.on_propose(body.record)
        return Accepted(signature=sign(self.peer, acceptance_bytes(body.record, body.term)))

    async def _decide(self, caller: PeerId, body: Decide) -> Empty:
        self.on_decide(body)
        self.decided.append(body)
        return Empty()


async def meet() -> tuple[StepCalls, dict[str, Newcomer]]:
    network, newcomers = SimNetwork(LoopClock()), {}
    endpoints = {member.peer: network.endpoint(member.peer) for member in CANDIDATES}
    for name, endpoint in endpoints.items():
        newcomers[name] = Newcomer(PeerId(name))
        await endpoint.enter(RUN)
        endpoint.mount(newcomers[name])
    return StepCalls(endpoints["F"]), newcomers


@pytest.mark.parametrize("others_after", [0, 3])
async def test_founding_replaces_who_does_not_accept_within_its_time_when_another_waits(others_after: int) -> None:
    calls, newcomers = await meet()
    clock, asked = FakeClock(), list[set[str]]()

    def refuse(record: CloseRecord) -> None:
        raise Refused("not yet")

    newcomers["A"].on_propose = refuse
    without = [candidate("F", "bootstrap"), candidate("B", "stage", 0), candidate("T", "trainer")]

    async def instead(late: Collection[PeerId], since: float) -> Sequence[Candidate] | None:
        assert since == 0.0
        asked.append(set(late))
        return without if len(asked) > others_after else None

    waits = Waits(clock=clock, replace_s=120.0, instead=instead)
    record, _ = await found(calls, RUN, CANDIDATES, ORIGIN_OF_ONE, waits, timeout_s=5)
    assert asked == [{"A"}] * (others_after + 1)
    assert clock.now >= 120.0
    assert record.members.peers == ("B", "F", "T")
    for name in "BFT":
        (decision,) = newcomers[name].decided
        assert (decision.record, decision.term, set(decision.acceptances)) == (record.hash(), 1, {"B", "F", "T"})
        assert decision.acceptances[name] == sign(PeerId(name), acceptance_bytes(record, 1))
    assert not newcomers["A"].decided


async def test_founding_patience_ends_naming_who_did_not_accept() -> None:
    calls, newcomers = await meet()

    def refuse(record: CloseRecord) -> None:
        raise Refused("the weights do not match their digest")

    newcomers["A"].on_propose = refuse
    with pytest.raises(RunEnded, match=r"after 3 s A \(A\): the weights"):
        await found(calls, RUN, CANDIDATES, ORIGIN, Waits(clock=FakeClock(), seconds=3), timeout_s=5)
    assert not any(newcomer.decided for newcomer in newcomers.values())


async def test_founding_that_the_founder_refuses_is_over_at_once() -> None:
    calls, newcomers = await meet()

    def refuse(record: CloseRecord) -> None:
        raise Refused("another record was accepted for this step")

    newcomers["F"].on_propose = refuse
    with pytest.raises(Refused, match="^F: another record"):
        await found(calls, RUN, CANDIDATES, ORIGIN, Waits(clock=FakeClock()), timeout_s=5)
    assert not any(newcomer.decided for newcomer in newcomers.values())


@pytest.mark.parametrize("peer", ["A", "F"])
async def test_founding_that_one_refuses_too_late_is_decided_by_the_others(peer: str) -> None:
    """It may have been started anew since it accepted it. The founder itself cannot go on then."""
    calls, newcomers = await meet()

    def refuse(decision: Decide) -> None:
        raise Refused("never heard of it")

    newcomers[peer].on_decide = refuse
    founding = found(calls, RUN, CANDIDATES, ORIGIN, Waits(clock=FakeClock()), timeout_s=5)
    if peer == "F":
        with pytest.raises(OutOfSync, match="step 0 is decided, but F: never heard of it"):
            await founding
    else:
        record, _ = await founding
        assert record.step == 0
    assert {name for name, newcomer in newcomers.items() if newcomer.decided} == {"A", "B", "F", "T"} - {peer}

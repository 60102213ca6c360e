"""An observer with several replicas to help it: they die, stall, lie and differ; it follows the run all the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus.copies import KEPT_UPDATES
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.errors import Busy, OutOfSync, Refused, Unreachable, Violation, WrongStep
from swarm.ids import PeerId, stage_part
from swarm.membership import observer as starting
from swarm.membership.observer import Observer
from swarm.membership.observer_service import LEASE_S, MAX_OBSERVERS
from swarm.membership.observer_sources import LONGEST_PATIENCE_S, MAX_IDLE, PATIENCE_S, UpdateSources, UpdateTimeout
from swarm.network.protocols import Answer
from swarm.optim.part import TrainedPart
from swarm.state.snapshot import digest
from swarm.step.observe_messages import LEAVE, NEXT, STANDING, START, STAY, Decided, Staying, StayRequest
from tests.harness.rigs.membership import (
    CONTACT,
    DONOR,
    JOINER,
    OTHER,
    STAGE,
    ObserverBench,
    Run,
    listed,
    signed,
    turns,
)

THIRD, FOURTH = PeerId("F"), PeerId("G")
REPLICAS = (DONOR, OTHER, THIRD, FOURTH)
WIDE = Roster([*(listed(peer) for peer in REPLICAS), listed(CONTACT, "trainer", "ends")])


async def bench_of(*replicas: PeerId, steps: int = 2) -> ObserverBench:
    """A run in which all of :data:`REPLICAS` take part, and these serve."""
    run = Run()
    run.decisions[0] = signed(run.head.model_copy(update={"roster": WIDE.members}), WIDE.peers)
    for _ in range(steps):
        run.close()
    bench = ObserverBench(run, replicas=replicas)
    await bench.open()
    return bench


async def following(*replicas: PeerId) -> tuple[ObserverBench, Observer, TrainedPart]:
    bench = await bench_of(*replicas)
    observer = bench.observer()
    return bench, observer, await bench.installed(observer)


async def step(bench: ObserverBench, observer: Observer, part: TrainedPart) -> None:
    """One more, which the observer takes."""
    waiting = asyncio.create_task(observer.follow())
    await turns()
    decision = await bench.close()
    assert await waiting == decision.record
    assert digest(part.snapshot()) == digest(bench.run.part.snapshot())


def kept(bench: ObserverBench, peer: PeerId) -> list[int]:
    """Steps of which a peer keeps the update."""
    return bench.services[peer]._updates.steps(STAGE)


# --- beginning -----------------------------------------------------------------------------------------------------


async def test_observer_whose_donors_are_about_to_close_the_step_of_the_others_waits_for_them() -> None:
    bench = await bench_of(*REPLICAS)
    decision = bench.run.close()
    await bench.publish(decision, DONOR, OTHER, THIRD, CONTACT)
    observer = bench.observer()
    starting_ = asyncio.create_task(observer.start(CONTACT))
    await turns()
    assert not starting_.done()
    await bench.publish(decision, FOURTH)
    assert (await starting_).record == decision.record
    assert set(observer.donors) == set(REPLICAS)


async def test_observer_takes_the_step_that_most_can_give_and_lets_the_others_go() -> None:
    bench = await bench_of(DONOR, OTHER, THIRD)
    older = bench.run.head
    await bench.publish(bench.run.close(), DONOR)
    observer = bench.observer()
    assert (await observer.start(CONTACT)).record == older
    assert set(observer.donors) == {OTHER, THIRD}
    await turns()
    assert not bench.donors[DONOR].serves(JOINER, STAGE)


async def test_observer_of_donors_that_differ_takes_the_newest_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "LAGGARD_S", 0.01)
    bench = await bench_of(DONOR, OTHER)
    decision = bench.run.close()
    await bench.publish(decision, DONOR, CONTACT)
    observer = bench.observer()
    assert (await observer.start(CONTACT)).record == decision.record
    assert observer.donors == (DONOR,), "the other did not close it in time"


async def test_observer_with_a_donor_that_does_not_answer_begins_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "LAGGARD_S", 0.01)
    bench = await bench_of(*REPLICAS)
    bench.network.cut(DONOR, JOINER)
    bench.network.kill(OTHER)
    observer = bench.observer()
    await observer.start(CONTACT)
    assert set(observer.donors) == {THIRD, FOURTH}


async def test_observer_shown_another_history_by_one_donor_begins_with_those_that_the_contact_confirms() -> None:
    bench = await bench_of(*REPLICAS)

    def forge(body: Any, answer: Answer) -> Answer:
        assert isinstance(answer.body, Decided)
        return Answer(Decided.of(signed(answer.body.record.model_copy(update={"tokens": 9}))))

    bench.twists[START] = forge
    observer = bench.observer()
    assert (await observer.start(CONTACT)).record == bench.run.head
    assert set(observer.donors) == {OTHER, THIRD, FOURTH}
    only = bench.observer(DONOR)
    with pytest.raises(Violation, match="another record of step 2 than C has"):
        await only.start(CONTACT)


async def test_observer_with_a_state_in_part_finds_who_keeps_it_for_others() -> None:
    bench = await bench_of(DONOR, OTHER)
    await bench.on_network(PeerId("P"))
    first = bench.observer(DONOR, me=PeerId("P"))
    wanted = (await first.start(CONTACT)).record
    for _ in range(3):
        await bench.close()
    observer = bench.observer()
    assert (await observer.start(CONTACT, wanted=wanted)).record == wanted
    assert observer.donors == (DONOR,)
    part = await bench.fetch(wanted, DONOR)
    await observer.begin(bench.run.decisions[2], part)
    for _ in range(3):
        await observer.follow()
    assert digest(part.snapshot()) == digest(bench.run.part.snapshot())
    for _ in range(KEPT_UPDATES):
        await bench.close()
    with pytest.raises(WrongStep):
        await bench.observer().start(CONTACT, wanted=wanted)


async def test_observer_shown_another_record_of_the_step_it_wants_takes_it_from_nobody() -> None:
    bench = await bench_of(DONOR)
    wanted: CloseRecord = bench.run.head.model_copy(update={"tokens": 9})
    with pytest.raises(Violation, match="than was verified before"):
        await bench.observer().start(CONTACT, wanted=wanted)


# --- following -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "between"])
async def test_observer_whose_guide_dies_goes_on_with_the_stand_in(when: str) -> None:
    bench, observer, part = await following(*REPLICAS)
    await step(bench, observer, part)
    guide = observer.donors[0]
    if when == "between":
        bench.network.kill(guide)
    waiting = asyncio.create_task(observer.follow())
    await turns()
    bench.network.kill(guide)
    await bench.close()
    assert (await waiting).step == 4
    assert guide not in observer.donors
    for _ in range(3):
        await step(bench, observer, part)
    assert bench.told == [2, 3, 4, 5, 6, 7]


async def test_observer_survives_as_long_as_one_replica_does() -> None:
    bench, observer, part = await following(*REPLICAS)
    for dead in REPLICAS[:3]:
        await step(bench, observer, part)
        bench.network.kill(dead)
        await step(bench, observer, part)
    assert observer.donors == (FOURTH,)
    bench.network.kill(FOURTH)
    with pytest.raises(Unreachable):
        await observer.follow()
    with pytest.raises(OutOfSync):
        await observer.follow()


async def test_observer_whose_guide_falls_silent_goes_on_with_the_stand_in() -> None:
    bench, observer, part = await following(*REPLICAS)
    await step(bench, observer, part)
    waiting = asyncio.create_task(observer.follow())
    await turns()
    bench.network.cut(DONOR, JOINER)
    for _ in range(4):
        await bench.clock.advance(11.0)
        await turns()
    assert not waiting.done()
    decision = await bench.close()
    assert await waiting == decision.record


async def test_observer_lied_to_by_its_guide_takes_the_update_from_the_stand_in() -> None:
    bench, observer, part = await following(*REPLICAS)
    await step(bench, observer, part)
    bench.twists[NEXT] = lambda body, answer: Answer(answer.body, bytes(len(answer.payload)))
    assert observer.donors[0] == DONOR
    await step(bench, observer, part)
    assert DONOR not in observer.donors


async def test_observer_lets_those_go_that_it_does_not_need_and_keeps_one_more() -> None:
    bench, observer, part = await following(*REPLICAS)
    await step(bench, observer, part)
    assert observer.donors == (DONOR, OTHER)
    await step(bench, observer, part)
    assert (kept(bench, DONOR), kept(bench, OTHER)) == ([4], [4]), "what it has is kept no longer"
    for peer in (THIRD, FOURTH):
        assert kept(bench, peer) == []
        assert not bench.donors[peer].serves(JOINER, STAGE)
    await observer.close()
    await bench.close()
    assert all(kept(bench, peer) == [] for peer in REPLICAS)


async def test_observer_finds_another_stand_in_when_that_dies() -> None:
    bench, observer, part = await following(*REPLICAS)
    await step(bench, observer, part)
    bench.network.kill(OTHER)
    await step(bench, observer, part)
    assert observer.donors == (DONOR, THIRD)
    bench.network.kill(DONOR)
    await step(bench, observer, part)
    await step(bench, observer, part)
    assert observer.donors == (THIRD, FOURTH)


async def test_observer_takes_no_stand_in_that_lacks_what_it_needs_next() -> None:
    bench = await bench_of(DONOR, OTHER)
    behind = bench.run.head
    await bench.close()
    sources = UpdateSources(bench.endpoints[JOINER], STAGE)
    sources.set([DONOR])
    await sources.keep(behind)
    assert sources.peers == (DONOR,), "the other had closed step 3 already, and kept nothing of it"
    assert bench.asked[-2:] == [(OTHER, STAY), (OTHER, LEAVE)]
    await sources.keep(bench.run.head)
    assert sources.peers == (DONOR, OTHER)


async def test_observer_that_holds_nothing_goes_on_with_anybody() -> None:
    bench = await bench_of(*REPLICAS)
    observer = bench.observer(CONTACT, *REPLICAS, part=None)
    await observer.begin(await observer.start(CONTACT), None)
    waiting = asyncio.create_task(observer.follow())
    await turns()
    bench.network.kill(CONTACT)
    bench.network.kill(DONOR)
    decision = await bench.close()
    assert await waiting == decision.record
    await observer.close()


# --- the other side ------------------------------------------------------------------------------------------------


async def stay(bench: ObserverBench, me: PeerId, part: str = STAGE) -> Staying:
    answer, _ = await bench.endpoints[me].call(DONOR, STAY, StayRequest(part=part, had=0), timeout_s=5.0)
    return answer


async def test_service_lets_nobody_stand_by_for_what_it_does_not_hold_or_when_it_is_full() -> None:
    bench = await bench_of(DONOR)
    with pytest.raises(Refused, match="not held"):
        await stay(bench, JOINER, stage_part(1))
    peers = [PeerId(f"P{index}") for index in range(MAX_OBSERVERS)]
    for peer in peers:
        await bench.on_network(peer)
        assert (await stay(bench, peer)).closed == 2
    with pytest.raises(Busy):
        await stay(bench, JOINER)
    await bench.close()
    assert (bench.kept, bench.states) == ([3], 0), "it keeps updates for them, no state"
    await bench.clock.advance(LEASE_S + 1)
    await bench.close()
    assert bench.kept == []


# --- a guide that gives nothing ----------------------------------------------------------------------------------


async def withheld() -> tuple[ObserverBench, Observer, asyncio.Task[CloseRecord]]:
    """The first guide says that it has closed step 3, answers all else, and never gives the update of it."""
    bench, observer, _ = await following(DONOR, OTHER)
    assert observer.donors == (DONOR, OTHER)
    await bench.publish(bench.run.close(), OTHER, CONTACT)
    bench.twists[STANDING] = lambda body, answer: Answer(answer.body.model_copy(update={"closed": 3}))
    return bench, observer, asyncio.create_task(observer.follow())


async def test_observer_leaves_a_guide_that_gives_nothing_sooner_when_the_others_are_about_to_let_go_of_it() -> None:
    bench, observer, waiting = await withheld()
    observer._context = replace(observer._context, newest=lambda: 3 + KEPT_UPDATES - 1)
    await turns()
    await bench.clock.advance(PATIENCE_S)
    await turns()
    assert waiting.done()
    assert (await waiting).step == 3


async def test_observer_that_wants_an_update_before_it_is_decided_leaves_who_gives_nothing_too() -> None:
    bench, observer, waiting = await withheld()
    waiting.cancel()
    ahead = asyncio.create_task(observer.ahead())
    for _ in range(2 ** (MAX_IDLE + 1)):
        await turns()
        await bench.clock.advance(PATIENCE_S)
    await turns()
    assert ahead.done()
    assert await ahead is not None


def test_guide_that_brings_a_large_update_slowly_is_given_twice_the_time_to_the_longest() -> None:
    patience = UpdateTimeout()
    patience.begin(DONOR)
    size = 1_000_000
    while patience.seconds < LONGEST_PATIENCE_S:
        assert patience.late(patience.seconds, int(2 * size * patience.seconds / LONGEST_PATIENCE_S), size) == ""
    patience.begin(DONOR)
    assert patience.seconds == LONGEST_PATIENCE_S, "the link is as thin at the next step"
    assert "not in 640 s" in patience.late(patience.seconds, size - 1, size)
    patience.begin(OTHER)
    assert patience.seconds == PATIENCE_S

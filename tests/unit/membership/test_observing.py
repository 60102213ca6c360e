"""What a member does for observers: it keeps what they need, no more, no longer, and waits for none of them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm.consensus.copies import KEPT_UPDATES
from swarm.consensus.roster import Roster
from swarm.errors import Busy, DeadlineMissed, Refused, WrongStep
from swarm.ids import ENDS, PeerId, stage_part
from swarm.membership.observer_service import LEASE_S, MAX_OBSERVERS, RECENT_S, Observers
from swarm.network.protocols import ReplyT, RequestT, Rpc
from swarm.state.transfer import StateDonor
from swarm.step.observe_messages import (
    AHEAD,
    HASH,
    NEXT,
    STANDING,
    START,
    STAY,
    AheadRequest,
    Decided,
    HashRequest,
    NextRequest,
    RecordHash,
    StandingRequest,
    StartRequest,
    Staying,
    StayRequest,
)
from tests.harness.rigs.membership import DONOR, JOINER, OBSERVED, STAGE, ObserverBench, Run, listed, signed, turns
from tests.harness.rigs.step import LoopClock

START_STAGE = StartRequest(part=STAGE)


async def bench_at(steps: int, **settings: int) -> ObserverBench:
    bench = ObserverBench(Run(steps), **settings)
    await bench.open()
    return bench


async def ask(
    bench: ObserverBench, rpc: Rpc[RequestT, ReplyT], body: RequestT, me: PeerId = JOINER
) -> tuple[ReplyT, int]:
    answer, payload = await bench.endpoints[me].call(DONOR, rpc, body, timeout_s=30.0, max_reply_bytes=1 << 24)
    return answer, len(payload)


async def start(bench: ObserverBench, me: PeerId = JOINER) -> int:
    """Begin to observe; the step of the state that is kept for us."""
    decided, _ = await ask(bench, START, START_STAGE, me)
    assert isinstance(decided, Decided)
    return decided.record.step


async def test_updates_are_kept_only_while_somebody_observes_and_forgotten_at_once() -> None:
    bench = await bench_at(3)
    assert bench.kept == []
    assert await start(bench) == 3
    for _ in range(3):
        await bench.close()
    assert bench.kept == [4, 5, 6]
    await bench.close(Roster([*OBSERVED.members, listed(JOINER)]))
    assert bench.kept == [4, 5, 6, 7], "it needs the update of the very step that makes it a member"
    await bench.close()
    assert bench.kept == [], "a member gets its results like everybody else"


async def test_service_knows_whether_it_helps_somebody_who_is_no_member() -> None:
    bench = await bench_at(1)
    service = bench.services[DONOR]
    assert not service.observers.beside(OBSERVED.peers)
    await ask(bench, STANDING, StandingRequest())
    assert service.observers.beside(OBSERVED.peers), "who asks how the run stands is about to come"
    await bench.clock.advance(RECENT_S + 1)
    assert not service.observers.beside(OBSERVED.peers)
    await start(bench)
    assert service.observers.beside(OBSERVED.peers)
    assert not service.observers.beside([*OBSERVED.peers, JOINER]), "a member that keeps a copy is none to wait for"
    await bench.clock.advance(RECENT_S - 1)
    assert service.observers.beside(OBSERVED.peers)
    await bench.clock.advance(2)
    assert not service.observers.beside(OBSERVED.peers), "it has asked for nothing more, and may be dead"
    following = asyncio.create_task(ask(bench, NEXT, NextRequest(part=STAGE, step=2)))
    await bench.clock.advance(RECENT_S + 1)
    assert service.observers.beside(OBSERVED.peers)
    await bench.close()
    await following
    await bench.clock.advance(RECENT_S + 1)
    assert not service.observers.beside(OBSERVED.peers)


async def test_service_forgets_the_copy_of_a_member_that_left_and_keeps_that_of_one_that_may_be_back() -> None:
    with_joiner = Roster([*OBSERVED.members, listed(JOINER, part="stage-1")])
    for absent, helped in (((), False), ((JOINER,), True)):
        bench = await bench_at(1)
        await bench.close(with_joiner)
        await start(bench)
        decision = bench.run.close(OBSERVED)
        lost = decision.record.model_copy(update={"absent": absent})
        await bench.services[DONOR].publish(signed(lost), STAGE)
        assert bench.services[DONOR].observers.beside(OBSERVED.peers) is helped


async def test_slow_observer_makes_the_donor_keep_no_more_than_a_few_updates() -> None:
    bench = await bench_at(0)
    await start(bench)
    for _ in range(3 * KEPT_UPDATES):
        await bench.close()
    assert len(bench.kept) == KEPT_UPDATES
    with pytest.raises(WrongStep, match="not kept here any more"):
        await ask(bench, NEXT, NextRequest(part=STAGE, step=1))


async def test_observer_that_falls_silent_is_forgotten_with_all_that_was_kept_for_it() -> None:
    bench = await bench_at(1)
    await start(bench)
    await bench.close()
    assert (bench.kept, bench.states) == ([2], 1)
    await bench.clock.advance(LEASE_S + 1)
    await bench.close()
    assert (bench.kept, bench.states) == ([], 0)
    with pytest.raises(Refused, match="start first"):
        await ask(bench, NEXT, NextRequest(part=STAGE, step=3))


async def test_observer_that_waits_for_a_long_step_is_not_forgotten() -> None:
    """A question takes at most half a minute; a step may take many."""
    bench = await bench_at(1)
    await start(bench)
    for _ in range(6):
        asking = asyncio.create_task(ask(bench, NEXT, NextRequest(part=STAGE, step=2)))
        await turns()
        await bench.clock.advance(31.0)
        with pytest.raises(DeadlineMissed):
            await asking
    asking = asyncio.create_task(ask(bench, NEXT, NextRequest(part=STAGE, step=2)))
    await turns()
    await bench.close()
    assert (await asking)[1] == 4 * bench.run.part.layout.elements


async def test_more_observers_than_there_are_places_are_told_to_come_later() -> None:
    bench = await bench_at(1, downloads=MAX_OBSERVERS)
    peers = [PeerId(f"P{index}") for index in range(MAX_OBSERVERS + 1)]
    for peer in peers:
        await bench.on_network(peer)
    for peer in peers[:-1]:
        await start(bench, peer)
    with pytest.raises(Busy, match=f"{MAX_OBSERVERS} peers are joining"):
        await start(bench, peers[-1])
    assert await start(bench, peers[0]) == 1, "who has a place keeps it"
    assert (await ask(bench, START, StartRequest(part=None), peers[-1]))[1] == 0, "decisions cost nothing"
    await bench.clock.advance(LEASE_S + 1)
    assert await start(bench, peers[-1]) == 1


async def test_observer_that_gets_no_state_takes_no_place() -> None:
    bench = await bench_at(1, downloads=1)
    first, second = PeerId("P1"), PeerId("P2")
    for peer in (first, second):
        await bench.on_network(peer)
    await start(bench, first)
    with pytest.raises(Busy, match="downloads are under way"):
        await start(bench, second)
    for part in (stage_part(1), ENDS):
        with pytest.raises(Refused, match="not held here"):
            await ask(bench, START, StartRequest(part=part), second)
    with pytest.raises(Refused, match="start first"):
        await ask(bench, NEXT, NextRequest(part=STAGE, step=2), second)
    await bench.clock.advance(LEASE_S + 1)
    await bench.close()
    assert bench.kept == []


async def test_service_waits_for_the_next_step_only_and_knows_the_newest() -> None:
    bench = ObserverBench(Run(2))
    await bench.on_network(DONOR, bench.service, bench.donor)
    await bench.on_network(JOINER)
    with pytest.raises(Refused, match="no record of the run yet"):
        await start(bench)
    standing, _ = await ask(bench, STANDING, StandingRequest())
    assert (standing.closed, standing.waiting_for) == (None, "peers")  # type: ignore[attr-defined]
    assert not standing.leaving  # type: ignore[attr-defined]
    waiting = asyncio.create_task(ask(bench, HASH, HashRequest(step=0)))
    for step in (1, 5):
        with pytest.raises(WrongStep, match="far from closed"):
            await ask(bench, HASH, HashRequest(step=step))
    for decision in bench.run.decisions:
        await bench.publish(decision)
    assert (await waiting)[0].digest == bench.run.decisions[0].record.hash()  # type: ignore[attr-defined]
    bench.leaving = True
    standing, _ = await ask(bench, STANDING, StandingRequest())
    assert (standing.closed, standing.waiting_for, standing.leaving) == (2, "", True)  # type: ignore[attr-defined]


async def test_service_keeps_nothing_of_steps_that_did_not_count() -> None:
    bench = await bench_at(2)
    await start(bench)
    for _ in range(2):
        await bench.close()
    before = bench.run.decisions[3]
    counts = signed(before.record.model_copy(update={"term": 5}), mean=before.mean)
    await bench.publish(counts)
    assert bench.kept == [3]
    told, _ = await ask(bench, HASH, HashRequest(step=3))
    assert told == RecordHash(digest=counts.record.hash())
    with pytest.raises(WrongStep, match="not kept"):
        await ask(bench, HASH, HashRequest(step=2))


# --- members that copy a part, and copies of it --------------------------------------------------------------------

COPIER = PeerId("K")
COPIED = stage_part(1)


async def test_service_lets_those_who_join_go_before_a_copy() -> None:
    bench = await bench_at(1)
    await bench.on_network(COPIER)
    spare = StartRequest(part=STAGE, spare=True)
    await start(bench)
    with pytest.raises(Busy, match="another downloads"):
        await ask(bench, START, spare, COPIER)
    await bench.close()
    await ask(bench, NEXT, NextRequest(part=STAGE, step=2))  # it asks for what comes after: it has the state
    for _ in range(2):  # its own download is no other's
        await ask(bench, START, spare, COPIER)


async def test_service_serves_the_copy_of_another_part_once_it_has_the_update_and_until_it_is_dropped() -> None:
    bench = await bench_at(1)
    await bench.on_network(COPIER)

    async def stay() -> int:
        answer, _ = await ask(bench, STAY, StayRequest(part=COPIED, had=0), COPIER)
        assert isinstance(answer, Staying)
        return answer.closed

    with pytest.raises(Refused, match="not held"):
        await stay()
    await bench.service.copied(COPIED, bench.run.decisions[-1])
    assert await stay() == 1
    asking = asyncio.create_task(ask(bench, NEXT, NextRequest(part=COPIED, step=2), COPIER))
    decision = await bench.close()
    await turns()
    assert not asking.done(), "the step is closed, but the copy's update is not here yet"
    await bench.service.copied(COPIED, decision)
    assert (await asking)[1] == 4 * bench.run.part.layout.elements
    asking = asyncio.create_task(ask(bench, NEXT, NextRequest(part=COPIED, step=3), COPIER))
    await bench.close()
    await bench.service.dropped(COPIED)
    with pytest.raises(Refused, match="not held here any more"):
        await asking


async def test_update_can_be_had_before_its_step_is_decided_and_as_long_as_it_is_kept() -> None:
    bench = await bench_at(1)

    async def ahead(step: int, me: PeerId = JOINER) -> int:
        return (await ask(bench, AHEAD, AheadRequest(part=STAGE, step=step), me))[1]

    with pytest.raises(Refused, match="not an observer"):
        await ahead(2)
    await start(bench)
    asking = asyncio.create_task(ahead(2))
    await turns()
    assert not asking.done(), "nothing is averaged yet"
    size = 4 * bench.run.part.layout.elements
    await bench.service.averaged(STAGE, 2, torch.zeros(bench.run.part.layout.elements))
    assert await asking == size
    await bench.close()
    assert bench.kept == [2], "another may have been decided"
    assert await ahead(2) == size
    early = asyncio.create_task(ahead(4))  # one that heard of step 3 before us
    await turns()
    assert not early.done()
    with pytest.raises(WrongStep, match="far from closed"):
        await ahead(5)
    await bench.close()
    await bench.service.averaged(STAGE, 4, torch.zeros(bench.run.part.layout.elements))
    assert await early == size


async def test_update_of_a_step_that_is_given_up_is_none() -> None:
    bench = await bench_at(1)
    await start(bench)
    asking = asyncio.create_task(ask(bench, AHEAD, AheadRequest(part=STAGE, step=2)))
    await turns()
    record = bench.run.head.model_copy(update={"step": 2, "previous": bench.run.head.hash(), "void": True})
    await bench.publish(signed(record))
    assert (await asking)[1] == 0


async def test_each_late_member_has_its_update_kept_and_takes_no_room_from_those_that_join() -> None:
    clock = LoopClock()
    observers = Observers(StateDonor(clock), clock)
    late = [PeerId(f"late-{number}") for number in range(MAX_OBSERVERS + 2)]
    for peer in late:
        observers.behind(peer, STAGE, 5)
    assert observers.steps(STAGE) == [4] * len(late)
    for number in range(MAX_OBSERVERS):
        observers.note(PeerId(f"joins-{number}"), STAGE, 5)
    with pytest.raises(Busy):
        observers.note(PeerId("one too many"), STAGE, 5)
    with pytest.raises(Busy):
        observers.note(late[0], STAGE, 5)

"""Leading a step without a majority, or without all replicas of a part."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm.consensus.roster import Roster
from swarm.errors import Advice, Busy, DeadlineMissed, OutOfSync, PeerError, Refused, RunEnded, Unreachable
from swarm.events import DigestMismatch
from swarm.ids import PeerId
from swarm.step.leader.asking import TermCalls
from swarm.step.leader.batch import LOST_PART_S
from swarm.step.leader.exclusion import ALONE_S, MAX_FAILURES
from swarm.step.leader.rescue import AGAIN_S
from swarm.step.messages import DECIDE, PREPARE, PROPOSE, RECONCILE, Prepare, Reconcile
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.step import HOSTED, LEADER, OTHER, RULES, THREE, A, B, Stage, T, U, listed, no, stage

# --- no majority, or a part is lost -----------------------------------------------------------------------------------


async def test_leader_without_a_majority_waits_says_so_and_goes_on_when_it_is_back() -> None:
    here = await stage()
    for peer in (OTHER, T):
        here.puppets[peer].instead[PROPOSE] = no(Unreachable("cut off"), times=20)
    closed = await here.leading().run()
    assert "a majority: 1 of 3 voters answer, 2 are needed, however long that takes" in here.waited
    assert here.waited[-1] == ""
    assert closed.absent == ()
    assert here.puppets[LEADER].asked.count(PROPOSE) == 1


async def test_vote_of_a_late_member_counts_where_one_that_was_in_time_gives_none() -> None:
    here = await stage()
    here.puppets[OTHER].instead[PREPARE] = no(Busy("it vetoes"))
    calls = TermCalls(here.closing, here.lead.book, 1)
    calls.arrivals.late = {T: "late"}
    given = await calls.majority((LEADER, OTHER, T), PREPARE, Prepare(step=1, term=1))
    assert given.keys() == {LEADER, T}
    assert here.puppets[T].asked.count(PREPARE) == 1


class HastyClock(LoopClock):
    """One that wakes a sleeper a last digit too early."""

    sleeps = 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await super().sleep(seconds - 1e-9)


async def test_silent_voter_is_not_waited_for_once_a_majority_votes_though_the_clock_is_a_digit_short() -> None:
    here = await Stage(THREE).set()
    clock = HastyClock()
    calls = TermCalls(replace(here.closing, clock=clock), here.lead.book, 1)
    silent = next(peer for peer in THREE.peers if peer != here.leader)
    here.puppets[silent].instead[PREPARE] = lambda body: asyncio.sleep(60)
    given = await calls.majority(THREE.peers, PREPARE, Prepare(step=1, term=1))
    assert given.keys() == {*THREE.peers} - {silent}
    assert clock.sleeps == 1


def cut_off(here: Stage, peer: PeerId) -> None:
    """It cannot be asked for its vote either."""
    here.puppets[peer].instead[PREPARE] = no(Unreachable("cut off"))


def heal(here: Stage, peer: PeerId) -> None:
    """It answers again, and is seen to."""
    del here.puppets[peer].instead[PREPARE]
    here.liveness.find(peer)


@pytest.mark.parametrize("fed", [True, False])
async def test_leader_in_a_minority_judges_nobody_and_goes_on_when_the_others_are_back(fed: bool) -> None:
    here = await (stage() if fed else Stage().set())
    for peer in (OTHER, T):
        cut_off(here, peer)
        here.liveness.lose(peer, "cut off")
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * LOST_PART_S)
    assert set(here.waited) == {"a majority: 1 of 3 voters answer, 2 are needed, however long that takes"}
    assert here.events.events == []
    for peer in (OTHER, T):
        heal(here, peer)
    if not fed:
        await here.feed()
    assert (await running).absent == ()


async def test_leader_whom_so_many_refuse_that_it_cannot_be_decided_says_why() -> None:
    here = await stage()
    for peer in (OTHER, T):
        here.puppets[peer].instead[PROPOSE] = no(Refused("another digest"))
    with pytest.raises(OutOfSync, match=f"step 1 cannot be decided: {min(OTHER, T)}: another digest"):
        await here.leading().run()
    assert not here.asked(DECIDE)


@pytest.mark.parametrize("fed", [True, False])
async def test_part_that_stays_lost_ends_the_run_once_the_time_of_its_manifest_is_over(fed: bool) -> None:
    here = await (stage() if fed else Stage().set())
    here.liveness.lose(T, "it does not answer")
    with pytest.raises(RunEnded, match=r"last replica of ends is lost: t \(it does not answer\)") as ended:
        await here.leading().run()
    assert ended.value.remedy == Advice.RESUME
    took = asyncio.get_running_loop().time()
    assert took == pytest.approx(LOST_PART_S + RULES.wait_for_lost_s, abs=2 * AGAIN_S)
    assert not here.asked(RECONCILE)


async def test_leader_that_lost_a_part_and_finds_itself_in_a_minority_does_not_end_the_run() -> None:
    """It had not noticed yet that the others are gone as well: nobody had asked them."""
    here = await stage()
    here.liveness.found = {OTHER}
    for peer in (OTHER, T):
        cut_off(here, peer)
    here.liveness.lose(T, "cut off")
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * LOST_PART_S)
    assert set(here.waited) == {"a majority: 1 of 3 voters answer, 2 are needed, however long that takes"}
    here.liveness.found = set()
    for peer in (OTHER, T):
        heal(here, peer)
    assert (await running).absent == ()


async def test_part_that_comes_back_in_time_is_waited_for() -> None:
    here = await stage()
    here.liveness.lose(T, "stalled")
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(LOST_PART_S / 2)
    said = "a replica of ends: t (stalled); nobody keeps a copy; next: start t where it was, unless it is there again"
    assert here.waited == [said]
    here.liveness.find(T)
    assert (await running).absent == ()


@pytest.mark.parametrize("times", [MAX_FAILURES, 3 * MAX_FAILURES])
async def test_part_whose_replicas_are_all_late_is_asked_again_until_one_answers(times: int) -> None:
    here = await stage()
    for peer in (A, B):
        here.puppets[peer].instead[RECONCILE] = no(DeadlineMissed("no answer in 20 s", peer=peer), times=times)
    closed = await here.leading().run()
    assert len(closed.committed) == 2
    assert not any("ends" in said for said in here.waited)
    assert any("an answer, for which is asked again, of " in said for said in here.waited)


@pytest.mark.parametrize("error", [DeadlineMissed("no answer in 20 s", peer=T), PeerError("its disk is full")])
async def test_only_trainer_is_asked_again_with_hosted_ends(error: PeerError) -> None:
    here = await stage(roster=Roster(member for member in HOSTED.members if member.peer != U))
    here.puppets[T].instead[RECONCILE] = no(error, times=MAX_FAILURES + 1)
    closed = await here.leading().run()
    assert (closed.absent, len(closed.committed)) == ((), 2)


@pytest.mark.parametrize("back", [True, False])
async def test_replica_that_differs_decides_nothing_alone_before_others_had_time_to_come_back(back: bool) -> None:
    other_trainer = listed(U, "trainer", "ends")
    here = await stage(roster=Roster([*THREE.members, other_trainer]))  # so that a majority is there without two
    here.puppets[B].weights = "e" * 64

    def cut(body: Reconcile) -> None:
        if B not in body.live:
            for peer in (A, PeerId("C")):
                here.liveness.lose(peer, "cut off")
            raise Unreachable("cut off", peer=A)

    here.puppets[A].instead[RECONCILE] = cut
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * LOST_PART_S)
    assert here.events.of(DigestMismatch)
    assert not here.asked(PROPOSE)
    assert "another replica besides b of stage-0, which holds other numbers than most did" in here.waited
    del here.puppets[A].instead[RECONCILE]
    if back:
        here.liveness.find(A)
    closed = await running
    assert (B in closed.absent, closed.digests["stage-0"]) == (back, "c" * 64 if back else "e" * 64)
    assert back or asyncio.get_running_loop().time() == pytest.approx(ALONE_S, abs=2 * LOST_PART_S)


async def test_replica_that_differs_is_trusted_in_time_beside_one_that_only_answers_pings() -> None:
    """That the other is asked again and again does not make the part held."""
    other_trainer = listed(U, "trainer", "ends")
    here = await stage(roster=Roster([*THREE.members, other_trainer]))
    here.puppets[B].weights = "e" * 64

    def cut(body: Reconcile) -> None:
        if B not in body.live:
            here.liveness.lose(PeerId("C"), "cut off")
        if PeerId("C") not in body.live or B not in body.live:
            raise DeadlineMissed("no answer in 20 s", peer=A)

    here.puppets[A].instead[RECONCILE] = cut
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(2 * ALONE_S)
    assert running.done()
    assert running.result().digests["stage-0"] == "e" * 64

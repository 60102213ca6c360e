"""A peer that was told to leave: it asks every leader until a record lets it go, and says what it waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.consensus.changes import ChangeRules, Changes, Departure, OpenStepFacts, RosterRules
from swarm.consensus.records import CloseRecord, acceptance_bytes
from swarm.consensus.roster import Roster
from swarm.errors import (
    Ending,
    PeerError,
    Refused,
    RunEnded,
    Superseded,
    Unreachable,
    WrongStep,
)
from swarm.events import Draining, Waiting
from swarm.ids import PeerId
from swarm.membership.leaving import HANDOVER_S, Leaving
from swarm.membership.run import ExitRequest
from swarm.membership.status import PeerStatus
from swarm.network.protocols import Rpc
from swarm.step.messages import LEAVE, Propose
from swarm.waiting import AdaptiveDeadline
from tests.harness.expect import eventually
from tests.harness.rigs.membership import (
    GENESIS,
    ROSTER,
    RUN,
    A,
    EventList,
    LoopClock,
    MemberBench,
    apply,
    decide,
    prepare,
    reconcile,
    record,
    sign,
    stop,
    verify,
)

WITHOUT_ME = Roster([member for member in ROSTER.members if member.peer != A])


class Calls:
    """Keeps what leaders are asked; each answer is taken from ``answers``, yes when there are none left."""

    me = A

    def __init__(self) -> None:
        self.asked: list[tuple[PeerId, Departure]] = []
        self.answers: list[PeerError] = []

    async def ask(self, peer: PeerId, rpc: Rpc[Any, Any], body: Departure, *, timeout_s: float) -> None:
        assert rpc is LEAVE
        assert 0 < timeout_s < 1000
        self.asked.append((peer, body))
        if self.answers:
            raise self.answers.pop(0)


class Identity:
    """Signs as the tests' members do."""

    def sign(self, data: bytes) -> bytes:
        return sign(A, data)


class Home:
    """A member that may leave, and everything around it."""

    def __init__(self, *, founded: bool = True) -> None:
        self.bench, self.calls, self.events = MemberBench(A, founded=founded), Calls(), EventList()
        self.situation = PeerStatus(self.events)
        self.exit, self.helped = ExitRequest(), False
        run = SimpleNamespace(
            around=SimpleNamespace(identity=Identity(), clock=LoopClock()),
            rules=SimpleNamespace(run=RUN),
            position=self.bench.position,
            situation=self.situation,
            calls=self.calls,
            deadline=AdaptiveDeadline(floor_s=1.0, ceiling_s=9.0),
            exit=self.exit,
        )
        observers = SimpleNamespace(beside=lambda members: self.helped)
        handover = SimpleNamespace(give=None)
        self.leaving = Leaving(cast(Any, run), cast(Any, observers), cast(Any, None), cast(Any, handover))

    async def close(self, before: CloseRecord = GENESIS, *, leave: Departure | None = None) -> CloseRecord:
        """The open step is closed, with or without us in what follows."""
        step = before.step + 1
        changes = Changes() if leave is None else Changes(leaves=(leave,))
        closed = record(before, roster=ROSTER.members if leave is None else WITHOUT_ME.members)
        for body in (reconcile(step), apply(step), Propose(record=closed, changes=changes)):
            await self.bench.ask(body)
        decision = decide(closed)
        signed = {peer: sign(peer, acceptance_bytes(closed)) for peer in ROSTER.peers}
        await self.bench.ask(decision.model_copy(update={"acceptances": signed}))
        return closed

    async def asked(self, times: int) -> Departure:
        await eventually(lambda: len(self.calls.asked) >= times)
        return self.calls.asked[times - 1][1]


async def test_member_that_is_told_to_leave_asks_the_leader_of_the_open_step_and_goes_with_its_record() -> None:
    home = Home()
    going = asyncio.create_task(home.leaving.run())
    assert home.leaving.ask("SIGTERM", Ending.DRAINED) == "asked to leave; step 1 is the first with which it may"
    request = await home.asked(1)
    assert home.calls.asked[0][0] == ROSTER.succession(1)[0]
    ChangeRules(RosterRules(RUN, 9), verify).check_departure(OpenStepFacts(1, ROSTER, GENESIS.hash()), request)
    assert home.situation.waiting_for == "step 1 to close"
    await home.close(leave=request)
    await going
    assert home.bench.position.departed
    assert len(home.calls.asked) == 1


async def test_member_agrees_that_the_run_ends_once_nobody_has_come_for_long_and_it_helps_nobody() -> None:
    home = Home()
    home.helped = True
    going = asyncio.create_task(home.leaving.run())
    home.leaving.ask("SIGTERM", Ending.DRAINED)
    rules, now = ChangeRules(RosterRules(RUN, 9), verify), OpenStepFacts(1, ROSTER, GENESIS.hash())
    first = await home.asked(1)
    await asyncio.sleep(10 * HANDOVER_S)
    assert (first.ends, len(home.calls.asked)) == (False, 1)
    home.helped = False
    second = await home.asked(2)
    assert second.ends
    for request in (first, second):
        rules.check_departure(now, request)
    await asyncio.sleep(10 * HANDOVER_S)
    assert len(home.calls.asked) == 2
    await home.bench.ask(prepare(term=1))
    assert (await home.asked(3)).ends
    home.helped = True
    assert not (await home.asked(4)).ends, "somebody has come after all"
    await stop(going)


async def test_member_that_cannot_be_spared_asks_again_whether_all_others_are_asked_by_now() -> None:
    home = Home()
    home.helped = True
    home.calls.answers = [Refused("it holds the only replica"), Refused("all have been asked to leave")]
    going = asyncio.create_task(home.leaving.run())
    home.leaving.ask("SIGTERM", Ending.DRAINED)
    await home.asked(1)
    await eventually(lambda: "the only replica; not while" in home.situation.waiting_for)
    await home.asked(2)
    await eventually(lambda: home.situation.waiting_for.startswith("all have been asked to leave"))
    await home.asked(3)
    await asyncio.sleep(100.0)
    assert len(home.calls.asked) == 3, "granted"
    home.situation.wait_for("all have been asked to leave")
    home.calls.answers = [Refused("it holds the only replica")] * 2
    await home.close()
    home.bench.replenish()
    await home.asked(4)
    await asyncio.sleep(1.0)
    assert home.situation.waiting_for == "all have been asked to leave", "the others are about to ask in this step"
    await home.asked(5)
    await eventually(lambda: home.situation.waiting_for.startswith("it holds the only replica"))
    home.situation.wait_for("all have been asked to leave")
    home.calls.answers = [Refused("it holds the only replica")] * 2
    await home.bench.ask(prepare(step=2, term=1))
    await home.asked(6)
    await asyncio.sleep(1.0)
    assert home.situation.waiting_for == "all have been asked to leave", "nor have they asked its next leader"
    await stop(going)


async def test_member_asks_the_next_leader_when_another_takes_over() -> None:
    home = Home()
    going = asyncio.create_task(home.leaving.run())
    home.leaving.ask("SIGTERM", Ending.DRAINED)
    await home.asked(1)
    await asyncio.sleep(60)
    assert len(home.calls.asked) == 2, "the second time that it agrees to the end of the run"
    await home.bench.ask(prepare(term=2))
    await home.asked(3)
    first, _, third = ROSTER.succession(1)
    assert [peer for peer, _ in home.calls.asked] == [first, first, third]
    await stop(going)


@pytest.mark.parametrize("when", ["before", "while it asks", "while it waits"])
async def test_member_that_is_cut_off_need_not_come_back_to_leave(when: str) -> None:
    home = Home()
    home.exit.admitted.set()
    if when == "while it asks":
        home.calls.answers = [Unreachable("dead")] * 9
    if when == "before":
        await home.bench.member.cut("B is steps ahead")
    going = asyncio.create_task(home.leaving.run())
    home.leaving.ask("SIGTERM", Ending.DRAINED)
    if when != "before":
        await home.asked(1)
        await home.bench.member.cut("B is steps ahead")
    with pytest.raises(RunEnded, match="B is steps ahead") as ended:
        await going
    assert ended.value.ending is Ending.DRAINED


async def test_peer_that_is_told_to_leave_before_it_took_part_ends_at_once() -> None:
    home = Home(founded=False)
    home.leaving.ask("SIGTERM", Ending.DRAINED)
    with pytest.raises(RunEnded, match="left before it took part") as error:
        await home.leaving.run()
    assert error.value.ending is Ending.DRAINED
    assert home.calls.asked == []


async def test_member_that_is_told_to_leave_without_a_majority_says_at_once_and_again_that_it_waits_for_one() -> None:
    home = Home()
    home.situation.no_majority = few = "a majority: 1 of 3 voters answer, 2 are needed, however long that takes"
    home.situation.wait_for(few)
    going = asyncio.create_task(home.leaving.run())
    home.calls.answers = [Unreachable("it is gone"), Superseded("another leads"), WrongStep("step 0 is open")]
    assert home.leaving.ask("Ctrl-C", Ending.DONE) == f"draining: {few}"
    kinds = [type(event).__name__ for event in home.events.events]
    assert kinds == ["Waiting", "Draining", "Waiting"], "it had been said before, and somebody asks now"
    await home.asked(3)
    assert home.calls.answers == []
    assert {event.what for event in home.events.of(Waiting)} == {few}
    assert home.situation.waiting_for == few
    home.situation.no_majority = ""
    home.leaving.ask("swarm drain", Ending.DONE)
    await home.close(leave=await home.asked(3))
    await going
    assert [event.what for event in home.events.of(Waiting)] == [few, few], "with a majority nothing is said again"


async def test_member_that_has_a_time_to_leave_in_knows_when_it_ends_and_the_earliest_counts() -> None:
    home = Home()
    now = home.leaving._clock.wall()
    home.leaving.ask("swarm drain", Ending.DONE)
    assert home.situation.ends_by is None
    for by, within_s in (("SIGTERM", 60.0), ("notice", 30.0), ("Ctrl-C", None)):
        home.leaving.ask(by, Ending.DRAINED, within_s)
    assert home.situation.ends_by == now + 30.0
    home.leaving.ask("notice", Ending.DRAINED, 20.0, "ends in 20 s")
    assert len(home.events.of(Draining)) == 4, "the same order with less time left is heard once"

"""What a step's leader grants to those who ask to join or to leave, and what it tells the others."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus import changes
from swarm.consensus.changes import ALL_ASKED, Admission, Departure
from swarm.consensus.roster import Roster
from swarm.errors import Busy, PeerError, Refused, Superseded, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.membership.observer_service import Observers, ObserverService
from swarm.sim.network import SimNetwork
from swarm.state.transfer import StateDonor
from swarm.step.calls import StepCalls
from swarm.step.leader import requests
from swarm.step.leader.lead_service import LeadService
from swarm.step.leader.rescue import absent
from swarm.step.observe_messages import RunStanding
from tests.harness.expect import eventually
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.step import BEFORE, RUN, SEVEN, STEP, admission, asked, departure, listed, verify
from tests.harness.rigs.step import RULES as WORLD_RULES

RULES = replace(WORLD_RULES, steps=9, max_members=9)
LEADER, *REST = SEVEN.succession(STEP)
PLACES = (("C", "stage-1"), ("E", "stage-0"))


async def _open(step: int) -> None:
    return None


def lead_service(me: PeerId = LEADER, *, step: int = STEP, **rules: Any) -> LeadService:
    opened = LeadService(replace(RULES, **rules), me, _open, verify)
    opened.open_step(step, SEVEN, BEFORE)
    return opened


async def tell(opened: LeadService, body: Admission | Departure, caller: str | None = None) -> None:
    asks = caller or (body.member.peer if isinstance(body, Admission) else body.peer)
    await asked(opened, body, PeerId(asks))


async def test_leader_puts_those_who_asked_into_the_roster_and_out_of_it() -> None:
    opened = lead_service()
    for body in (admission(listed("C")), departure("A1"), departure("F"), admission(listed("C")), departure("A1")):
        await tell(opened, body)
    changes, roster = opened.book.requests.settle(())
    assert roster.peers == ("A2", "B1", "B2", "C", "T1", "T2")
    assert ([j.member.peer for j in changes.joins], [d.peer for d in changes.leaves]) == (["C"], ["A1", "F"])


async def test_member_that_is_late_for_the_close_stays_and_leaves_with_a_later_one() -> None:
    opened = lead_service()
    for peer in ("A1", "F"):
        await tell(opened, departure(peer))
    assert set(opened.book.requests.leaving()) == {"A1", "F"}
    changes, roster = opened.book.requests.settle((), late=("A1",))
    assert [leave.peer for leave in changes.leaves] == ["F"]
    assert "A1" in roster


REFUSED: list[tuple[str, Any, str | None, type[PeerError], str]] = [
    ("for another", admission(listed("C")), "A1", Refused, "asks for itself only"),
    ("another out", departure("A1"), "A2", Refused, "asks for itself only"),
    ("forged", admission(listed("C"), signer="X"), None, Violation, "forged"),
    ("a stranger leaves", departure("X"), None, Refused, "members that may now"),
    ("a member joins", admission(listed("A1")), None, Refused, "in the roster already"),
    ("a part that is not", admission(listed("C", part="stage-7")), None, Refused, "does not hold stage-7"),
    ("after another record", admission(listed("C"), previous="9" * 64), None, Violation, "forged"),
    ("too early", admission(listed("C"), step=STEP + 2), None, WrongStep, "far from open"),
    ("too late", admission(listed("C"), step=STEP - 1), None, WrongStep, "step 4 is closed"),
]


@pytest.mark.parametrize(("body", "caller", "error", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
async def test_leader_refuses_with_the_reason_and_grants_nothing(
    body: Any, caller: str | None, error: type[PeerError], words: str
) -> None:
    opened = lead_service()
    with pytest.raises(error, match=words):
        await tell(opened, body, caller)
    assert opened.book.requests.settle(())[1].members == SEVEN.members


async def test_leader_that_has_settled_the_roster_says_that_it_is_too_late() -> None:
    later = next(step for step in range(STEP + 1, 99) if SEVEN.succession(step)[0] == LEADER)
    opened = lead_service(steps=100)
    opened.book.requests.settle(())
    for body in (admission(listed("C")), departure("A1")):
        with pytest.raises(WrongStep, match="too late for this step"):
            await tell(opened, body)
    opened.open_step(later, SEVEN, "cd" * 32)
    await tell(opened, admission(listed("C"), step=later, previous="cd" * 32))
    assert "C" in opened.book.requests.settle(())[1]


async def test_leader_of_the_last_step_lets_nobody_in_or_out() -> None:
    opened = lead_service(SEVEN.succession(9)[0], step=9)
    for body in (admission(listed("C"), step=9), departure("A1", step=9)):
        with pytest.raises(WrongStep, match="last step"):
            await tell(opened, body)


async def test_peer_that_does_not_lead_the_step_says_who_does() -> None:
    for body in (admission(listed("C")), departure("A1")):
        with pytest.raises(Superseded, match=f"{LEADER} leads step 5"):
            await tell(lead_service(REST[0]), body)


async def test_second_replica_that_wants_to_leave_is_told_why_it_cannot() -> None:
    opened = lead_service()
    await tell(opened, departure("B2"))
    wanted = r"only replica of stage-1: another must join first \(as a host of stage 1\)"
    with pytest.raises(Refused, match=wanted):
        await tell(opened, departure("B1"))
    await tell(opened, admission(listed("C", part="stage-1")))
    with pytest.raises(Refused, match="only replica of stage-1"):  # it takes the step's result from who stays
        await tell(opened, departure("B1"))
    assert {"B1", "C"} <= set(opened.book.requests.settle(())[1].peers)


async def ask_for_the_end(opened: LeadService, *but: str) -> list[str]:
    """All want to leave, and all but these agree that the run ends; who is refused, and why."""
    refused = []
    for peer in SEVEN.peers:
        try:
            await tell(opened, departure(peer, ends=peer not in but))
        except Refused as error:
            refused.append(f"{peer}: {error.reason}")
    return refused


@pytest.mark.parametrize("why", ["one does not agree", "one is lost", "it is provisional"])
async def test_run_goes_on_with_those_that_it_needs_though_all_want_to_leave(why: str) -> None:
    opened = LeadService(RULES, LEADER, _open, verify)
    opened.open_step(STEP, SEVEN, BEFORE, may_end=why != "it is provisional")
    refused = await ask_for_the_end(opened, *(["A1"] if why == "one does not agree" else []))
    changes, roster = opened.book.requests.settle((), [PeerId("F")] if why == "one is lost" else ())
    assert not changes.end(SEVEN)
    assert roster.peers == ("A2", "B2", "T2")
    assert ("once a majority is there again" in refused[0]) is (why == "it is provisional")


async def test_member_that_cannot_be_spared_hears_whether_all_have_been_asked() -> None:
    opened = lead_service()
    *_, last = await ask_for_the_end(opened, *SEVEN.peers)
    assert "T2: all have been asked to leave: the run ends soon" in last
    with pytest.raises(Refused, match="all have been asked to leave"):
        await tell(opened, departure("A2"))


async def test_member_that_agrees_later_in_the_step_lets_the_run_end() -> None:
    opened = lead_service()
    assert len(await ask_for_the_end(opened, "A1", "A2")) == 3
    await tell(opened, departure("A1", ends=True))
    await tell(opened, departure("A2", ends=True))
    assert opened.book.requests.settle(())[0].end(SEVEN)


async def test_run_goes_on_when_somebody_joins_as_all_others_want_it_to_end() -> None:
    opened = lead_service()
    await tell(opened, admission(listed("C")))
    await ask_for_the_end(opened)
    changes, roster = opened.book.requests.settle(())
    assert not changes.end(SEVEN)
    assert roster.peers == ("A2", "B2", "C", "T2")
    changes, roster = opened.book.requests.settle([PeerId("C")])  # it does not answer any more
    assert changes.end(SEVEN)


async def test_member_that_can_be_spared_by_now_ends_the_run_with_the_others() -> None:
    """It served the others of its part that nobody can call; one of them is to leave, so nobody needs it any more."""
    some = [m.model_copy(update={"outgoing": m.peer != "A1"}) for m in SEVEN.members if m.part == "stage-0"]
    others = [m for m in SEVEN.members if m.part != "stage-0"]
    before = Roster([*others, *some, some[-1].model_copy(update={"peer": "A3", "outgoing": True})])
    opened = LeadService(replace(RULES, served=True), before.succession(STEP)[0], _open, verify)
    opened.open_step(STEP, before, BEFORE)
    with pytest.raises(Refused, match="that others can call"):
        await tell(opened, departure("A1", ends=True))
    for peer in ("A2", "A1", *before.peers):
        with contextlib.suppress(Refused):
            await tell(opened, departure(peer, ends=True))
    assert opened.book.requests.settle(())[0].end(before)


async def test_run_with_more_members_than_a_record_lets_go_is_not_said_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (requests, changes):
        monkeypatch.setattr(module, "MAX_CHANGES", len(SEVEN) - 1)
    opened = lead_service()
    refused = await ask_for_the_end(opened)
    assert len(refused) == 3
    assert not any(ALL_ASKED in reason for reason in refused)


async def test_full_run_refuses_newcomers_and_keeps_its_word_to_those_it_has_taken() -> None:
    opened = lead_service(max_members=len(SEVEN) + 1)
    await tell(opened, admission(listed("C")))
    with pytest.raises(Refused, match="the run is full"):
        await tell(opened, admission(listed("E")))
    await tell(opened, admission(listed("C")))  # its answer was lost
    assert "C" in opened.book.requests.settle(())[1]


async def test_more_newcomers_than_one_record_takes_are_asked_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_CHANGES", 2)
    opened = lead_service(max_members=100)
    for peer in ("C", "E"):
        await tell(opened, admission(listed(peer)))
    with pytest.raises(Busy, match="2 peers join in this step already"):
        await tell(opened, admission(listed("G")))
    await tell(opened, admission(listed("E")))


async def test_newcomer_that_does_not_answer_any_more_is_not_let_in() -> None:
    opened = lead_service()
    for peer in ("C", "E"):
        await tell(opened, admission(listed(peer)))
    assert set(opened.book.requests.asking()) == {"C", "E"}
    assert opened.book.requests.settle({PeerId("C")})[1].peers == tuple(sorted([*SEVEN.peers, "E"]))


async def test_newcomer_to_a_part_that_was_not_lost_after_all_has_to_ask_again() -> None:
    """Its only replica calls others and is called by nobody, as the newcomer: they could not average."""
    one = Roster(m.model_copy(update={"outgoing": m.peer == "B1"}) for m in SEVEN.members if m.peer != "B2")
    opened = LeadService(replace(RULES, served=True), one.succession(STEP)[0], _open, verify)
    opened.open_step(STEP, one, BEFORE)
    late, other = (admission(listed(peer, part=part, outgoing=True)) for peer, part in PLACES)
    with pytest.raises(Refused, match="no replica of stage-1 can be called"):
        await tell(opened, late)
    assert opened.book.requests.joining([PeerId("B1")]) == ()
    for body in (late, other):
        await tell(opened, body)
    changes, roster = opened.book.requests.settle(())
    assert (changes.joins, roster.peers) == ((other,), tuple(sorted([*one.peers, "E"])))
    opened.book.begin_term(0, ())
    with pytest.raises(Refused, match="no replica of stage-1 can be called"):
        await tell(opened, late)


@pytest.mark.parametrize("how", ["a member that is back", "a newcomer that lacks a server"])
async def test_step_is_given_up_without_a_newcomer_that_may_not_join_any_more(how: str) -> None:
    """One request that held when it was made would else keep a lost part lost for ever."""
    before = Roster(m.model_copy(update={"outgoing": m.peer == "A1"}) for m in SEVEN.members)
    opened = LeadService(replace(RULES, served=True), before.succession(STEP)[0], _open, verify)
    opened.open_step(STEP, before, BEFORE)
    dead = [PeerId("B1"), PeerId("B2")]
    if how == "a member that is back":
        late, first, absent_at_last = admission(listed("A2")), [*dead, PeerId("A2")], dead
    else:
        late, first, absent_at_last = admission(listed("E", outgoing=True)), dead, [*dead, PeerId("A2")]
    opened.book.requests.joining(first)
    saves = admission(listed("C", part="stage-1"))
    for body in (late, saves):
        await tell(opened, body)
    changes, roster = opened.book.requests.give_up((), opened.book.requests.joining(absent_at_last), absent_at_last)
    assert changes.joins == (saves,)
    assert roster.peers == tuple(sorted({*before.peers, "C"} - {*absent_at_last}))


async def test_leader_of_a_later_term_forgets_what_it_was_asked_before_and_takes_it_anew() -> None:
    opened = lead_service()
    asked = (admission(listed("C")), departure("A1"))
    for body in asked:
        await tell(opened, body)
    opened.book.end_term()
    opened.book.begin_term(len(SEVEN), ())
    assert opened.book.requests.settle(())[1].members == SEVEN.members
    opened.book.end_term()
    opened.book.begin_term(2 * len(SEVEN), ())
    for body in asked:
        await tell(opened, body)
    assert opened.book.requests.settle(())[1].peers == ("A2", "B1", "B2", "C", "F", "T1", "T2")


async def test_absent_are_those_that_died_or_fell_silent_and_nobody_waits_for_them() -> None:
    network = SimNetwork(LoopClock())
    there, dead, silent, me = (PeerId(name) for name in ("C", "E", "G", "L"))
    for peer in (there, dead, silent, me):
        endpoint = network.endpoint(peer)
        await endpoint.enter(RUN)
        donor = StateDonor(network.clock)
        endpoint.mount(ObserverService(_standing, donor, _nothing, Observers(donor, network.clock)))
    network.kill(dead)
    network.cut(me, silent)
    mine = network.find(me)
    assert mine is not None
    with absent(StepCalls(mine), (there, dead, silent)) as missing:
        assert missing == {there, dead, silent}
        await eventually(lambda: there not in missing)
        assert missing == {dead, silent}
    for peer in (there, silent, me):
        network.kill(peer)


def _standing(closed: int | None) -> RunStanding:
    return RunStanding(founder=LEADER, closed=closed, waiting_for="")


async def _nothing(part: PartName) -> None:
    return None


async def test_request_for_the_step_that_opens_next_waits_for_it() -> None:
    opened_next = asyncio.Event()

    async def wait_open(step: int) -> None:
        await opened_next.wait()

    early = LeadService(RULES, LEADER, wait_open, verify)
    early.open_step(STEP - 1, Roster(SEVEN.members[1:]), "ee" * 32)
    asking = asyncio.create_task(tell(early, admission(listed("C"))))
    await asyncio.sleep(0)
    assert not asking.done()
    early.open_step(STEP, SEVEN, BEFORE)
    opened_next.set()
    await asking
    assert early.book.requests.asking() == ("C",)

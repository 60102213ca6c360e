"""Who is out of a step, and why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.admissions import Admissions, Holder
from swarm.consensus.changes import OpenStepFacts
from swarm.consensus.faults import newly_barred
from swarm.consensus.records import NO_RECORD
from swarm.consensus.roster import Roster
from swarm.consensus.slowness import Barred, Slow
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Unreachable
from swarm.ids import PartName, PeerId
from swarm.step.leader.book import StepBook
from swarm.step.leader.close import StepClose
from swarm.step.leader.exclusion import ALONE_S, MAX_FAILURES, PROVEN_WRONG, ExclusionPolicy, left_out
from swarm.step.turnout import MAX_TOLD, REASON_CHARS
from tests.harness.rigs.consensus import FAULTY
from tests.harness.rigs.step import ROSTER, RULES, THREE, A, B, T, listed, verify

STAGE = PartName("stage-0")
C = PeerId("C")
LATE, BUSY, CUT, NO = DeadlineMissed("late"), Busy("later"), Unreachable("cut"), Refused("no")


@pytest.mark.parametrize(
    ("error", "times_out"), [(NO, 1), (PeerError("its disk is full"), 1), (LATE, 1), (BUSY, 3), (CUT, 3)]
)
def test_member_that_is_there_is_out_after_so_many_failures(error: PeerError, times_out: int) -> None:
    policy = ExclusionPolicy(THREE)
    for times in range(1, MAX_FAILURES + 1):
        policy.failed({B: error}, {})
        assert policy.out({}) == ({B: str(error)} if times >= times_out else {})


def test_last_replica_of_a_part_may_be_late_as_often_as_others_may_be_busy() -> None:
    policy, gone = ExclusionPolicy(ROSTER), {A: "silent"}
    for _ in range(MAX_FAILURES - 1):
        policy.failed({B: LATE}, gone)
    assert policy.out(gone) == gone
    policy.failed({B: LATE}, gone)
    assert policy.out(gone) == {**gone, B: "late"}


def test_member_that_is_gone_is_out_for_that_and_in_again_when_it_is_back() -> None:
    policy = ExclusionPolicy(THREE)
    policy.failed({B: NO}, {B: "silent"})
    assert policy.out({B: "silent"}) == {B: "silent"}
    assert policy.out({}) == {}


@given(order=st.permutations([A, B, C]))
def test_of_replicas_that_all_are_late_the_same_one_is_left_in_whatever_order_they_failed(order: list[PeerId]) -> None:
    policy = ExclusionPolicy(THREE)
    policy.failed(dict.fromkeys(order, LATE), {})
    assert policy.out({}) == {A: "late", B: "late"}


def test_slow_host_is_spared_where_trainers_of_its_organisation_could_feed_no_more() -> None:
    parts = {"a0": "stage-0", "a1": "stage-1", "a2": "stage-1", "b0": "stage-0", "b1": "stage-1", "b2": "stage-0"}
    homes = {name: name[0] for name in (*parts, "at", "bt", "bu")}
    slow_one = Slow(said_by=("a1", "bt", "b0"))
    holders = [
        Holder(serial=f"{at:016x}", peer=name, name=name, organisation=homes[name], role="any", vote=True, until_step=9)
        for at, name in enumerate(homes)
    ]

    def out(slow: str, *, own: bool) -> set[str]:
        members = [listed(p, "stage" if p in parts else "trainer", parts.get(p, "ends")) for p in homes]
        said = Admissions(issuers=(), holders=tuple(holders), own_routes=own)
        return {*ExclusionPolicy(Roster(members, said, {slow: slow_one})).out({})}

    assert out("a0", own=False) == {"a0"}
    assert out("a0", own=True) == set(), "b0 holds its part, and no trainer of a may use it"
    assert out("a1", own=True) == {"a1"}, "a2 is there"
    assert out("at", own=True) == {"at"}, "a slow trainer feeds nobody but itself"


def test_slow_replica_is_spared_where_one_other_would_be_left_to_compare_nothing_with() -> None:
    slow = {A: Slow(said_by=(B, C, B))}
    assert {*ExclusionPolicy(Roster(THREE.members, None, slow)).out({})} == {A}
    assert {*ExclusionPolicy(Roster((one for one in THREE.members if one.peer != C), None, slow)).out({})} == set()


def test_who_is_proven_wrong_is_out_while_its_part_has_another() -> None:
    wrong = {B: [B], C: [C]}
    policy = ExclusionPolicy(THREE, wrong=lambda: wrong)
    assert policy.out({}) == {B: PROVEN_WRONG, C: PROVEN_WRONG}
    assert policy.out({A: "silent"}) == {A: "silent", B: PROVEN_WRONG}, "one must stay"
    policy.forgive_needed(0.0, {})
    assert policy.lost({}) == {}, "no step is given up for it"
    wrong.clear()
    assert policy.out({}) == {}


def test_proof_that_names_one_who_must_stay_puts_nobody_out_and_is_in_no_record() -> None:
    book = StepBook(
        RULES, verify, OpenStepFacts(1, Roster(THREE.members, barred={C: Barred(contradicted=1)}), NO_RECORD)
    )
    book.accuse(FAULTY.model_copy(update={"accused": B}), (B, C))
    policy, close = ExclusionPolicy(THREE, wrong=book.wrong), SimpleNamespace(book=book)
    for gone, named in (({}, {B, C}), ({A: "silent"}, set())):
        out = policy.out(gone)
        assert out.keys() == {*gone} | named
        told = StepClose._faults(close, out)  # type: ignore[arg-type]
        assert ({one.accused for one in told["faults"]}, newly_barred(told["barred"], 1)) == (named & {B}, named)


def test_member_that_lacks_something_is_out_the_third_time() -> None:
    policy = ExclusionPolicy(THREE)
    for times in range(1, MAX_FAILURES + 1):
        policy.lacks(A, "it lacks it")
        assert policy.out({}) == ({A: "it lacks it"} if times == MAX_FAILURES else {})


def test_tied_replicas_are_there_and_count_as_lost_until_they_are_asked_again() -> None:
    policy = ExclusionPolicy(ROSTER)
    assert not policy.untie(STAGE)
    policy.tie((A, B), "tied")
    assert policy.lost({T: "silent"}) == {A: "tied", B: "tied", T: "silent"}
    assert policy.untie(STAGE)
    assert policy.lost({}) == policy.out({}) == {}


def test_those_without_whom_a_part_is_lost_are_asked_again_and_one_that_differs_only_after_a_while() -> None:
    policy = ExclusionPolicy(ROSTER)
    policy.holds_up({A: "rounds break with it"})
    policy.forgive_needed(0.0, {})
    assert policy.out({}) == {A: "rounds break with it"}, "another replica is there"
    policy.differ((B,), "it differs")
    assert policy.forgivable((A, B)) == {A: "rounds break with it"}
    assert policy.differing((A, B)) == [B]
    policy.forgive_needed(1.0, {})
    assert policy.out({}) == {B: "it differs"}
    gone = {A: "silent"}
    policy.forgive_needed(1.0, gone)
    policy.forgive_needed(ALONE_S, gone)
    assert policy.out(gone) == {**gone, B: "it differs"}
    policy.forgive_needed(1.0 + ALONE_S, gone)
    assert policy.out(gone) == gone


def test_time_without_a_part_begins_anew_when_one_is_there_that_was_never_left_out() -> None:
    policy, gone = ExclusionPolicy(ROSTER), {A: "silent"}
    policy.differ((B,), "it differs")
    policy.forgive_needed(0.0, gone)
    policy.parts_are_held({B})  # A is back
    policy.forgive_needed(ALONE_S, gone)
    assert policy.out(gone) == {**gone, B: "it differs"}


def test_replicas_that_nobody_can_call_are_out_but_for_the_first_where_one_reduces_for_all() -> None:
    roster = Roster([*(listed(peer, outgoing=peer != "A") for peer in "ABC"), listed(T, "trainer", "ends")])
    for served in (True, False):
        out = ExclusionPolicy(roster, served=served).out({A: "silent"})
        assert out.keys() == ({A, C} if served else {A})


def test_others_are_told_of_members_only_and_no_more_than_there_is_room_for() -> None:
    many = Roster(listed(f"P{number:03}") for number in range(MAX_TOLD + 5))
    told = left_out(many, {**dict.fromkeys(many.peers, "x" * 10_000), PeerId("stranger"): "gone"})
    assert list(told) == list(many.peers[:MAX_TOLD])
    assert {len(why) for why in told.values()} == {REASON_CHARS}

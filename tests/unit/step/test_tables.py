"""What follows from what members answer: the same, in whatever order they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.changes import Changes
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Unreachable, Violation
from swarm.ids import PartName, PeerId
from swarm.step.decisions import Disagreement
from swarm.step.leader.tables import AppliedTable, AttemptNumbers, ReconciledTable, VoidAttempt, VoterTable
from swarm.step.messages import Accepted, Averaged, Prepared, Reconcile
from tests.harness.rigs.step import COMMITTED, CURSOR, GENESIS, RULES, THREE, A, B, T, microbatch

C = PeerId("C")
BEFORE = GENESIS.model_copy(update={"roster": THREE.members})
STAGE, ENDS = PartName("stage-0"), PartName("ends")
V = TypeVar("V")
orders = st.permutations(THREE.peers)


def holds(digest: str, sq_norm: float = 3.0, cursor: tuple[int, int] | None = None) -> Averaged:
    return Averaged(digest=digest * 64, sq_norm=sq_norm, cursor=cursor)


def fails(culprit: PeerId | None, why: str = "void", **more: object) -> Averaged:
    return Averaged.model_validate(
        {"digest": "", "sq_norm": 0.0, "cursor": None, "failure": why, "culprit": culprit, **more}
    )


WELL = {A: holds("a"), B: holds("a"), C: holds("a"), T: holds("b", cursor=CURSOR)}


def reconciled(answers: Mapping[PeerId, Averaged]) -> ReconciledTable:
    asked = Reconcile(step=1, term=0, committed=COMMITTED, live=THREE.peers, attempts={})
    return ReconciledTable(THREE, asked, answers)


def shuffled(answers: Mapping[PeerId, V], order: list[PeerId]) -> dict[PeerId, V]:
    return {peer: answers[peer] for peer in order if peer in answers}


# --- reconcile -------------------------------------------------------------------------------------------------------

LACKS = (microbatch(0), microbatch(1))
FAILURES: list[tuple[Mapping[PeerId, Averaged], set[PeerId], VoidAttempt, str]] = [
    ({A: fails(B)}, set(), VoidAttempt((STAGE,), {}, {}), "A of B: void"),
    ({A: fails(B), T: fails(None)}, set(), VoidAttempt((ENDS, STAGE), {}, {}), "A of B: void; T: void"),
    ({A: fails(A, "it lacks it")}, set(), VoidAttempt((STAGE,), {}, {A: "it lacks it"}), "A: it lacks it"),
    ({A: fails(A, missing=LACKS)}, {T}, VoidAttempt((STAGE,), {A: LACKS}, {}), "A: void"),
    (
        {A: fails(A, missing=LACKS), B: fails(B, "and so do I")},
        {T},
        VoidAttempt((STAGE,), {A: LACKS}, {B: "and so do I"}),
        "A: void; B: and so do I",
    ),
    ({A: fails(A, differs=True)}, set(), VoidAttempt((STAGE,), {}, {}), "A: void"),
]


def test_attempt_of_which_all_have_a_result_is_not_void() -> None:
    assert reconciled(WELL).void(()) == (None, "")


@pytest.mark.parametrize(("failed", "out", "found", "reason"), FAILURES)
@given(order=orders)
def test_void_attempt_says_what_follows_and_why(
    failed: Mapping[PeerId, Averaged], out: set[PeerId], found: VoidAttempt, reason: str, order: list[PeerId]
) -> None:
    assert reconciled(shuffled({**WELL, **failed}, order)).void(out) == (found, reason)


def test_failure_of_one_that_holds_no_part_voids_no_round() -> None:
    void, reason = replace(reconciled(WELL), roster=THREE, answers={A: fails(B), T: WELL[T]}).void(())
    assert void is not None
    assert (void.parts, reason) == ((STAGE,), "A of B: void")


# --- apply and the record --------------------------------------------------------------------------------------------


def applied(order: list[PeerId], **instead: str) -> AppliedTable:
    table = reconciled(shuffled(WELL, order))
    asked, clipped = table.scalars(RULES)
    states = {A: "c", B: "c", C: "c", T: "d"} | {PeerId(peer): digest for peer, digest in instead.items()}
    answers = {peer: Prepared(digest=states[peer] * 64) for peer in order}
    return AppliedTable(table, asked, clipped, answers)


def test_record_says_whose_sums_were_left_out_as_those_say_who_did_it_and_nothing_that_cannot_be() -> None:
    did = {A: 10, B: 11}
    said = {A: {B: 4}, B: {B: 7, A: 1}, T: {A: 1}, C: {A: did[A] + 1}}
    answers = {peer: one.model_copy(update={"guarded": said[peer]}) for peer, one in WELL.items()}
    for guards, told in ((True, {A: {B: 4}, B: {B: 7, A: 1}}), (False, {})):
        assert reconciled(answers).scalars(replace(RULES, guards=guards))[0].guarded == told
    asked, clipped = reconciled(answers).scalars(replace(RULES, guards=True))
    applied = AppliedTable(
        reconciled(answers), asked, clipped, {p: Prepared(digest="cccd"["ABCT".index(p)] * 64) for p in WELL}
    )
    record = applied.record(BEFORE, BEFORE.hash(), Changes(), THREE, RULES.max_members)
    assert record.called_far == {B: (11, (A, B)), A: (1, (B,))}
    assert record.hash() != record.model_copy(update={"guarded": {}}).hash()
    assert "guarded" not in record.model_copy(update={"guarded": {}}).model_dump(mode="json")


def test_record_says_what_is_usual_of_microbatches_by_what_replicas_said_and_the_record_before() -> None:
    said = {A: (1.0, 4.0), B: (3.0, 0.0), C: (9.0, 8.0), T: (0.0, 0.0)}
    answers = {peer: one.model_copy(update={"lengths": said[peer]}) for peer, one in WELL.items()}
    states = {A: "c", B: "c", C: "c", T: "d"}
    for influence, before, told in (
        (2.0, {}, {"stage-0": (3.0, 4.0)}),
        (2.0, {"stage-0": (1.0, 16.0), "ends": (5.0, 0.0)}, {"stage-0": (2.0, 8.0), "ends": (5.0, 0.0)}),
        (0.0, {}, {}),
    ):
        asked, clipped = reconciled(answers).scalars(replace(RULES, influence=influence))
        assert asked.lengths == ({peer: said[peer] for peer in (A, B, C)} if influence else {})
        prepared = {peer: Prepared(digest=states[peer] * 64) for peer in WELL}
        table = AppliedTable(reconciled(answers), asked, clipped, prepared)
        known = BEFORE.model_copy(update={"usual": before})
        record = table.record(known, known.hash(), Changes(), THREE, RULES.max_members)
        assert (record.usual, record.lengths) == (told, asked.lengths)


@given(one=orders, other=orders)
def test_record_is_the_same_in_whatever_order_members_answered(one: list[PeerId], other: list[PeerId]) -> None:
    first, second = (
        applied(order).record(BEFORE, BEFORE.hash(), Changes(), THREE, RULES.max_members) for order in (one, other)
    )
    assert first.hash() == second.hash()
    assert first.digests == {"ends": "d" * 64, "stage-0": "c" * 64}
    assert (first.committed, first.cursors, first.term) == (COMMITTED, {T: CURSOR}, 0)


@pytest.mark.parametrize(
    ("instead", "dissenters"), [({"B": "e"}, (B,)), ({"A": "e", "B": "f"}, ()), ({"A": "e", "C": "e"}, (B,))]
)
@given(order=orders)
def test_replicas_that_differ_are_the_same_in_whatever_order_they_answered(
    instead: dict[str, str], dissenters: tuple[PeerId, ...], order: list[PeerId]
) -> None:
    with pytest.raises(Disagreement, match="the updated weights") as caught:
        applied(order, **instead).digests()
    assert caught.value.dissenters == dissenters


@given(order=orders)
def test_means_that_differ_are_found_before_anybody_is_asked_to_apply_one(order: list[PeerId]) -> None:
    with pytest.raises(Disagreement, match="the averaged gradient") as caught:
        reconciled(shuffled({**WELL, B: holds("e")}, order)).scalars(RULES)
    assert caught.value.dissenters == (B,)


# --- who accepted ----------------------------------------------------------------------------------------------------

FIVE = tuple(PeerId(name) for name in "ABCDE")
YES = Accepted(signature=bytes(64))
NO, LATER = Refused("not this"), Busy("later")
VOTES: list[tuple[str, set[str], dict[str, PeerError], str, str]] = [
    ("all", {*"ABCDE"}, {}, "majority", "5 of 5"),
    ("three", {*"ABC"}, {"D": NO, "E": NO}, "majority", "3 of 5"),
    ("two", {*"AB"}, {"C": LATER}, "open", "2 of 5, 3 are needed"),
    ("two say no", {*"AB"}, {"C": NO, "D": NO}, "open", "2 of 5, 3 are needed"),
    ("three say no", {*"AB"}, {"C": NO, "D": Violation("a lie"), "E": NO}, "refused", "not this; a lie; not this"),
    ("three are late", set(), {"A": LATER, "B": LATER, "C": Unreachable("gone")}, "open", "0 of 5, 3 are needed"),
    ("of those who have no vote none counts", {*"AB", "X", "Y"}, {"Z": NO}, "open", "2 of 5, 3 are needed"),
]


@pytest.mark.parametrize(("said", "errors", "decision", "reason"), [v[1:] for v in VOTES], ids=[v[0] for v in VOTES])
@given(data=st.data())
def test_voters_decide_the_same_in_whatever_order_and_portions_they_answer(
    said: set[str], errors: dict[str, PeerError], decision: str, reason: str, data: st.DataObject
) -> None:
    table: VoterTable[Accepted] = VoterTable(FIVE)
    for name in data.draw(st.permutations(sorted(said))):
        table = table.told({PeerId(name): YES})
    order = data.draw(st.permutations(sorted(errors)))
    table = table.told({PeerId(name): errors[name] for name in order})
    assert table.decision == (decision, reason)


def test_voters_that_answered_are_asked_no_more_and_those_that_are_gone_only_where_others_are_too_few() -> None:
    members = (*FIVE, PeerId("X"))
    table: VoterTable[Accepted] = VoterTable(FIVE)
    assert table.asked_next(members, {"E"}) == [*"ABCDX"]
    assert table.asked_next(members, {*"CDEX"}) == [*"ABCDE"], "X has no vote to have kept"
    told = table.told({PeerId("A"): YES, PeerId("B"): DeadlineMissed("late")})
    assert told.asked_next(members, ()) == [*"BCDEX"]
    assert told.asked_next(members, {*"ADE"}) == [*"BCX"], "A has voted, and may go"


def test_voter_that_said_no_and_then_yes_counts() -> None:
    table: VoterTable[Accepted] = VoterTable(FIVE[:1])
    assert table.told({FIVE[0]: NO}).decision == ("refused", "not this")
    assert table.told({FIVE[0]: NO}).told({FIVE[0]: YES}).decision == ("majority", "1 of 1")


# --- numbers of attempts ---------------------------------------------------------------------------------------------


def test_attempt_with_others_or_other_work_has_a_new_number_and_a_repeated_one_the_same() -> None:
    numbers = AttemptNumbers(0, THREE)
    assert numbers.numbers(COMMITTED, THREE.peers) == {"ends": 1, "stage-0": 1}
    assert numbers.numbers(COMMITTED, THREE.peers) == {"ends": 1, "stage-0": 1}
    assert numbers.numbers(COMMITTED, (A, B, T)) == {"ends": 1, "stage-0": 2}
    moved = tuple(one.model_copy(update={"route": (A,)}) for one in COMMITTED)
    assert numbers.numbers(moved, (A, B, T)) == {"ends": 1, "stage-0": 3}
    assert numbers.numbers(moved[:1], (A, B, T)) == {"ends": 2, "stage-0": 4}
    numbers.void(ENDS)
    assert numbers.numbers(moved[:1], (A, B, T)) == {"ends": 3, "stage-0": 4}

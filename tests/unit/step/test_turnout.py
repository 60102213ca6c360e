"""Who was in a step's averaging, and why others were not."""

from __future__ import annotations

from typing import Any

from swarm.consensus.roster import Roster
from swarm.ids import PeerId
from swarm.step.turnout import GIVEN_UP, LEFT_OUT, MAX_TOLD, NO_WORK, Turnout, far_sums, turnouts
from swarm.step.turnout import LATE as LATE_REASON
from tests.harness.rigs.step import COMMITTED, GENESIS, ROSTER, A, B, T, listed, record

C = PeerId("C")
LATE = listed(C)


def of_stage(
    gone: dict[PeerId, str] | None = None, left_out: dict[PeerId, str] | None = None, **fields: Any
) -> Turnout:
    """Stage 0's, in a step whose record has these fields."""
    closed = record(GENESIS).model_copy(update=fields)
    found = {one.part: one for one in turnouts(closed, ROSTER, gone or {}, left_out or {})}
    assert set(found) == {"stage-0", "ends"}
    return found["stage-0"]  # type: ignore[index]


def test_everybody_averaged() -> None:
    found = of_stage()
    assert (found.live, found.participating, found.averaged) == ((A, B), (A, B), (A, B))
    assert found.whole
    assert not found.why


def test_replica_that_computed_nothing_took_part_all_the_same() -> None:
    found = of_stage(committed=COMMITTED[:1])
    assert (found.live, found.participating, found.averaged) == ((A, B), (A, B), (A,))
    assert found.why == {B: NO_WORK}
    assert found.whole


def test_replica_that_joins_with_the_step_hears_from_when_on_it_averages() -> None:
    found = of_stage(roster=Roster([*ROSTER.members, LATE]).members)
    assert (found.live, found.participating, found.late) == ((A, B, C), (A, B), (C,))
    assert found.why == {C: "joined with step 1: averages from step 2 on"}
    assert found.whole


def test_replica_that_is_lost_is_not_live_and_leaves_the_other_alone() -> None:
    found = of_stage({B: "no answer"}, {B: "no answer"}, committed=COMMITTED[:1], absent=(B,))
    assert (found.live, found.participating, found.averaged) == ((A,), (A,), (A,))
    assert found.why == {B: "lost: no answer"}
    assert found.alone
    assert not found.whole


def test_replica_whose_sum_is_left_out_has_nothing_in_the_mean_and_partly_something() -> None:
    found = of_stage(guarded={A: {B: 4}, B: {B: 7}})
    assert (found.participating, found.averaged) == ((A, B), (A,))
    names = ", ".join(ROSTER.names[peer] for peer in (A, B))
    said = f"left out of the mean: 11 of 11 tokens, its sum is far from the others', as {names} said"
    assert found.why == {B: said}
    found = of_stage(guarded={A: {B: 4}})
    assert found.averaged == (A, B)
    assert set(found.why) == {B}
    assert found.whole


def test_sum_is_far_by_the_word_of_most_replicas_and_not_of_one_nor_in_part() -> None:
    said = {A: {B: 4}, B: {B: 7}}
    assert [*far_sums(record(guarded=said), ROSTER)] == [("stage-0", B, 11, (A, B))]
    assert [*far_sums(record(), ROSTER)] == []
    assert [*far_sums(record(guarded={A: {B: 11}}), ROSTER)] == [], "of two replicas one says so"
    assert [*far_sums(record(guarded={A: {B: 3}, B: {B: 2}}), ROSTER)] == [], "5 of 11 tokens"


def test_one_replica_that_calls_a_sum_far_takes_nobody_out_of_the_mean_and_is_named() -> None:
    found = of_stage(guarded={A: {B: 11}})
    assert found.averaged == (A, B), "one of two replicas says so"
    assert found.why[B].endswith(f"as {ROSTER.names[A]} said")
    twice = of_stage(guarded={A: {B: 11}, B: {B: 11}})
    assert "11 of 11 tokens" in twice.why[B], "both count the same tokens"


def test_replica_that_was_late_is_told_what_becomes_of_its_work() -> None:
    found = of_stage({}, {B: "late: not ready"}, late={B: (1, 8)})
    assert (found.live, found.participating, found.averaged) == ((A, B), (A,), (A,))
    assert found.why == {B: LATE_REASON}


def test_replica_that_is_there_and_left_out_is_told_why() -> None:
    absent = {"committed": COMMITTED[:1], "absent": (B,)}
    assert of_stage({}, {B: "rounds with it failed"}, **absent).why == {B: "left out: rounds with it failed"}
    found = of_stage({}, {}, **absent)
    assert found.why == {B: LEFT_OUT}
    assert (found.live, found.participating) == ((A, B), (A,))
    assert not found.whole


def test_of_many_without_work_a_few_are_named_and_all_are_counted() -> None:
    many = Roster([LATE.model_copy(update={"peer": f"P{number:03}"}) for number in range(500)])
    late = Roster([*many.members, LATE]).members
    closed = record(GENESIS).model_copy(update={"committed": COMMITTED[:1], "roster": late, "absent": ("P000",)})
    [found] = turnouts(closed, many, {}, {})
    assert (len(found.live), len(found.participating), len(found.averaged)) == (501, 499, 0)
    assert list(found.why)[:2] == ["P000", C]
    assert len(found.why) == MAX_TOLD


def test_member_that_dies_after_its_round_was_in_it() -> None:
    found = of_stage({B: "no answer"})
    assert (found.live, found.averaged) == ((A, B), (A, B))
    assert not found.why


def test_step_that_is_given_up_averages_nobody() -> None:
    found = of_stage({B: "no answer"}, committed=(), void=True, absent=(B,))
    assert (found.live, found.participating, found.averaged) == ((A,), (), ())
    assert found.why == {A: GIVEN_UP, B: "lost: no answer"}


def test_ends_are_averaged_by_those_who_fed() -> None:
    ends = turnouts(record(GENESIS), ROSTER, {}, {})[0]
    assert (ends.part, ends.averaged, ends.alone) == ("ends", (T,), True)


def test_founding_record_averages_nothing() -> None:
    assert turnouts(GENESIS, ROSTER, {}, {}) == ()

"""How many replicas a close needs, how long it waits for the rest, and what the record owes those that were late."""

from __future__ import annotations

import math

import pytest

from swarm.errors import Refused, Violation
from swarm.ids import PartName, PeerId
from swarm.step.lateness import (
    LateRules,
    LateVerdict,
    forgone,
    grace_s,
    handicaps,
    judge,
    lacking,
    owed_tokens,
    spread_ms,
    weight,
)
from tests.harness.rigs.step import COMMITTED, GENESIS, ROSTER, A, B, T, record

STAGE = PartName("stage-0")
FOUR = [PeerId(name) for name in "abcd"]
RULES = LateRules(quorum=0.75, grace=0.1, may_miss=2, last=9)
HALF = LateRules(quorum=0.5, last=9)


def judged(ready: dict[str, float], *, now: float, missed: dict[str, int] | None = None) -> LateVerdict:
    excusable = {peer: (missed or {}).get(peer, 0) for peer in FOUR if (missed or {}).get(peer, 0) < RULES.may_miss}
    at = {PeerId(peer): moment for peer, moment in ready.items()}
    return judge(RULES, {STAGE: FOUR}, excusable, at, now=now, grace=2.0)


def test_close_needs_a_share_of_the_replicas_that_are_there_and_at_least_one() -> None:
    assert [RULES.needed(count) for count in (1, 2, 3, 4, 8)] == [1, 2, 3, 3, 6]
    assert LateRules().needed(7) == 7


def test_close_waits_for_a_quorum_however_long_and_then_for_the_grace() -> None:
    assert judged({"a": 1.0, "b": 2.0}, now=99.0) == LateVerdict(None)
    assert judged({"a": 1.0, "b": 2.0, "c": 3.0}, now=3.0) == LateVerdict(None, 5.0)
    late, _, spread_s = judged({"a": 1.0, "b": 2.0, "c": 3.0}, now=5.0)
    assert set(late or ()) == {"d"}
    assert spread_s == 2.0, "the grace may have been too short"
    assert judged({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.5}, now=4.5) == LateVerdict({}, 5.0, 1.5)


def test_whose_link_makes_it_late_is_not_waited_for_once_all_are_heard() -> None:
    late, _, spread_s = judged({"a": 1.0, "b": 1.0, "c": 1.0, "d": 9.0}, now=1.1)
    assert late == {"d": "late: ready 8 s after a quorum, over its link, and 2 s are waited"}
    assert spread_s == 0.0


def test_who_has_missed_as_many_closes_as_it_may_is_waited_for() -> None:
    ready = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert judged(ready, now=99.0, missed={"d": 2}) == LateVerdict(None)
    assert judged({**ready, "d": 50.0}, now=1.0, missed={"d": 2}).late == {}
    late, _, spread_s = judged(ready, now=99.0, missed={"d": 1})
    assert set(late or ()) == {"d"}
    assert spread_s == 0.0, "a straggler makes nobody wait longer"


def test_who_fails_to_answer_is_judged_by_the_next_question_where_there_is_no_quorum() -> None:
    assert judged(dict.fromkeys("abcd", math.inf), now=1.0).late == {}
    late, *_ = judged({"a": 1.0, "b": 1.0, "c": 1.0, "d": math.inf}, now=1.0)
    assert set(late or ()) == {"d"}


def test_grace_follows_what_arrivals_differ_by_within_a_share_of_the_step() -> None:
    def after(spread: int) -> float:
        return grace_s(RULES, GENESIS.model_copy(update={"spread_ms": spread}), 20.0)

    assert [after(spread) for spread in (0, 1, 300, 5000)] == [2.0, 0.5, 1.2, 2.0]


def test_usual_spread_moves_by_a_quarter_of_the_difference() -> None:
    before = GENESIS.model_copy(update={"spread_ms": 100})
    assert [spread_ms(before, seen) for seen in (0.1, 0.5, 0.0)] == [100, 200, 75]
    assert spread_ms(GENESIS, 0.25) == 250
    assert spread_ms(GENESIS, 0.0) == 1, "nothing is said by 0"


def test_links_tell_whose_contribution_takes_longer() -> None:
    links = {"a": (1, 1000), "b": (1, 1000), "c": (1, 50), "d": (1, 0)}
    before = GENESIS.model_copy(update={"links": links})
    assert handicaps(before, FOUR, 2000) == {"a": 0.0, "b": 0.0, "c": 38.0}
    assert not handicaps(GENESIS, FOUR, 2000)


def test_record_owes_who_was_late_the_tokens_of_each_step_it_missed() -> None:
    did = sum(one.tokens for one in COMMITTED if one.route[0] == B)
    assert did > 0
    first = HALF.owed(ROSTER, GENESIS, COMMITTED, [B])
    assert first == {B: (1, did)}
    closed = record(GENESIS).model_copy(update={"late": first})
    assert owed_tokens(closed) == {B: did}
    assert HALF.owed(ROSTER, closed, COMMITTED, [B]) == {B: (2, 2 * did)}
    assert LateRules(quorum=0.5, last=9, weighed=False).owed(ROSTER, closed, COMMITTED, [B]) == {B: (2, 0)}
    assert HALF.owed(ROSTER, closed, COMMITTED, []) == {}


def test_records_that_know_nothing_of_lateness_keep_their_hash() -> None:
    assert not {"late", "spread_ms"} & record(GENESIS).model_dump().keys()


@pytest.mark.parametrize(
    ("rules", "live", "late", "before"),
    [
        (LateRules(last=9), [A, T], [B], {}),
        (HALF, [T], [A, B], {}),
        (HALF, [A, B], [T], {}),
        (HALF, [A, B, T], [B], {}),
        (HALF, [A, T], [B], {B: (3, 8)}),
        (LateRules(quorum=0.5, last=1), [A, T], [B], {}),
    ],
    ids=["waits for all", "fewer than a quorum", "a trainer", "closes it too", "missed enough", "last step"],
)
def test_attempt_that_no_honest_leader_makes_is_refused(
    rules: LateRules, live: list[str], late: list[str], before: dict[str, tuple[int, int]]
) -> None:
    HALF.check(ROSTER, GENESIS, [A, T], [B])
    with pytest.raises(Violation):
        rules.check(ROSTER, GENESIS.model_copy(update={"late": before}), live, late)


def test_contribution_of_several_steps_weighs_the_tokens_of_one_of_them() -> None:
    assert weight(40, None) == 40
    assert weight(40, (2, 80)) == 40, "as in each close that it was in it would have"
    assert weight(0, (1, 41)) == 21, "it brings what it learnt, though it did nothing in this step"
    assert weight(40, (2, 0)) == 40, "with fragments nothing is weighed"


def test_who_has_a_state_of_others_lacks_what_it_is_owed_of_earlier_steps() -> None:
    before = GENESIS.model_copy(update={"step": 5, "late": {A: (2, 80), B: (1, 0)}})
    assert not lacking(before, {A: 4}), "steps 4 and 5 are in its weights"
    assert lacking(before, {A: 5, B: 6}) == (A,)
    assert not lacking(before, {})


def test_what_is_owed_is_lost_with_its_replica_and_with_a_step_that_is_given_up() -> None:
    before = record(GENESIS).model_copy(update={"late": {A: (2, 80), B: (1, 0)}})
    after = record(before)
    assert not forgone(before, after)
    assert forgone(before, after.model_copy(update={"absent": (A, B)})) == {A: (80, "it was lost")}
    assert forgone(before, after.model_copy(update={"void": True})) == {A: (80, "the step was given up")}


@pytest.mark.parametrize("how", ["leaves", "moves", "ends"])
def test_record_lets_nobody_go_whom_it_calls_late(how: str) -> None:
    fine = record(GENESIS).model_copy(update={"late": {B: (1, 8)}})
    HALF.check_staying(ROSTER, fine)
    others = [member for member in fine.roster if member.peer != B]
    elsewhere = [member.model_copy(update={"part": "stage-7"}) for member in fine.roster if member.peer == B]
    changes: dict[str, object] = {
        "leaves": {"roster": tuple(others)},
        "moves": {"roster": (*others, *elsewhere)},
        "ends": {"ended": True},
    }
    bad = fine.model_copy(update=changes[how])  # type: ignore[arg-type]
    with pytest.raises(Refused):
        HALF.check_staying(ROSTER, bad)

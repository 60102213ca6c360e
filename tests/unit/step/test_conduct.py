"""What a member vetoes of a fresh proposal, case by case."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.ids import PeerId
from swarm.step.leader.exclusion import STALLED_S
from swarm.step.member.conduct import LeaderConduct, Vetoes
from tests.harness.rigs.consensus import COMMITTED, A, B, T, listed, record
from tests.harness.rigs.step.member import RULES

C, U = PeerId("C"), PeerId("U")
ROSTER = Roster([listed(A), listed(B), listed(C), listed(T, "trainer", "ends"), listed(U, "trainer", "ends")])
TO_ONE = tuple(one.model_copy(update={"route": (A,)}) for one in COMMITTED)


VETOES = Vetoes(A, RULES)


def found(
    proposed: CloseRecord,
    *,
    conduct: LeaderConduct | None = None,
    gone: Collection[str] = (),
    now: float = 1.0,
    **rules: Any,
) -> str:
    vetoes, lost = Vetoes(A, replace(RULES, **rules)), {PeerId(peer): "silent" for peer in gone}
    return vetoes.find(ROSTER, proposed, conduct or LeaderConduct(began=0.0), lost, now)


def test_absence_of_one_that_is_heard_is_vetoed() -> None:
    assert "B is there" in found(record(absent=(B,)))
    assert "B is there" in found(record(absent=(B, C)), gone=[C])


@pytest.mark.parametrize(
    "changes",
    [
        {"gone": [B]},
        {"conduct": LeaderConduct(began=0.0, missed={B})},
    ],
)
def test_absence_of_one_that_was_lost_to_us_too_is_not(changes: dict[str, Any]) -> None:
    assert found(record(absent=(B,)), **changes) == ""


def test_absence_of_one_with_which_two_leaders_tried_and_both_went_on_without_it_is_not() -> None:
    conduct, everybody = LeaderConduct(began=0.0), [A, B, C, T, U]
    conduct.attempt(C, 0, everybody)
    assert "B is there" in found(record(absent=(B,)), conduct=conduct), "nobody went on without it"
    conduct.attempt(C, 0, [A, C, T, U])
    assert "B is there" in found(record(absent=(B,)), conduct=conduct), "one leader did"
    conduct.attempt(T, 1, everybody)
    assert "B is there" in found(record(absent=(B,), term=1), conduct=conduct)
    conduct.attempt(T, 1, [A, C, T, U])
    assert found(record(absent=(B,), term=1), conduct=conduct) == ""
    assert "B is there" in found(record(absent=(B,), term=2), conduct=conduct), "the leader of this term did not try"
    for term in (5, 10):
        conduct.attempt(U, term, everybody)
        conduct.attempt(U, term, [A, B, T, U])
    assert "C is there" in found(record(absent=(C,), term=10), conduct=conduct), "however often the same one leads"


def test_our_own_absence_is_for_others_to_judge() -> None:
    assert found(record(absent=(A,))) == ""


def test_absence_of_a_trainer_of_whose_work_nothing_came_is_vetoed_before_a_minute_only() -> None:
    assert "U is there" in found(record(absent=(U,)), now=STALLED_S - 1)
    assert found(record(absent=(U,)), now=STALLED_S + 1) == ""
    assert "B is there" in found(record(absent=(B,)), now=STALLED_S + 1)


def test_replica_that_nobody_can_call_is_left_out_with_the_one_that_served_it() -> None:
    outgoing = Roster([m.model_copy(update={"outgoing": m.peer in (B, C)}) for m in ROSTER.members])
    vetoes = Vetoes(T, replace(RULES, served=True))
    assert vetoes.find(outgoing, record(absent=(A, C)), LeaderConduct(began=0.0), {A: "silent"}, 1.0) == ""


def test_void_record_evicts_nobody_that_is_heard_and_whose_part_is_not_tied() -> None:
    void = record(absent=(B, C), void=True, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, lr=0.0)
    assert "C is there" in found(void, gone=[B])
    tied = LeaderConduct(began=0.0)
    tied.tied |= {B: "stage-0 is tied", C: "stage-0 is tied"}
    assert found(void, conduct=tied) == ""


def test_quota_is_asked_of_the_first_term_and_of_those_that_were_there_throughout() -> None:
    assert "T fed 2 microbatches" in found(record(), max_share=0.5)
    assert found(record(term=1), max_share=0.5) == ""
    assert found(record(), max_share=0.5, conduct=LeaderConduct(began=0.0, missed={U})) == ""


def test_work_of_a_trainer_of_whom_nothing_is_taken_is_vetoed_in_every_term_while_another_is_there() -> None:
    tried = Roster(ROSTER.members, unfed={T: 9})
    for term in (0, 1):
        proposed, began = record(term=term), LeaderConduct(began=0.0)
        assert "T fed 2 microbatches of the step where 0 are its quota" in VETOES.find(tried, proposed, began, {}, 1.0)
        assert VETOES.find(tried, proposed, LeaderConduct(began=0.0, missed={U}), {}, 1.0) == ""

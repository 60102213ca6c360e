"""Whom a leader holds void rounds against."""

from __future__ import annotations

import pytest

from swarm.errors import Superseded
from swarm.ids import PartName, PeerId
from swarm.step.decisions import ATTEMPTS_PER_TERM
from swarm.step.leader.answers import MAX_VOID, VoidRounds
from swarm.step.leader.tables import AttemptNumbers
from swarm.step.messages import Averaged
from tests.harness.rigs.step import COMMITTED, ROSTER, A, B, T

C, D = PeerId("C"), PeerId("D")
PART = PartName("stage-0")
ALL = (A, B, C, D)


def said(culprit: PeerId | None = None, aborted_by: PeerId | None = None) -> Averaged:
    return Averaged(digest="", sq_norm=0.0, cursor=None, failure="void", culprit=culprit, aborted_by=aborted_by)


def judged(*voids: dict[PeerId, Averaged]) -> list[PeerId | None]:
    """Who is left out after each void round of those that are left; who says nothing knows nothing."""
    blame, out = VoidRounds(), list[PeerId | None]()
    for void in voids:
        group = tuple(peer for peer in ALL if peer not in out)
        blame.void(PART, {peer: void.get(peer, said()) for peer in group})
        found = blame.unfit(PART, group)
        out.append(found and found[0])
    return out


def test_member_that_two_others_blame_is_left_out_after_three_void_rounds() -> None:
    assert judged(*[{A: said(D), B: said(D)}] * 3) == [None, None, D]
    assert judged({A: said(D)}, {B: said(D)}, {C: said(D)}) == [None, None, D]


def test_liar_that_blames_one_after_the_other_alone_is_left_out_and_nobody_else() -> None:
    lies = [{D: said(peer)} for peer in (C, B, A, C, B, A)]
    assert judged(*lies) == [None] * 5 + [D]


def test_two_that_blame_each_other_alone_cost_one_of_them() -> None:
    *before, out = judged(*[{A: said(B), B: said(A)}] * 6)
    assert before == [None] * 5
    assert out in (A, B)


def test_what_only_trees_show_to_one_member_is_not_held_against_it() -> None:
    in_a_ring, straight = {A: said(D)}, {A: said(D), B: said(D), C: said(D)}
    assert judged(*[in_a_ring] * 3, *[straight] * 3) == [None] * 5 + [D]


def test_member_that_gives_rounds_up_and_blames_nobody_is_left_out() -> None:
    voids = {A: said(aborted_by=D), B: said(aborted_by=A), C: said(aborted_by=D)}
    assert judged(*[voids] * 6) == [None] * 5 + [D]


def test_member_that_gives_up_because_of_another_is_not_to_blame() -> None:
    voids = {A: said(C), B: said(aborted_by=A), D: said(aborted_by=A), C: said(aborted_by=A)}
    assert judged(*[voids] * 6)[-1] != C  # one word against another's
    assert judged(*[voids | {B: said(C, A)}] * 3)[-1] == C


def test_of_two_the_one_that_is_blamed_is_left_out() -> None:
    blame = VoidRounds()
    for last in (False, False, True):
        blame.void(PART, {A: said(B), B: said()})
        found = blame.unfit(PART, (A, B))
        assert (found is not None and found[0] == B) == last


def test_blame_of_who_is_not_in_the_part_and_of_oneself_counts_for_nothing() -> None:
    assert judged(*[{A: said(T), B: said(T), C: said(C)}] * 9) == [None] * 9


def test_rounds_that_nobody_explains_go_plainly_and_then_the_leader_is_at_a_loss() -> None:
    blame = VoidRounds()
    for made in range(1, 2 * MAX_VOID + 1):
        blame.void(PART, dict.fromkeys(ALL, said()))
        assert blame.unfit(PART, ALL) is None
        assert blame.plainly == ({PART} if made >= MAX_VOID else set())
        assert blame.at_a_loss(PART) == (made == 2 * MAX_VOID)


def test_term_has_no_more_attempts_than_the_next_one_leaves_it() -> None:
    attempts = AttemptNumbers(2, ROSTER)
    for made in range(1, ATTEMPTS_PER_TERM):
        assert attempts.numbers(COMMITTED, ROSTER.peers)["stage-0"] == 2 * ATTEMPTS_PER_TERM + made
        assert attempts.numbers(COMMITTED, ROSTER.peers)["ends"] == 2 * ATTEMPTS_PER_TERM + 1
        attempts.void(PART)
    with pytest.raises(Superseded, match="attempts"):
        attempts.numbers(COMMITTED, ROSTER.peers)


def plain() -> VoidRounds:
    """Whose part goes plainly by now."""
    blame = VoidRounds()
    for _ in range(MAX_VOID):
        blame.void(PART, dict.fromkeys(ALL, said()))
        assert blame.unfit(PART, ALL) is None
    assert blame.plainly == {PART}
    return blame


def test_who_gives_up_and_says_that_one_of_those_it_told_did_is_left_out() -> None:
    blame, found = plain(), None
    for _ in range(MAX_VOID):
        assert found is None
        blame.void(PART, {A: said(aborted_by=D), B: said(aborted_by=D), C: said(aborted_by=D), D: said(aborted_by=A)})
        found = blame.unfit(PART, ALL)
    assert found is not None
    assert found[0] == D


def differs(culprit: PeerId) -> dict[PeerId, Averaged]:
    return {peer: said(culprit if peer != culprit else None).model_copy(update={"differs": True}) for peer in ALL}


def test_who_holds_another_result_whoever_reduced_it_is_left_out_after_a_turn_of_each() -> None:
    blame = plain()
    for _ in range(len(ALL)):
        assert blame.unfit(PART, ALL) is None
        blame.void(PART, differs(B))
    found = blame.unfit(PART, ALL)
    assert found is not None
    assert found[0] == B


def test_who_is_given_another_result_by_one_that_reduces_in_all_turns_but_one_is_not_left_out() -> None:
    blame = plain()
    for _ in range(5):
        for _ in range(len(ALL) - 1):
            blame.void(PART, differs(B))
            assert blame.unfit(PART, ALL) is None
        blame.void(
            PART, {A: said(), B: said(), C: said(), D: said(A)}
        )  # in its idle turn it breaks the round otherwise
        found = blame.unfit(PART, ALL)
        assert found is None or found[0] == D
        if found is not None:
            return

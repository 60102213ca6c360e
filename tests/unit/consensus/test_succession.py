"""Everybody computes the same roster, and knows whose turn it is to lead."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.consensus.roster import Roster, due_term, own_term, owner
from swarm.ids import PeerId
from tests.harness.rigs.consensus import listed

STEP = 4
ROSTER = Roster([listed(f"p{n}", "bootstrap", None, name="n") for n in range(5)])
ORDER = ROSTER.succession(STEP)
gone_peers = st.sets(st.sampled_from(ORDER))
terms = st.integers(0, 40)
each = settings(max_examples=60, deadline=None, derandomize=True)


def test_terms_go_round_in_the_order_of_the_succession() -> None:
    assert [owner(ROSTER, STEP, term) for term in range(12)] == [*ORDER, *ORDER, *ORDER[:2]]
    assert owner(ROSTER, STEP, 0) == ROSTER.succession(STEP)[0]
    with pytest.raises(ZeroDivisionError):
        owner(Roster(()), STEP, 0)


@each
@given(me=st.sampled_from(ORDER), after=terms)
def test_own_term_is_the_first_of_ours_above(me: PeerId, after: int) -> None:
    mine = own_term(ROSTER, STEP, me, after)
    assert owner(ROSTER, STEP, mine) == me
    assert after < mine <= after + len(ORDER)


@pytest.mark.parametrize(
    ("gone", "known", "leads"),
    [
        (set(), 0, {0: 0}),
        ({0}, 0, {1: 1}),
        ({0, 1}, 0, {2: 2}),
        ({1}, 0, {0: 0}),
        ({0}, 1, {1: 1}),
        ({1}, 1, {2: 2}),
        ({4}, 4, {0: 5}),
        ({0, 1, 2, 3}, 0, {4: 4}),
    ],
)
def test_turn_is_the_first_ones_that_is_there_from_the_known_term_on(
    gone: set[int], known: int, leads: dict[int, int]
) -> None:
    lost = {ORDER[index] for index in gone}
    turns = {index: due_term(ROSTER, STEP, peer, known, lost) for index, peer in enumerate(ORDER) if peer not in lost}
    assert {index: term for index, term in turns.items() if term is not None} == leads


@each
@given(known=terms, gone=gone_peers)
def test_exactly_one_of_those_that_agree_who_is_gone_leads(known: int, gone: set[PeerId]) -> None:
    there = [peer for peer in ORDER if peer not in gone]
    leading = [peer for peer in there if due_term(ROSTER, STEP, peer, known, gone) is not None]
    assert len(leading) == (1 if there else 0)


@each
@given(known=terms, views=st.lists(gone_peers, min_size=5, max_size=5))
def test_those_that_disagree_who_is_gone_lead_in_different_terms(known: int, views: list[set[PeerId]]) -> None:
    due = [due_term(ROSTER, STEP, peer, known, seen - {peer}) for peer, seen in zip(ORDER, views, strict=True)]
    led = [term for term in due if term is not None]
    assert len(set(led)) == len(led)
    assert all(term >= known for term in led)


def test_stranger_leads_nothing() -> None:
    assert due_term(ROSTER, STEP, PeerId("X"), 0, set(ORDER)) is None


def test_succession_is_the_same_in_any_order_and_spreads_the_duty() -> None:
    members = [listed(f"p{i}", name="x") for i in range(6)]
    roster, shuffled = Roster(members), Roster(reversed(members))
    leaders = Counter(roster.succession(step)[0] for step in range(600))
    assert [roster.succession(s) for s in range(20)] == [shuffled.succession(s) for s in range(20)]
    assert set(leaders) == set(roster.peers)
    assert max(leaders.values()) < 150


def test_stages_are_in_numerical_order_beyond_ten() -> None:
    members = [listed(f"p{i:02}", part=f"stage-{i}", name="x") for i in reversed(range(12))]
    assert [replicas[0] for replicas in Roster(members).columns()] == [f"p{i:02}" for i in range(12)]

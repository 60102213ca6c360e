"""Everybody computes the same roster and leader."""

from collections import Counter

from swarm.consensus.roster import Roster
from tests.harness.rigs.consensus import listed


def test_succession_is_the_same_in_any_order_and_spreads_the_duty() -> None:
    members = [listed(f"p{i}", name="x") for i in range(6)]
    roster, shuffled = Roster(members), Roster(reversed(members))
    leaders = Counter(roster.succession(step)[0] for step in range(600))
    assert [roster.succession(s) for s in range(20)] == [shuffled.succession(s) for s in range(20)]
    assert set(leaders) == set(roster.peers)
    assert max(leaders.values()) < 150


def test_stages_are_in_numerical_order_beyond_ten() -> None:
    members = [listed(f"p{i:02}", part=f"stage-{i}", name="x") for i in reversed(range(12))]
    assert [replicas[0] for replicas in Roster(members).stages()] == [f"p{i:02}" for i in range(12)]

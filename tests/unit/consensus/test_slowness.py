"""When a run goes on without a member that holds steps up, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from swarm.consensus.slowness import FIRST_LEAVE, FORGET, MAX_SAID, PATIENT, Slow, dismissed, following, rests_until

SEVEN = ("A", "B", "C", "D", "E", "F", "M")


def said(leaders: Iterable[str], peers: tuple[str, ...] = SEVEN) -> dict[str, Slow]:
    """What records say after these led steps and waited for M each; in a capital letter, and not in a small one."""
    known: dict[str, Slow] = {}
    for step, leader in enumerate(leaders, 1):
        known = following(known, step, peers, (), (leader.upper(), ["M"] if leader.isupper() else []))
    return known


@pytest.mark.parametrize(
    ("leaders", "out"),
    [
        ("AB", False),
        ("ABC", True),
        ("AAAAAAAA", False),
        ("ABABABAB", False),  # of seven, two may be one too few
        ("ABABC", True),
        ("AbBcCdD", True),  # in time each second step is late enough
        ("AbcdBcdaC", False),  # three prompt steps each time
        ("ABaCD", True),
        ("ABMC", True),  # of itself it says nothing, neither this nor that
        ("ABmC", True),
    ],
)
def test_member_is_dismissed_once_several_leaders_have_waited_for_it(leaders: str, out: bool) -> None:
    assert (set(dismissed(said(leaders), SEVEN)) == {"M"}) is out


def test_in_a_small_run_two_leaders_are_enough_and_one_is_never() -> None:
    four = ("A", "B", "C", "M")
    assert dismissed(said("ABA", four), four)
    assert not dismissed(said("A" * 2 * MAX_SAID, four), four)


@pytest.mark.parametrize("others", range(1, 12))
def test_one_leader_that_lies_whenever_it_leads_evicts_nobody(others: int) -> None:
    peers = ("M", *(f"P{number}" for number in range(others)))
    known: dict[str, Slow] = {}
    for step in range(1, 200):
        known = following(known, step, peers, (), ("P0", [peer for peer in peers if peer != "P0"]))
        assert not dismissed(known, peers)


def test_each_time_it_is_left_out_for_twice_as_long_and_that_is_forgotten_after_a_while() -> None:
    known, step = said("ABC"), 4
    for times in range(3):
        known = following(known, step, SEVEN, ("M",), ("D", []))
        assert rests_until(known, "M") == step + 1 + (FIRST_LEAVE << times)
        step = rests_until(known, "M")
        for leader in "ABC":
            known, step = following(known, step, SEVEN, (), (leader, ["M"])), step + 1
        assert set(dismissed(known, SEVEN)) == {"M"}
    without = tuple(peer for peer in SEVEN if peer != "M")
    known = following(known, step, SEVEN, ("M",), ("D", []))
    last = rests_until(known, "M") + FORGET * (FIRST_LEAVE << 3)
    assert following(known, last - 1, without, (), ("A", []))
    assert following(known, last, without, (), ("A", [])) == {}


def test_member_that_is_lost_for_another_reason_leaves_nothing_behind() -> None:
    assert following(said("AB"), 3, SEVEN, ("M",), ("C", [])) == {}
    assert len(said("ABC")["M"].said_by) == PATIENT

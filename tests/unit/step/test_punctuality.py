"""For whom a leader had to wait."""

from __future__ import annotations

import pytest

from swarm.ids import PeerId
from swarm.step.leader.punctuality import enough_s, late

PARTS = {peer: part for part, peers in {"one": "ABM", "two": "XY", "ends": "TU"}.items() for peer in peers}


def found(took: str, waited: str = "", quick_s: float = 1.0, slow_s: float = 50.0) -> str:
    """Who was late: capital letters in ``took`` are quick, a dot behind one says that it was slow; ``waited`` names
    pairs, of which the first waited for the second."""
    seconds = {PeerId(one): slow_s if one + "." in took else quick_s for one in took if one != "."}
    claims: dict[PeerId, dict[PeerId, float]] = {}
    for one, other in waited.split():
        claims.setdefault(PeerId(one), {})[PeerId(other)] = slow_s - quick_s
    parts = {peer: PARTS[peer] for peer in seconds if peer in PARTS}
    return "".join(sorted(late(seconds, claims, parts)))


@pytest.mark.parametrize(
    ("took", "waited", "who"),
    [
        ("ABMXYTU", "", ""),
        ("ABM.XYTU", "", "M"),  # the round was done in time, and its answer was not
        ("A.B.M.XYTU", "AM BM", "M"),
        ("A.B.M.XYTU", "AM BM MA", "M"),  # its own word against two
        ("A.B.M.XYTU", "MA", ""),  # one alone may have held the round up itself
        ("A.B.M.XYTU", "MA MB", ""),
        ("ABM.XYTU", "MA MB", "M"),  # who answered long before cannot have been waited for
        ("A.B.M.XYTU", "", ""),  # that part's round took so long
        ("ABMX.Y.TU", "XY", ""),  # of two nobody knows
        ("ABMX.Y.TU", "XY YX", ""),  # of two nobody knows
        ("A.B.M.XYTU", "AM BA MA", "A"),  # who lies is named by two
        ("X.TU", "", "X"),  # alone in its part
        ("X.T", "", ""),  # of one other nobody knows what is usual
    ],
)
def test_who_was_late_is_named_and_who_waited_for_it_is_not(took: str, waited: str, who: str) -> None:
    assert found(took, waited) == who


def test_nobody_is_late_that_is_a_little_slower_or_slower_where_all_are_slow() -> None:
    assert found("ABM.XYTU", quick_s=0.1, slow_s=5.0) == ""
    assert found("ABM.XYTU", quick_s=0.1, slow_s=5.2) == "M"
    assert found("ABM.XYTU", quick_s=10.0, slow_s=79.0) == ""
    assert found("ABM.XYTU", quick_s=10.0, slow_s=81.0) == "M"


def test_who_says_that_it_waited_longer_than_its_answer_took_is_believed_no_more() -> None:
    assert found("ABMXYTU", "AM BM") == ""


def test_rest_is_waited_for_by_what_two_and_more_took() -> None:
    assert enough_s([1.0]) is None
    assert enough_s([1.0, 1.0, 3.0]) == 8.0
    assert enough_s([0.0, 0.0]) == 5.0

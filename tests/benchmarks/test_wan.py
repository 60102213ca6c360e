"""The account that the benchmark ``wan`` keeps of device time, its bounds and keys, and its candidate in small."""

from __future__ import annotations

import pytest

from tests.benchmarks._wan_cells import Cell, bound, plain_bound, published, transfer_s
from tests.benchmarks._wan_timeline import USEFUL, HostStep, breakdown, marked, shares

BY_HAND = HostStep(
    opened=100.0,
    full=120.0,
    summed=121.0,
    averaged=125.0,
    proposed=127.0,
    closed=130.0,
    busy=[(98.0, 99.0), (103.0, 106.0), (106.0, 107.0), (110.0, 115.0), (123.0, 124.0), (131.0, 132.0)],
)
"""Opened at 100: first work at 103, idle from 107 to 110, last work until 115, full at 120, and a second of work in
the midst of the round. The first and the last work are of other steps."""


def test_breakdown_of_a_timeline_made_by_hand() -> None:
    expected = {
        "useful": 10.0, "fill": 3.0, "starved": 3.0, "drain": 5.0, "reconcile": 1.0, "round": 3.0, "norm": 2.0,
        "close": 3.0,
    }  # fmt: skip
    assert breakdown(BY_HAND) == expected
    assert sum(expected.values()) == BY_HAND.closed - BY_HAND.opened


def test_breakdown_adds_up_to_all_whatever_is_observed_in_what_order() -> None:
    odd = HostStep(
        opened=0.0, full=9.0, summed=4.0, averaged=12.0, proposed=8.0, closed=10.0, busy=[(1.0, 2.0), (8.5, 9.5)]
    )
    found = breakdown(odd)
    assert sum(found.values()) == pytest.approx(10.0)
    assert min(found.values()) >= 0.0
    assert found["useful"] == 2.0


def test_shares_add_up_to_one_and_weigh_steps_by_their_length() -> None:
    short = HostStep(opened=0.0, full=1.0, summed=1.0, averaged=1.0, proposed=1.0, closed=1.0, busy=[(0.0, 1.0)])
    found = shares([BY_HAND, short])
    assert sum(found.values()) == pytest.approx(1.0)
    assert found[USEFUL] == pytest.approx(11.0 / 31.0)
    with pytest.raises(ValueError, match="no step"):
        shares([])


def test_step_of_which_a_moment_was_not_seen_is_none() -> None:
    marks = {"full": {1: 120.0}, "summed": {1: 121.0}, "averaged": {1: 125.0}, "proposed": {1: 127.0}}
    found = marked({1: 100.0, 2: 130.0}, marks, BY_HAND.busy, 1)
    assert found is not None
    assert breakdown(found) == breakdown(BY_HAND)
    assert marked({1: 100.0}, marks, BY_HAND.busy, 1) is None
    assert marked({1: 100.0, 2: 130.0}, marks | {"summed": {}}, BY_HAND.busy, 1) is None


def test_bound_counts_boundaries_averaging_and_compute() -> None:
    cell = Cell(mbit=80, rtt=80)  # 10 MB/s: 2 MB of boundaries and 10/32 MB of averaging a microbatch
    assert transfer_s(cell) == pytest.approx((2 + 10 / 32) / 10)
    assert bound(cell) == 1.0
    thin = Cell(mbit=8, rtt=80)
    assert bound(thin) == pytest.approx(0.568 / (2 + 10 / 32))
    assert plain_bound(thin) == pytest.approx(0.568 / 2)
    assert bound(thin, "sync_int8h") == pytest.approx(0.568 / (2 * 66 / 256 + 10 / 32))
    assert published(Cell(mbit=500, rtt=100)) == 0.321
    assert published(cell) is None

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_shards.order import ReadingOrder, RoutedOrder, shuffled
from swarm.errors import ConfigError


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.binary(min_size=1, max_size=32))
def test_shuffled_any_size_is_a_permutation(size: int, key: bytes) -> None:
    assert sorted(shuffled(index, size, key) for index in range(size)) == list(range(size))


def test_shuffled_known_values_never_change() -> None:
    assert [shuffled(index, 10, b"golden") for index in range(10)] == [4, 8, 0, 2, 7, 6, 9, 5, 1, 3]


def test_order_one_epoch_reads_each_row_at_most_once_and_leaves_the_remainder() -> None:
    order = ReadingOrder("d" * 64, rows=103, microbatch_size=8)
    rows = [row for position in range(order.microbatches) for row in order.rows_of(0, position)]
    assert order.microbatches == 12
    assert len(set(rows)) == len(rows) == 96
    assert set(rows) <= set(range(103))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.integers(1, 9))
def test_routed_order_reads_all_rows_of_each_choice_before_any_again_and_each_choice_in_its_share(
    sizes: list[int], microbatch_size: int
) -> None:
    rows, ends = sum(sizes), np.cumsum(sizes)
    groups = tuple(np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True))
    order = RoutedOrder("d" * 64, rows, min(rows, microbatch_size), groups=groups)
    read: list[list[int]] = [[] for _ in sizes]
    cursor, taken = (0, 0), 0
    while cursor[0] < 3:
        found, choice = order.rows_of(*cursor), order.choice_of(*cursor)
        assert len(found) == order.microbatch_size
        read[choice] += found
        cursor, taken = order.after(*cursor), taken + 1
        for mine, size in zip(read, sizes, strict=True):
            assert abs(len(mine) / order.microbatch_size - taken * size / rows) < len(sizes)
    for mine, group in zip(read, groups, strict=True):
        times = [mine[at : at + len(group)] for at in range(0, len(mine), len(group) or 1)]
        assert all(sorted(one) == group.tolist() for one in times[:-1])
        assert all(len({*one} & {*group}) == len(one) for one in times)


def test_order_next_epoch_and_other_shard_differ() -> None:
    order = ReadingOrder("d" * 64, 103, 8)
    assert order.rows_of(0, 0) != order.rows_of(1, 0)
    assert order.rows_of(0, 0) != ReadingOrder("e" * 64, 103, 8).rows_of(0, 0)


def test_order_place_behind_an_epoch_is_the_beginning_of_the_next() -> None:
    order = ReadingOrder("d" * 64, 20, 8)
    order.check((0, 2))
    assert order.at((0, 2)) == (1, 0)
    assert order.at((0, 1)) == (0, 1)


@pytest.mark.parametrize("cursor", [(-1, 0), (0, -1), (0, 3), (3, 99)])
def test_order_cursor_outside_the_shard_is_refused(cursor: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="cursor"):
        ReadingOrder("d" * 64, 20, 8).check(cursor)

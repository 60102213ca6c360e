from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_shards.shard_source import ReadingOrder, shuffled
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

from __future__ import annotations

import numpy as np
import pytest

from data_shards.packing import read_rows, row_count


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_row_count_any_length_needs_one_token_more_than_its_context(tokens: int, rows: int) -> None:
    assert row_count(tokens, 8) == rows


@pytest.mark.parametrize("tokens", [9, 17, 20, 100])
def test_read_rows_every_token_but_the_first_is_a_target_once(tokens: int) -> None:
    stream = np.arange(tokens, dtype=np.uint16)
    rows = read_rows(stream, list(range(row_count(tokens, 8))), 8)
    targets = rows[:, 1:].ravel().tolist()
    assert targets == list(range(1, 8 * ((tokens - 1) // 8) + 1))
    assert rows[:, :-1].ravel().tolist() == list(range(len(targets)))
    assert rows.dtype == np.int64

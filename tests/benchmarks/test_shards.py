"""What the benchmark ``shards`` makes of its measurements."""

from __future__ import annotations

from tests.benchmarks.runner import Size
from tests.benchmarks.shards import KEYS, SCALES, VARIANTS, to_result


def test_result_has_ratios_of_each_round_and_the_worst_restart() -> None:
    found = {
        "rates": {
            "plain": [(10.0, 10.0), (8.0, 10.0), (10.0, 5.0)],
            "one process": [(9.0, 9.0)] * 3,
            "all cores": [(18.0, 9.0), (16.0, 8.0), (2.0, 5.0)],
        },
        "read": {"stream": {"s": 0.5, "tokens": 100}, "documents": {"s": 1, "tokens": 100}},
        "memory": {50: 400.0, 200: 420.0},
        "opened": {name: (2.0, 0.1 * place) for place, name in enumerate(VARIANTS)},
    }
    told = to_result(SCALES[Size.DEFAULT], 2, found)
    assert set(told.summary) == set(KEYS)
    assert told.summary["build_ratio"] == 0.9
    assert told.summary["build_ratio_wall"] == 0.9
    assert told.summary["build_speedup"] == round(16 / 9, 3)
    assert (told.summary["restart_s"], told.summary["memory_growth"], told.summary["read_tokens_s"]) == (0.2, 0.05, 200)
    assert ["build of 200 MB", "peak MB", 420] in told.rows

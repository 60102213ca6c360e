"""What the benchmark ``pipeline`` makes of what it measured."""

from __future__ import annotations

import os

import pytest

from tests.benchmarks import pipeline
from tests.benchmarks._pipeline_bare import Bare
from tests.benchmarks._pipeline_load import Order, Window, blocks_of, part_of
from tests.benchmarks._stage import Size

TINY = Size(name="tiny", dim=16, heads=2, blocks=2, sequence=8, microbatch=2)


def test_figures_of_processes_side_by_side_add_up() -> None:
    reports = [
        {"microbatches": 10, "seconds": 5.0, "cpu bare": 4.0},
        {"microbatches": 5, "seconds": 2.5, "cpu bare": 2.5},
    ]
    found = pipeline.figures_of(reports, 100)
    assert (found["tokens_per_s"], found["microbatches"]) == (400, 15)
    assert found["cpu bare"] == found["cpu all"] == pytest.approx(1.8)
    assert found["core-ms bare"] == pytest.approx(450)


def test_result_compares_with_the_best_bare_torch_and_with_as_many_processes() -> None:
    rates = {
        "small bare 2 threads": 90.0,
        "small bare 2 processes": 100.0,
        "small bare 4 processes": 88.0,
        "small ours": 80.0,
        "small hivemind": 32.0,
        "medium bare 2 threads": 50.0,
        "medium bare 2 processes": 40.0,
        "medium bare 4 processes": 45.0,
        "medium ours": 45.0,
    }
    found = {
        name: [
            pipeline.figures_of([{"microbatches": rate * factor, "seconds": 1.0, "cpu x": 1.0}], 1)
            for factor in (0.5, 1, 9)
        ]
        for name, rate in rates.items()
    }
    summary = pipeline.to_result(found, 3).summary
    assert (summary["ours_over_bare_small"], summary["ours_over_bare_medium"]) == (0.8, 0.9)
    assert (summary["ours_over_as_many_small"], summary["ours_over_as_many_medium"]) == (0.909, 1.0)
    assert summary["ours_over_hivemind_small"] == 2.5
    assert summary["tokens_per_s small ours"] == 80


def test_window_counts_what_ended_while_it_was_open() -> None:
    window = Window(Order(warmup_s=0, seconds=0, pids={"us": [os.getpid()]}))
    window.note()
    window.open()
    window.note()
    found = window.close()
    window.note()
    assert found["microbatches"] == 1
    assert found["cpu us"] >= 0


def test_bare_round_computes_the_blocks_that_the_stages_hold() -> None:
    assert Bare(TINY).round(Order(warmup_s=0, seconds=0.05))["microbatches"] >= 1
    whole = dict(blocks_of(TINY, 1, 0).named_parameters())
    for stage in range(TINY.blocks):
        _, snapshot = part_of(TINY, stage)
        for name, view in snapshot.layout.views(snapshot.params).items():
            assert whole.pop(name).equal(view)
    assert not whole

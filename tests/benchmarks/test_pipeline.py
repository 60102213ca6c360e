"""What the benchmark ``pipeline`` makes of what it measured."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

from tests.benchmarks import _pipeline_cpu as pipeline_cpu
from tests.benchmarks import pipeline
from tests.benchmarks._pipeline_bare import Bare
from tests.benchmarks._pipeline_cpu import (
    CALLS,
    CHECKS,
    CODEC,
    DAEMON,
    KINDS,
    MODULE,
    OTHER,
    RULES,
    SUM,
    CpuProfile,
    Kinds,
    ThreadCpu,
    divided,
    kind_of_code,
    shares,
)
from tests.benchmarks._pipeline_load import STAGES, Order, Window, blocks_of, part_of
from tests.benchmarks._stage import Size
from tests.benchmarks.runner import ROOT

TINY = Size(name="tiny", dim=16, heads=2, blocks=STAGES, sequence=8, microbatch=2)


def test_figures_of_processes_side_by_side_add_up() -> None:
    reports = [
        {"microbatches": 10, "seconds": 5.0, "cpu bare": 4.0},
        {"microbatches": 5, "seconds": 2.5, "cpu bare": 2.5},
    ]
    found = pipeline.figures_of(reports, 100)
    assert (found["tokens_per_s"], found["microbatches"]) == (400, 15)
    assert found["cpu bare"] == found["cpu all"] == pytest.approx(1.8)
    assert found["core-ms bare"] == pytest.approx(450)


def test_result_compares_with_the_better_bare_torch() -> None:
    rates = {
        "small bare 2 threads": 90.0,
        "small bare 2 processes": 100.0,
        "small ours": 80.0,
        "small hivemind": 32.0,
        "medium bare 2 threads": 50.0,
        "medium bare 2 processes": 40.0,
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
    for stage in range(STAGES):
        _, snapshot = part_of(TINY, stage)
        for name, view in snapshot.layout.views(snapshot.params).items():
            assert whole.pop(name).equal(view)
    assert not whole


@pytest.mark.parametrize(
    ("file", "function", "kind"),
    [
        ("/x/swarm/models/gpt.py", "forward", MODULE),
        ("/x/swarm/models/passes.py", "run_backward", MODULE),
        ("/x/swarm/models/passes.py", "summed", SUM),
        ("/x/swarm/optim/accumulate.py", "add", SUM),
        ("/x/swarm/compression/dense.py", "encode", CODEC),
        ("/x/site-packages/pydantic/main.py", "model_validate_json", CODEC),
        ("/x/swarm/pipeline/compute.py", "_check_finite", CHECKS),
        ("/x/swarm/pipeline/stage/server.py", "_do", RULES),
        ("/x/swarm/network/rpc/server.py", "serve", CALLS),
        ("/x/lib/asyncio/runners.py", "run", CALLS),
        ("/x/site-packages/torch/nn/functional.py", "linear", None),
        ("/x/tests/benchmarks/_pipeline_peer.py", "main", None),
    ],
)
def test_kind_of_work_follows_from_file_and_function(file: str, function: str, kind: str | None) -> None:
    assert kind_of_code(file, function) == kind


def test_every_file_that_has_a_kind_of_its_own_is_there() -> None:
    ours = [path for path, _ in pipeline_cpu.BY_FILE if path.startswith("swarm/")]
    assert all((ROOT / path).exists() for path in [*ours, *(path for path, _ in pipeline_cpu.BY_FUNCTION)])


def test_stack_has_the_kind_of_the_innermost_frame_that_has_one() -> None:
    source = compile("def called(look):\n    return look()", "/x/swarm/compression/dense.py", "exec")
    outside = compile("def through(called, look):\n    return called(look)", "/x/torch/nn.py", "exec")
    names: dict[str, Any] = {}
    exec(source, names)
    exec(outside, names)
    kinds = Kinds()
    look = lambda: kinds.of(sys._getframe())  # noqa: E731
    assert names["called"](look) == CODEC
    assert names["called"](lambda: names["through"](lambda inner: inner(), look)) == CODEC, (
        "torch counts for its caller"
    )
    assert kinds.of(None) == OTHER


def test_threads_time_is_divided_as_it_was_in_the_looks_and_adds_up() -> None:
    worker = ThreadCpu(first=1.0, last=4.0)
    worker.looks.update({MODULE: 0.002, CODEC: 0.001})
    unseen = ThreadCpu(first=0.0, last=0.5)
    found = divided([worker, unseen], total=4.0)
    assert found == dict.fromkeys(KINDS, 0.0) | {MODULE: 2.0, CODEC: 1.0, OTHER: 1.0}
    report = {"microbatches": 10, "cpu hosts' p2pd": 1.0, "cpu trainer's p2pd": 1.0}
    table = shares([found, found], found, report)
    assert [row[0] for row in table.rows] == list(KINDS)
    percents = {row[0]: row[3] for row in table.rows}
    assert (percents[MODULE], percents[DAEMON]) == (pytest.approx(42.9), pytest.approx(14.3))
    assert sum(float(row[3] or 0) for row in table.rows) == pytest.approx(100, abs=0.5)
    assert {row[0]: row[4] for row in table.rows}[MODULE] == 600


def test_profile_counts_the_cpu_of_the_process_and_not_its_own() -> None:
    before = time.process_time()
    profile = CpuProfile()
    profile.start()
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    found = profile.finish()
    assert not profile.is_alive()
    assert tuple(found) == KINDS
    assert 0.05 <= sum(found.values()) <= time.process_time() - before
    assert found[MODULE] == 0

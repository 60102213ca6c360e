"""A reproducible swarm of processes is the plain loop, bit for bit. ``tests.benchmarks.parity`` measures more of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks._parity_compare import Comparison, compare_exact
from tests.benchmarks._parity_run import TrainedRun, WiredGroup, build_data, make_manifest, train
from tests.benchmarks.parity import LAYOUTS, SMALL

STEPS = 3


@pytest.fixture
def group(home: Path) -> Iterator[WiredGroup]:
    group = WiredGroup(home / "launch.log")
    try:
        group.open()
        yield group
    finally:
        group.stop()


@pytest.mark.process
def test_swarm_of_two_stages_with_replicas_trains_the_plain_loops_bits(group: WiredGroup, home: Path) -> None:
    scale = replace(SMALL, steps=STEPS)
    data = build_data(home / "data", scale)
    manifest = make_manifest(LAYOUTS[0], scale, data, reproducible=True)
    run = train(group, home / "run", LAYOUTS[0], manifest, data)

    measured = compare_exact(run)
    assert (measured.distance.abs, measured.loss_rel) == (0.0, 0.0)
    assert (measured.losses_differing, measured.digests_differing) == (0, 0)
    assert measured.microbatches == STEPS * scale.batch.microbatches_per_step
    assert measured.moved > 0.01
    assert _with_one_exchanged(run).distance.abs > 0


def _with_one_exchanged(run: TrainedRun) -> Comparison:
    """The same comparison when the ledger is wrong about one microbatch of the first two steps each."""
    genesis, first, second, *rest = run.records
    moved = (second.committed[0], *first.committed[1:]), (first.committed[0], *second.committed[1:])
    exchanged = [
        record.model_copy(update={"committed": committed})
        for record, committed in zip((first, second), moved, strict=True)
    ]
    return compare_exact(replace(run, records=(genesis, *exchanged, *rest)))

"""What the parity benchmark compares with: a difference is found and named, and what is no number never passes."""

from __future__ import annotations

import pytest
import torch

from swarm.optim.schedules import OptimizerConfig, learning_rate
from tests.benchmarks._parity_compare import distance
from tests.benchmarks._parity_replay import scheduled_lr
from tests.benchmarks._parity_run import Incoherent


def test_distance_of_altered_weights_names_the_worst_tensor() -> None:
    expected = {"large": torch.full((4,), 100.0), "small": torch.full((4,), 0.5)}
    found = {"large": expected["large"] + 1.0, "small": expected["small"] + 0.25}
    measured = distance(found, expected)
    assert (measured.rel, measured.abs, measured.tensor) == (0.5, 1.0, "small")


def test_distance_of_equal_weights_is_zero() -> None:
    weights = {"a": torch.randn(3, generator=torch.Generator().manual_seed(0))}
    assert (distance(weights, weights).rel, distance(weights, weights).abs) == (0.0, 0.0)


@pytest.mark.parametrize("found", [{"a": torch.full((2,), float("nan"))}, {"a": torch.zeros(1)}, {}])
def test_distance_of_what_cannot_be_compared_is_refused(found: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Incoherent):
        distance(found, {"a": torch.ones(2)})


@pytest.mark.parametrize("warmup", [0, 5, 30])
def test_scheduled_lr_is_the_manifests_schedule(warmup: int) -> None:
    config = OptimizerConfig(warmup_steps=warmup)
    ours = [scheduled_lr(config, step, 20) for step in range(1, 21)]
    assert ours == pytest.approx([learning_rate(config, step, 20) for step in range(1, 21)], rel=1e-12)

"""What swarms are compared with: a difference is found and named, and what is no number never passes."""

from __future__ import annotations

import pytest
import torch

from swarm.optim.schedules import OptimizerConfig, learning_rate
from tests.benchmarks._parity_compare import distance
from tests.benchmarks._parity_replay import scheduled_lr
from tests.benchmarks._parity_run import Incoherent


def test_distance_of_altered_weights_is_the_largest_difference_of_a_number() -> None:
    expected = {"large": torch.full((4,), 100.0), "small": torch.full((4,), 0.5)}
    assert distance({"large": expected["large"] + 1.0, "small": expected["small"] - 1.25}, expected) == 1.25
    assert distance(expected, expected) == 0.0


@pytest.mark.parametrize("found", [{"a": torch.full((2,), float("nan"))}, {"a": torch.zeros(1)}, {}])
def test_distance_of_what_cannot_be_compared_is_refused(found: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Incoherent):
        distance(found, {"a": torch.ones(2)})


@pytest.mark.parametrize("warmup", [0, 5, 30])
def test_scheduled_lr_is_the_manifests_schedule(warmup: int) -> None:
    config = OptimizerConfig(warmup_steps=warmup)
    ours = [scheduled_lr(config, step, 20) for step in range(1, 21)]
    assert ours == pytest.approx([learning_rate(config, step, 20) for step in range(1, 21)], rel=1e-12)

from __future__ import annotations

import pytest

from swarm.optim.schedules import OptimizerConfig, learning_rate


def test_learning_rate_warms_up_then_falls_to_its_fraction() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, min_lr_fraction=0.1)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[11] == pytest.approx(0.55)


def test_learning_rate_beyond_the_last_step_stays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=0)
    assert learning_rate(config, 50, 20) == learning_rate(config, 20, 20)


def test_learning_rate_of_a_run_shorter_than_its_warm_up_rises() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10)
    assert [learning_rate(config, step, 3) for step in (1, 2, 3)] == [0.1, 0.2, 0.3]

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


def test_learning_rate_stays_at_the_peak_and_falls_in_the_last_steps_with_wsd() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="wsd", decay_fraction=0.5, min_lr_fraction=0.0)
    rates = [learning_rate(config, step, 8) for step in range(1, 9)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert learning_rate(config, 9, 8) == 0.0


def test_learning_rate_that_is_constant_stays_after_its_warm_up() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(config, step, 4) for step in (1, 2, 3, 4, 5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_keys_that_say_nothing_new_are_left_out_of_a_manifest() -> None:
    assert OptimizerConfig().model_dump(mode="json").keys() == {
        "lr", "beta1", "beta2", "eps", "weight_decay", "clip_norm", "warmup_steps", "min_lr_fraction",
    }  # fmt: skip
    assert OptimizerConfig(name="sgd", momentum=0.9, schedule="wsd", decay_fraction=0.1).model_dump(mode="json") == {
        **OptimizerConfig().model_dump(mode="json"),
        **{"name": "sgd", "momentum": 0.9, "schedule": "wsd", "decay_fraction": 0.1},
    }


def test_learning_rate_beyond_the_last_step_stays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=0)
    assert learning_rate(config, 50, 20) == learning_rate(config, 20, 20)


def test_learning_rate_of_a_run_shorter_than_its_warm_up_rises() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10)
    assert [learning_rate(config, step, 3) for step in (1, 2, 3)] == [0.1, 0.2, 0.3]

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout
from swarm.optim import adamw, update
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step
from swarm.optim.schedules import OptimizerConfig
from tests.harness.rigs.optim import GOLDEN, digest_of_steps

LAYOUT = FlatLayout.from_shapes([("table", (7, 5)), ("norm", (5,)), ("matrix", (7, 5))], {"matrix"})
CONFIG = OptimizerConfig(weight_decay=0.3)


SCALARS = ("clip", "beta1", "rest1", "beta2", "rest2", "eps", "correction2", "step_size", "shrink")


def filled(seed: int) -> Tensor:
    flat = torch.zeros(LAYOUT.elements)
    generator = torch.Generator().manual_seed(seed)
    for view in LAYOUT.views(flat).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return flat


def fresh() -> AdamWState:
    return AdamWState(filled(0), torch.zeros(LAYOUT.elements), torch.zeros(LAYOUT.elements))


def test_adamw_follows_the_textbook() -> None:
    state, reference = fresh(), {name: view.clone().requires_grad_() for name, view in LAYOUT.views(filled(0)).items()}
    decayed, plain = [reference["matrix"]], [reference["table"], reference["norm"]]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}],
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
    )
    for step in range(1, 30):
        gradient, lr = filled(step), 0.01 / step
        state = adamw_step(state, gradient, LAYOUT, CONFIG, StepNumbers(step=step, lr=lr, clip=0.5))
        for name, view in LAYOUT.views(gradient).items():
            reference[name].grad = view * 0.5
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for name, view in LAYOUT.views(state.params).items():
        assert torch.allclose(view, reference[name], rtol=1e-5, atol=1e-6), name


def test_adamw_touches_no_input_and_keeps_gaps_zero() -> None:
    state, gradient = fresh(), filled(1)
    after = adamw_step(state, gradient, LAYOUT, CONFIG, StepNumbers(step=1, lr=0.1, clip=1.0))
    assert torch.equal(state.params, filled(0))
    assert torch.equal(gradient, filled(1))
    assert state.exp_avg.abs().max() == 0
    used = torch.zeros(LAYOUT.elements, dtype=torch.bool)
    for view in LAYOUT.views(used).values():
        view.fill_(True)
    for vector in (after.params, after.exp_avg, after.exp_avg_sq):
        assert vector[~used].abs().max() == 0
        assert vector[used].abs().min() > 0


def test_adamw_gradient_of_another_kind_is_a_bug() -> None:
    numbers = StepNumbers(step=1, lr=0.1, clip=1.0)
    for wrong in (torch.zeros(3), torch.zeros(LAYOUT.elements, dtype=torch.float64)):
        with pytest.raises(BugError, match="gradient"):
            adamw_step(fresh(), wrong, LAYOUT, CONFIG, numbers)
    with pytest.raises(BugError, match="count from 1"):
        adamw_step(fresh(), filled(1), LAYOUT, CONFIG, StepNumbers(step=0, lr=0.1, clip=1.0))
    with pytest.raises(BugError, match="scalar"):
        adamw_step(fresh(), filled(1), LAYOUT, CONFIG, StepNumbers(step=1, lr=0.1, clip=float("nan")))


def test_adamw_bits_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "CHUNK_ELEMENTS", 1001)
    assert digest_of_steps() == GOLDEN


def test_adamw_bits_do_not_depend_on_the_instruction_set() -> None:
    """Those below this CPU's best: with that :data:`GOLDEN` was compared above."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    known = ("default", "avx2", "avx512")
    for capability in known[: known.index(best)] if best in known else ():
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-m", "tests.harness.rigs.optim"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert result.stdout.strip() == GOLDEN, capability


def test_adamw_is_what_single_roundings_give() -> None:
    """The same by numpy, one rounding an operation: whatever library torch hands an operation to must not show."""
    gradient, old = filled(3), fresh()
    numbers = StepNumbers(step=4, lr=0.01, clip=0.37)
    new = adamw_step(old, gradient, LAYOUT, CONFIG, numbers)
    scalars = {name: np.float32(getattr(adamw._scalars(CONFIG, numbers), name)) for name in SCALARS}
    clipped = gradient.numpy() * scalars["clip"]
    square = old.exp_avg_sq.numpy() * scalars["beta2"] + clipped * clipped * scalars["rest2"]
    mean = old.exp_avg.numpy() * scalars["beta1"] + clipped * scalars["rest1"]
    update = mean * scalars["step_size"] / (np.sqrt(square * scalars["correction2"]) + scalars["eps"])
    for start, stop, decay in LAYOUT.decay_runs():
        kept = old.params.numpy()[start:stop] * (scalars["shrink"] if decay else np.float32(1.0))
        assert np.array_equal(new.params.numpy()[start:stop], kept - update[start:stop])

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.optim import update
from swarm.optim.outer import OuterNesterov, OuterState

ELEMENTS = 70_001
"""Beyond what torch gives to a single thread, and no multiple of a vector's width."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def vector(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * scale


def after(optimizer: OuterNesterov, rounds: int) -> OuterState:
    state = OuterState.first(vector(0))
    for number in range(1, rounds + 1):
        state = optimizer.step(state, vector(number, 0.01))
    return state


def test_outer_steps_are_sgd_with_nesterov_momentum() -> None:
    reference = vector(0).requires_grad_()
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 13):
        reference.grad = vector(number, 0.01)
        sgd.step()
    state = after(OuterNesterov(), 12)
    assert torch.allclose(state.anchor, reference, rtol=1e-5, atol=1e-6)
    assert torch.allclose(state.momentum, sgd.state[reference]["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_outer_step_is_what_single_roundings_give() -> None:
    anchor, momentum, delta = (vector(seed).numpy() for seed in range(3))
    lr, mu = np.float32(0.7), np.float32(0.9)
    new = OuterNesterov().step(OuterState(*map(torch.from_numpy, (anchor, momentum))), torch.from_numpy(delta))
    velocity = momentum * mu + delta
    assert np.array_equal(new.momentum.numpy(), velocity)
    assert np.array_equal(new.anchor.numpy(), anchor - (velocity * mu + delta) * lr)


@pytest.mark.usefixtures("threads")
def test_outer_bits_do_not_depend_on_threads_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    alone = after(OuterNesterov(), 3)
    torch.set_num_threads(2)
    together = after(OuterNesterov(), 3)
    monkeypatch.setattr(update, "CHUNK_ELEMENTS", 1001)
    in_pieces = after(OuterNesterov(), 3)
    for other in (together, in_pieces):
        assert torch.equal(other.anchor, alone.anchor)
        assert torch.equal(other.momentum, alone.momentum)


def test_outer_without_momentum_at_rate_one_averages_the_parameters() -> None:
    anchor = vector(0)
    replicas = [anchor * (1 + 0.01 * vector(seed).clamp(-9, 9)) for seed in (1, 2, 3, 4)]
    deltas = torch.stack([anchor - params for params in replicas])
    mean = deltas.double().mean(0).float()
    state = OuterNesterov(lr=1.0, momentum=0.0).step(OuterState.first(anchor), mean)
    assert torch.equal(state.anchor, anchor - mean)
    assert torch.equal(state.momentum, mean)
    exact = torch.stack(replicas).double().mean(0)
    assert ((state.anchor.double() - exact).abs() <= exact.abs() * 2**-23).all()


def test_outer_step_of_replicas_that_stayed_is_no_step() -> None:
    state = OuterNesterov().step(OuterState.first(vector(0)), torch.zeros(ELEMENTS))
    assert torch.equal(state.anchor, vector(0))
    assert state.momentum.abs().max() == 0


def test_outer_step_touches_no_input() -> None:
    state, delta = OuterState(vector(0), vector(1)), vector(2)
    OuterNesterov().step(state, delta)
    assert torch.equal(state.anchor, vector(0))
    assert torch.equal(state.momentum, vector(1))
    assert torch.equal(delta, vector(2))


def test_outer_step_of_nothing_is_nothing() -> None:
    state = OuterNesterov().step(OuterState.first(torch.empty(0)), torch.empty(0))
    assert state.anchor.shape == (0,)


def test_outer_delta_of_another_kind_is_a_bug() -> None:
    state = OuterState.first(vector(0))
    for wrong in (torch.zeros(3), torch.zeros(ELEMENTS, dtype=torch.float64)):
        with pytest.raises(BugError, match="delta"):
            OuterNesterov().step(state, wrong)
    with pytest.raises(BugError, match="scalar"):
        OuterNesterov(lr=float("inf")).step(state, vector(1))

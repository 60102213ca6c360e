"""The optimizer step in C: the bits of the one in torch, or it is not used."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.models.layout import FlatLayout
from swarm.optim import adamw, native
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step, gives_the_same_bits
from swarm.optim.schedules import OptimizerConfig

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="no C compiler")
LAYOUT = FlatLayout.from_shapes(
    [("norm.weight", (37,)), ("a.weight", (61, 53)), ("b.bias", (3,)), ("c.weight", (5, 7))]
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> native.Kernel:
    made = native.build(tmp_path_factory.mktemp("native"))
    assert made is not None
    loaded = native.load(made)
    assert loaded is not None
    return loaded


def random_state(seed: int) -> tuple[AdamWState, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params, mean, square, gradient = (torch.randn(LAYOUT.elements, generator=generator) for _ in range(4))
    return AdamWState(params, mean * 1e-2, square.square() * 1e-4), gradient


def stepped(steps: int, *, in_c: bool) -> AdamWState:
    state, gradient = random_state(1)
    for step in range(1, steps + 1):
        numbers = StepNumbers(step=step, lr=1e-3 / step, clip=0.37)
        state = adamw_step(state, gradient * (-1) ** step, LAYOUT, OptimizerConfig(), numbers, in_c=in_c)
    return state


@needs_compiler
def test_steps_have_the_bits_of_those_without_it(kernel: native.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def kept(*vectors: Any) -> None:
        used.append(1)
        kernel(*vectors)

    monkeypatch.setattr(adamw, "trusted_kernel", lambda: kept)
    ours = stepped(20, in_c=True)
    assert len(used) == 20 * len(LAYOUT.decay_runs())
    plain = stepped(20, in_c=False)
    assert len(used) == 20 * len(LAYOUT.decay_runs())
    for name in ("params", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(ours, name).view(torch.int32), getattr(plain, name).view(torch.int32))


@needs_compiler
def test_trial_takes_it(kernel: native.Kernel) -> None:
    assert gives_the_same_bits(kernel)


@needs_compiler
def test_vectors_may_be_stepped_in_place(kernel: native.Kernel) -> None:
    (state, gradient), (beside, _) = random_state(2), random_state(2)
    vectors = (state.params, state.exp_avg, state.exp_avg_sq)
    new = torch.empty_like(gradient), torch.empty_like(gradient), torch.empty_like(gradient)
    scalars = (0.5, 0.9, 0.1, 0.95, 0.05, 1e-8, 1.5, 1e-3, 0.999)
    kernel(vectors, gradient, new, scalars)
    there = (beside.params, beside.exp_avg, beside.exp_avg_sq)
    kernel(there, gradient, there, scalars)
    assert all(torch.equal(one, other) for one, other in zip(new, there, strict=True))


@needs_compiler
def test_one_that_rounds_otherwise_is_not_used(
    kernel: native.Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def contracted(
        old: native.Vectors, gradient: torch.Tensor, new: native.Vectors, scalars: tuple[float, ...]
    ) -> None:
        kernel(old, gradient, new, scalars)
        clip, beta1, rest1 = scalars[:3]
        rounded_once = (old[1].double() * beta1 + (gradient * clip).double() * rest1).float()
        assert not torch.equal(rounded_once, new[1]), "the fault did not fire"
        new[1].copy_(rounded_once)

    monkeypatch.setattr(native, "load", lambda path: contracted)
    adamw.trusted_kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert adamw.trusted_kernel() is None
    finally:
        adamw.trusted_kernel.cache_clear()
    assert "rounds otherwise" in caplog.text


def test_damaged_library_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = native.library(tmp_path)
    assert native.load(path) is None
    path.write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert native.load(path) is None
    assert "use the slower optimizer step" in caplog.text


def test_machine_without_a_compiler_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    assert native.build(tmp_path) is None
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_build_removes_what_an_older_source_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"_adamw-000000000000{native.SUFFIX}").write_bytes(b"old")
    assert native.build(tmp_path) == native.library(tmp_path)
    assert list(tmp_path.iterdir()) == [native.library(tmp_path)]
    broken = tmp_path / "broken.c"
    broken.write_text("int x")
    monkeypatch.setattr(native, "SOURCE", broken)
    assert native.build(tmp_path) is None

"""Whether a device keeps the promises that peers rely on: near a CPU's results, and some of them to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.models.spec import DType
from swarm.optim.part import TrainedPart
from swarm.state.snapshot import digest
from tests.benchmarks._stage import SMALL, Size, first_snapshot, normal, trained_part

TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative L2 distance that a device's result may have from a CPU's: some hundred and some ten roundings of each."""

_CPU = torch.device("cpu")


def check(device: torch.device, size: Size = SMALL) -> dict[str, float | bool]:
    """``*_distance`` from the CPU and whether it is within tolerance (``*_parity``), whether doing it again gives the
    same bits (``*_repeats``, and with torch's deterministic algorithms), then :func:`check_steps`."""
    found: dict[str, float | bool] = {}
    for compute, tolerance in TOLERANCE.items():
        model = size.model(compute, dropout=0.1)
        snapshot = first_snapshot(model)
        there = trained_part(model, device, snapshot)
        expected, first, second = _passes(trained_part(model, _CPU, snapshot), size), *_twice(there, size)
        distance = max(_distance(mine, theirs) for mine, theirs in zip(first, expected, strict=True))
        found[f"{compute}_distance"] = distance
        found[f"{compute}_parity"] = distance <= tolerance
        found[f"{compute}_repeats"] = _same(first, second)
        found[f"{compute}_repeats_deterministic"] = _same(*_twice_deterministically(there, size))
    return found | check_steps(device, size)


def check_steps(device: torch.device, size: Size) -> dict[str, bool]:
    """Three optimizer steps beside a CPU's with the same gradients: every digest must agree with the CPU's."""
    model = size.model("float32")
    snapshot = first_snapshot(model)
    here, there = trained_part(model, _CPU, snapshot), trained_part(model, device, snapshot)
    installed = digest(there.snapshot()) == digest(snapshot)
    agree = repeats = swapped = True
    for step in (1, 2, 3):
        mean = normal((there.layout.elements,), step) * 1e-3
        wanted, found, again = (part.prepare(mean, lr=1e-3, clip=0.7, step=step) for part in (here, there, there))
        agree, repeats = agree and found == wanted, repeats and found == again
        here.swap()
        there.swap()
        swapped = swapped and there.step == step and digest(there.snapshot()) == found
    return {
        "install_keeps_digest": installed,
        "step_digest_equals_cpu": agree,
        "prepare_repeats": repeats,
        "swap_holds_what_was_prepared": swapped,
    }


def _passes(part: TrainedPart, size: Size) -> list[Tensor]:
    """Output, input gradient and parameters' gradients of one fixed microbatch, on the CPU in float32."""
    output, graph = part.forward(normal(size.shape, 1), seed=7)
    assert graph is not None
    grad_input, gradients = part.backward(graph, normal(size.shape, 2))
    assert grad_input is not None
    return [tensor.float().cpu() for tensor in (output, grad_input, *(gradient for _, gradient in gradients))]


def _twice(part: TrainedPart, size: Size) -> tuple[list[Tensor], list[Tensor]]:
    return _passes(part, size), _passes(part, size)


def _twice_deterministically(part: TrainedPart, size: Size) -> tuple[list[Tensor], list[Tensor]]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _twice(part, size)
    finally:
        torch.use_deterministic_algorithms(before)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))

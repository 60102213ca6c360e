"""Muon whose result has the same bits on every machine, from any BLAS library and on any number of threads.

The momentum of a matrix is made nearly orthogonal by five Newton–Schulz iterations (Jordan et al., "Muon: An optimizer
for hidden layers in neural networks", 2024) and scaled to the size of AdamW's steps (Liu et al., arXiv 2502.16982), so
that one learning rate serves both. What is no matrix of a layer, as are embeddings, heads, norms and biases, is
AdamW's.

Matrix products are sums whose order each library chooses. So every product's operands are float64 rounded to multiples
of 2⁻²², and its result is rounded to those again: the sums are multiples of 2⁻⁴⁴ below 2⁹, which float64 holds without
any rounding, in whatever order. Rows and columns are no longer than 2 here, for no singular value is, and then no sum
of products exceeds 4 (Cauchy and Schwarz). The norm by which the momentum is divided first is taken in integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout, Slot
from swarm.optim.adamw import AdamW
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import (
    ElementRun,
    ElementStep,
    StepNumbers,
    StepPlan,
    Vectors,
    check_mean,
    single,
)

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that drives every singular value to about 1, as published."""
MATCHED_RMS = 0.2
"""The root mean square of AdamW's steps, in learning rates (arXiv 2502.16982, section 2.2)."""
GRID = 2.0**22
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Muon:
    """With β the momentum: m ← β·m + (1 − β)·g, u = β·m + (1 − β)·g, p ← p·(1 − lr·decay) − lr·scale·orthogonal(u) for
    the matrices that the layout names; the others' steps are :class:`~swarm.optim.adamw.AdamW`'s.

    Memory beside the state: one vector of orthogonal directions from a plan's making to its end. Cost: some 30·n
    multiplications of float64 for an element of a matrix whose shorter side is n, once a step.
    """

    config: OptimizerConfig

    @property
    def vectors(self) -> tuple[str, ...]:
        """See :class:`~swarm.optim.update.Update`. A matrix uses the first two."""
        return AdamW(self.config).vectors

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """See :class:`~swarm.optim.update.Update`: all of them."""
        return slice(0, layout.elements)

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device = _CPU
    ) -> StepPlan:
        """See :class:`~swarm.optim.update.Update`. Raises BugError also for a mean that is not finite."""
        check_mean(mean, state)
        beta, clip = self.config.momentum, single(numbers.clip)
        blend = partial(_blend, clip, single(beta), single(1.0 - beta))
        others = AdamW(self.config).element_step(numbers, in_c=mean.device.type == "cpu")
        directions, runs = torch.zeros_like(mean), []
        if not layout.slots:
            runs.append(ElementRun(0, layout.elements, others(False)))
        for slot, stop in _places(layout):
            if slot.name not in layout.matrices:
                runs.append(ElementRun(slot.offset, stop, others(slot.name in layout.decayed)))
                continue
            place = slice(slot.offset, slot.offset + slot.elements)
            ahead = blend(blend(state[1][place], mean[place]), mean[place])
            directions[place] = _direction(ahead, slot, device)
            runs.append(ElementRun(slot.offset, stop, self._matrix_step(slot, numbers, blend)))
        return StepPlan((mean.contiguous(), directions), tuple(runs))

    def _matrix_step(self, slot: Slot, numbers: StepNumbers, blend: partial[Tensor]) -> ElementStep:
        rate, shrink = single(numbers.lr * _scale(slot)), single(1.0 - numbers.lr * self.config.weight_decay)
        return partial(_step, blend, rate, shrink)


def _places(layout: FlatLayout) -> Iterator[tuple[Slot, int]]:
    """Each slot, and where the next one starts."""
    ends = [slot.offset for slot in layout.slots[1:]] + [layout.elements]
    return zip(layout.slots, ends, strict=False)


def _scale(slot: Slot) -> float:
    return MATCHED_RMS * math.sqrt(max(slot.shape[-2:]))


def _direction(momentum: Tensor, slot: Slot, device: torch.device) -> Tensor:
    """Of a matrix whose momentum is this, float32 (slot.elements,) where that lies; computed on ``device``."""
    if device.type == "mps":  # it has no float64
        device = _CPU
    return orthogonal(momentum.view(slot.shape).to(device)).to(momentum.device).flatten()


def _blend(clip: float, beta: float, rest: float, momentum: Tensor, mean: Tensor) -> Tensor:
    """β·momentum + (1 − β)·g, each operation rounded by itself."""
    gradient = torch.mul(mean, clip)
    torch.mul(gradient, rest, out=gradient)
    return torch.add(torch.mul(momentum, beta), gradient)


def _step(blend: partial[Tensor], rate: float, shrink: float, old: Vectors, sources: Vectors, new: Vectors) -> None:
    mean, direction = sources
    new[1].copy_(blend(old[1], mean))
    torch.mul(old[0], shrink, out=new[0])
    torch.sub(new[0], torch.mul(direction, rate), out=new[0])
    new[2].copy_(old[2])


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearly orthogonal matrix of the same row and column spaces, float32: its singular values are from 0.7
    to 1.2, but those of next to nothing. ``matrix``: float32 (rows, columns), or a stack of such, each by itself.

    A pure function of the values, to the bit, on CPU and CUDA. Raises BugError for values that are not finite.
    """
    if matrix.ndim > 2:
        return torch.stack([orthogonal(one) for one in matrix])
    largest = float(matrix.abs().max()) if matrix.numel() else 0.0
    if not math.isfinite(largest):
        raise BugError("the momentum of a matrix is not finite")
    if largest == 0.0:
        return torch.zeros_like(matrix)
    bits = min(18, (62 - matrix.numel().bit_length()) // 2)  # so that the sum of squares is an exact integer
    whole = torch.round(torch.ldexp(matrix.double(), torch.tensor(bits - math.frexp(largest)[1], device=matrix.device)))
    norm = math.sqrt(int(whole.to(torch.int64).square().sum()))
    x = _on_grid(whole / norm)
    turned = x.shape[0] > x.shape[1]
    if turned:
        x = x.mT.contiguous()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = _on_grid(x @ x.mT)
        inner = _on_grid(square * b + _on_grid(square @ square) * c)
        x = _on_grid(x * a + _on_grid(inner @ x))
    return (x.mT if turned else x).to(torch.float32).contiguous()


def _on_grid(values: Tensor) -> Tensor:
    return values.mul_(GRID).round_().mul_(1.0 / GRID)

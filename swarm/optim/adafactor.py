"""Adafactor whose result has the same bits on every machine: of a matrix it keeps what rows and columns are like.

Where AdamW keeps two numbers beside each weight, this keeps the mean square of the gradient of each row and column, and
no momentum (Shazeer and Stern, "Adafactor", arXiv 1804.04235). Decay and normalisation are those of AdaLomo (Lv et al.,
arXiv 2310.10195): a tensor's step is never longer than the learning rate, as a root mean square.

Means over rows, columns and a whole step are sums whose order each library chooses. So what is summed is whole numbers,
in 64 bits: gradients as multiples of a power of two far below the largest, steps as parts of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FACTORS, FlatLayout, matrices_of
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import (
    CHUNK_ELEMENTS,
    ElementRun,
    StepNumbers,
    StepPlan,
    Vectors,
    check_mean,
    power,
    root,
    single,
    stay,
)

_CPU = torch.device("cpu")
FARTHEST, GRID = 64.0, 2.0**14
"""An element moves at most so many learning rates; a step's length is summed in so many parts of one."""
BITS = 24
"""Of a gradient that is squared and summed: as many as float32 has."""
LEAST = 1e-30
"""A mean square below it counts as none."""


@dataclass(frozen=True, slots=True)
class Adafactor:
    """With g the clipped mean, r and c the means of g² over each row and each column of a matrix, decayed by ``beta2``
    and corrected for that, u = g / (√(r·c / mean(r)) + eps): p ← p·(1 − lr·decay) − lr·u / max(1, RMS(u)), the first
    factor only where the layout decays. What is no matrix has its own g², decayed, in the place of r·c / mean(r).

    Memory beside the parameters: rows + columns of each matrix. Cost: the mean is read four times, where AdamW reads
    and writes two vectors more.
    """

    config: OptimizerConfig

    @property
    def vectors(self) -> tuple[str, ...]:
        """See :class:`~swarm.optim.update.Update`."""
        return "params", FACTORS

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """See :class:`~swarm.optim.update.Update`: all of them."""
        return slice(0, layout.elements)

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device = _CPU
    ) -> StepPlan:
        """See :class:`~swarm.optim.update.Update`. Raises BugError also for a mean that is not finite."""
        check_mean(mean, state)
        clip, decay = single(numbers.clip), single(1.0 - numbers.lr * self.config.weight_decay)
        after, kept_in = torch.zeros_like(state[1]), layout.kept_in(FACTORS)
        runs, end = list[ElementRun](), 0
        for slot, place in zip(layout.slots, kept_in.slots, strict=True):
            gradient = _Gradient(mean[slot.offset : slot.offset + slot.elements], clip, *matrices_of(slot.shape))
            kept = slice(place.offset, place.offset + place.elements)
            after[kept] = self._decayed(state[1][kept], gradient.mean_squares())
            divisor = self._divisor(gradient, after[kept], numbers.step)
            rate = single(numbers.lr / max(1.0, _length(gradient, divisor)))
            shrink = decay if slot.name in layout.decayed else 1.0
            runs += [ElementRun(end, slot.offset, stay)] if end < slot.offset else []
            end = slot.offset + slot.elements
            step = partial(_step, clip, rate, shrink)
            runs.append(ElementRun(slot.offset, end, step, (gradient.mean, divisor)))
        runs += [ElementRun(end, layout.elements, stay)] if end < layout.elements else []
        return StepPlan((mean,), tuple(runs), settled={1: after})

    def _decayed(self, before: Tensor, found: Tensor) -> Tensor:
        beta, rest = single(self.config.beta2), single(1.0 - self.config.beta2)
        return torch.add(torch.mul(before, beta), torch.mul(found, rest))

    def _divisor(self, gradient: _Gradient, factors: Tensor, step: int) -> _Divisor:
        correction, eps = 1.0 / (1.0 - power(self.config.beta2, step)), single(self.config.eps)
        if not gradient.columns:
            return _Divisor(gradient, root(torch.mul(factors, single(correction))), None, eps)
        by_row, by_column = factors[: gradient.all_rows].clone(), factors[gradient.all_rows :].clone()
        for rows in by_row.view(gradient.matrices, -1):
            usual = math.fsum(rows.tolist()) / gradient.rows
            rows.mul_(single(correction / usual) if usual > LEAST else 0.0)
        return _Divisor(gradient, root(by_row), root(by_column).view(gradient.matrices, -1), eps)


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A tensor's mean, float32 (elements,), and what it is scaled by; as the ``rows`` of some matrices, of 0 columns
    where it is none."""

    mean: Tensor
    clip: float
    matrices: int
    rows: int
    columns: int

    @property
    def all_rows(self) -> int:
        return self.matrices * self.rows

    def blocks(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield some rows of a matrix at a time: its number, which of all rows they are, and their gradients, float32
        (rows, columns or 1), a copy."""
        width = max(1, self.columns)
        for matrix in range(self.matrices):
            for first in range(matrix * self.rows, (matrix + 1) * self.rows, max(1, CHUNK_ELEMENTS // width)):
                last = min(first + max(1, CHUNK_ELEMENTS // width), (matrix + 1) * self.rows)
                yield (
                    matrix,
                    slice(first, last),
                    torch.mul(self.mean[first * width : last * width], self.clip).view(-1, width),
                )

    def mean_squares(self) -> Tensor:
        """Return the means over each row, then those over each column, float32; of what is no matrix the squares. Exact
        but for BITS of each number beside the largest. Raises BugError for what is not finite."""
        largest = self.clip * max(map(abs, map(float, torch.aminmax(self.mean)))) if len(self.mean) else 0.0
        if not math.isfinite(largest):
            raise BugError("the mean of a tensor is not finite")
        bits = min(BITS, (62 - max(self.rows, self.columns).bit_length()) // 2)
        exponent = bits - math.frexp(largest)[1]
        rows = torch.zeros(self.all_rows, dtype=torch.int64)
        columns = torch.zeros(self.matrices, self.columns, dtype=torch.int64)
        for matrix, place, block in self.blocks():
            whole = block.double().mul_(2.0**exponent).round_().to(torch.int64)
            whole.mul_(whole)
            rows[place] = whole.sum(1)
            if self.columns:
                columns[matrix] += whole.sum(0)
        unit = 2.0 ** (-2 * exponent)
        means = (rows.double() * (unit / max(1, self.columns)), columns.double().flatten() * (unit / self.rows))
        return torch.cat(means).to(torch.float32)


@dataclass(frozen=True, slots=True)
class _Divisor:
    """What a tensor's gradient is divided by, √(r·c / mean(r)) + eps, made a piece at a time: ``by_row`` (all rows,)
    and ``by_column`` (matrices, columns), None where it is no matrix."""

    gradient: _Gradient
    by_row: Tensor
    by_column: Tensor | None
    eps: float

    def __getitem__(self, piece: slice) -> Tensor:
        """See :class:`~swarm.optim.update.Pieces`."""
        start, stop = piece.start, piece.stop
        if self.by_column is None:
            return torch.add(self.by_row[start:stop], self.eps)
        width = self.gradient.columns
        first, last = start // width, -(-stop // width)
        columns = self.by_column[torch.arange(first, last) // self.gradient.rows]
        block = torch.mul(columns, self.by_row[first:last, None]).add_(self.eps)
        return block.flatten()[start - first * width : stop - first * width]


def _length(gradient: _Gradient, divisor: _Divisor) -> float:
    """Return the root mean square of what a step of learning rate 1 would be."""
    total, width = 0, max(1, gradient.columns)
    for _, place, block in gradient.blocks():
        moved = _moved(block.flatten(), divisor[place.start * width : place.stop * width])
        whole = moved.double().mul_(GRID).round_().to(torch.int64)
        total += int(whole.mul_(whole).sum())
    return math.sqrt(total) / GRID / math.sqrt(max(1, len(gradient.mean)))


def _moved(gradient: Tensor, divisor: Tensor) -> Tensor:
    """Return by how many learning rates each element would move; ``gradient`` is spent."""
    return torch.div(gradient, divisor, out=gradient).clamp_(-FARTHEST, FARTHEST)


def _step(clip: float, rate: float, shrink: float, old: Vectors, sources: Vectors, new: Vectors) -> None:
    mean, divisor = sources
    moved = _moved(torch.mul(mean, clip), divisor)
    torch.mul(moved, rate, out=moved)
    torch.mul(old[0], shrink, out=new[0])
    torch.sub(new[0], moved, out=new[0])

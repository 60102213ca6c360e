"""AdamW whose result has the same bits on every machine.

Replicas of a part never exchange parameters in normal operation: each computes the step itself, and their digests
must agree. So only +, −, ×, ÷ and √ of float32 are used, one kernel each, which IEEE 754 rounds in one way; fused
kernels (``addcmul``, ``lerp``, ``torch.optim``'s) contract a × b + c where the instruction set can, and differ. Scalars
are computed in Python's float64 by the same five operations and rounded to float32 once. No division is by a scalar:
CUDA would multiply by the reciprocal.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout
from swarm.optim.schedules import OptimizerConfig

CHUNK_ELEMENTS = 1 << 18
"""1 MiB: three temporaries stay in a CPU's second-level cache, and beside the model's size they do not count."""


@dataclass(frozen=True, slots=True, eq=False)
class AdamWState:
    """Parameters and both moments of a part: three flat float32 vectors (elements,), never written to again."""

    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """A close record's numbers for a step: its number (1-based), the learning rate, and the clip factor."""

    step: int
    lr: float
    clip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scalars:
    """Every number of one step, each rounded to float32 once."""

    clip: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float
    correction2: float
    step_size: float
    shrink: float


@torch.no_grad()
def adamw_step(
    state: AdamWState,
    gradient: Tensor,
    layout: FlatLayout,
    config: OptimizerConfig,
    numbers: StepNumbers,
) -> AdamWState:
    """The state after a step, in new vectors; ``state`` and ``gradient`` stay as they are.

    ``gradient`` is the mean over target tokens, float32 (elements,), on the state's device.
    With m and v the moments, m̂ and v̂ their bias-corrected values: p ← p·(1 − lr·decay) − lr·m̂ / (√v̂ + eps), the
    first factor only where the layout decays (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).
    Memory: three vectors of the result, and three chunks. Raises BugError for a gradient of another shape or dtype.
    """
    if gradient.shape != state.params.shape or gradient.dtype != torch.float32:
        raise BugError(f"gradient is {gradient.dtype} {tuple(gradient.shape)}, expected float32 {(layout.elements,)}")
    decayed = _scalars(config, numbers)
    plain = replace(decayed, shrink=1.0)
    shadow = AdamWState(*(torch.empty_like(state.params) for _ in range(3)))
    scratch = torch.empty(2, min(CHUNK_ELEMENTS, layout.elements), dtype=torch.float32, device=gradient.device)
    for start, stop, decay in layout.decay_runs():
        for first in range(start, stop, CHUNK_ELEMENTS):
            chunk = slice(first, min(first + CHUNK_ELEMENTS, stop))
            _step_chunk(state, shadow, gradient, chunk, decayed if decay else plain, scratch)
    return shadow


def _step_chunk(old: AdamWState, new: AdamWState, gradient: Tensor, chunk: slice, s: _Scalars, scratch: Tensor) -> None:
    clipped, work = scratch[:, : chunk.stop - chunk.start]
    mean, square, params = new.exp_avg[chunk], new.exp_avg_sq[chunk], new.params[chunk]

    torch.mul(gradient[chunk], s.clip, out=clipped)
    torch.mul(old.exp_avg[chunk], s.beta1, out=mean)
    torch.mul(clipped, s.rest1, out=work)
    torch.add(mean, work, out=mean)

    torch.mul(old.exp_avg_sq[chunk], s.beta2, out=square)
    torch.mul(clipped, clipped, out=work)
    torch.mul(work, s.rest2, out=work)
    torch.add(square, work, out=square)

    torch.mul(square, s.correction2, out=work)
    _root(work)
    torch.add(work, s.eps, out=work)
    torch.mul(mean, s.step_size, out=clipped)
    torch.div(clipped, work, out=work)

    torch.mul(old.params[chunk], s.shrink, out=params)
    torch.sub(params, work, out=params)


def _root(values: Tensor) -> None:
    """Square roots in place, correctly rounded. On the CPU torch gives this to a vector library whose last bit depends
    on the processor (measured: 0.6 % of the values); numpy uses the processor's own instruction, which is exact."""
    if values.device.type == "cpu":
        array = values.numpy()
        np.sqrt(array, out=array)
    else:
        torch.sqrt(values, out=values)


def _scalars(config: OptimizerConfig, numbers: StepNumbers) -> _Scalars:
    step, lr = numbers.step, numbers.lr
    return _Scalars(
        clip=single(numbers.clip),
        beta1=single(config.beta1),
        rest1=single(1.0 - config.beta1),
        beta2=single(config.beta2),
        rest2=single(1.0 - config.beta2),
        eps=single(config.eps),
        correction2=single(1.0 / (1.0 - _power(config.beta2, step))),
        step_size=single(lr / (1.0 - _power(config.beta1, step))),
        shrink=single(1.0 - lr * config.weight_decay),
    )


def _power(base: float, exponent: int) -> float:
    """``base ** exponent`` by multiplications: the C library's ``pow`` is not rounded alike everywhere."""
    if exponent < 1:
        raise BugError(f"optimizer steps count from 1, not {exponent}")
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def single(value: float) -> float:
    """A scalar rounded to float32, once. Raises BugError where that is not finite."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    if not math.isfinite(rounded):
        raise BugError(f"a scalar of the optimizer step is {value}")
    return rounded

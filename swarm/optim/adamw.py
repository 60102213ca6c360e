"""AdamW whose result has the same bits on every machine.

Replicas of a part never exchange parameters in normal operation: each computes the step itself, and their digests
must agree. So only +, −, ×, ÷ and √ of float32 are used, one kernel each, which IEEE 754 rounds in one way; fused
kernels (``addcmul``, ``lerp``, ``torch.optim``'s) contract a × b + c where the instruction set can, and differ. Scalars
are computed in Python's float64 by the same five operations and rounded to float32 once. No division is by a scalar:
CUDA would multiply by the reciprocal.

On the CPU the same operations in C do it in one pass where set-up could compile them (:mod:`swarm.optim.native`) and a
trial gives the same bits; what is written here is the reference, and the way without.
"""

from __future__ import annotations

import functools
import logging
import math
import struct
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout
from swarm.optim import native
from swarm.optim.schedules import OptimizerConfig

logger = logging.getLogger(__name__)

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
    """Every number of one step, each rounded to float32 once; in the order of ``adamw.c``."""

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
    *,
    in_c: bool = True,
) -> AdamWState:
    """The state after a step, in new vectors; ``state`` and ``gradient`` stay as they are.

    ``gradient`` is the mean over target tokens, float32 (elements,), on the state's device.
    With m and v the moments, m̂ and v̂ their bias-corrected values: p ← p·(1 − lr·decay) − lr·m̂ / (√v̂ + eps), the
    first factor only where the layout decays (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).
    ``in_c``: by the kernel in C where there is one; without it the same bits. Memory: three vectors of the result, and
    without the kernel three chunks. Raises BugError for a gradient of another shape or dtype.
    """
    if gradient.shape != state.params.shape or gradient.dtype != torch.float32:
        raise BugError(f"gradient is {gradient.dtype} {tuple(gradient.shape)}, expected float32 {(layout.elements,)}")
    decayed = _scalars(config, numbers)
    plain = replace(decayed, shrink=1.0)
    shadow = AdamWState(*(torch.empty_like(state.params) for _ in range(3)))
    kernel = trusted_kernel() if in_c and gradient.device.type == "cpu" else None
    if kernel is not None:
        gradient = gradient.contiguous()
        for start, stop, decay in layout.decay_runs():
            _step_in_c(kernel, state, shadow, gradient, slice(start, stop), decayed if decay else plain)
        return shadow
    scratch = torch.empty(2, min(CHUNK_ELEMENTS, layout.elements), dtype=torch.float32, device=gradient.device)
    for start, stop, decay in layout.decay_runs():
        for first in range(start, stop, CHUNK_ELEMENTS):
            chunk = slice(first, min(first + CHUNK_ELEMENTS, stop))
            _step_chunk(state, shadow, gradient, chunk, decayed if decay else plain, scratch)
    return shadow


@functools.cache
def trusted_kernel() -> native.Kernel | None:
    """Return the kernel in C, if set-up compiled one and its bits are those of the operations below; tried once."""
    kernel = native.load(native.library())
    if kernel is not None and not gives_the_same_bits(kernel):
        logger.warning("the optimizer step in C rounds otherwise than torch on this machine: it is not used")
        return None
    return kernel


def gives_the_same_bits(kernel: native.Kernel) -> bool:
    """Return whether a kernel does what :func:`adamw_step` does without one, on numbers of all sizes."""
    generator = torch.Generator().manual_seed(0)
    count = 4099  # no multiple of what a processor does at a time
    exponents = [torch.randint(-40, 20, (count,), generator=generator).to(torch.float32) for _ in range(4)]
    numbers = [torch.randn(count, generator=generator, dtype=torch.float32) for _ in range(4)]
    params, mean, square, gradient = (one * torch.exp2(each) for one, each in zip(numbers, exponents, strict=True))
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38], dtype=torch.float32)
    for vector in (params, mean, gradient):
        vector[: len(tiny)] = tiny
    old = AdamWState(params, mean, square.square())
    scratch = torch.empty(2, count, dtype=torch.float32)
    for shrink in (1.0, single(1.0 - 1e-4)):
        scalars = _Scalars(
            clip=single(0.7), beta1=single(0.9), rest1=single(0.1), beta2=single(0.95), rest2=single(0.05),
            eps=single(1e-8), correction2=single(3.2), step_size=single(1.1e-3), shrink=shrink,
        )  # fmt: skip
        ours, theirs = (AdamWState(*(torch.empty_like(params) for _ in range(3))) for _ in range(2))
        _step_chunk(old, ours, gradient, slice(0, count), scalars, scratch)
        _step_in_c(kernel, old, theirs, gradient, slice(0, count), scalars)
        for one, other in zip(_vectors(ours), _vectors(theirs), strict=True):
            if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                return False
    return True


def _step_in_c(
    kernel: native.Kernel, old: AdamWState, new: AdamWState, gradient: Tensor, run: slice, s: _Scalars
) -> None:
    kernel(_vectors(old, run), gradient[run], _vectors(new, run), astuple(s))


def _vectors(state: AdamWState, run: slice = slice(None)) -> native.Vectors:
    return state.params[run], state.exp_avg[run], state.exp_avg_sq[run]


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

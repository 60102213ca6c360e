"""AdamW whose result has the same bits on every machine: of operations that are rounded separately (``update.py``).

Replicas of a part never exchange parameters in normal operation: each computes the step itself, and their digests must
agree. On the CPU the same operations in C do it in one pass where set-up could compile them (:mod:`swarm.optim.native`)
and a trial gives the same bits; what is written here is the reference, and the way without.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.models.layout import FlatLayout
from swarm.optim import native
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import (
    ElementRun,
    ElementStep,
    StepNumbers,
    StepPlan,
    Vectors,
    check_mean,
    power,
    root,
    single,
    stepped,
)

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class AdamWState(NamedTuple):
    """Parameters and both moments of a part: three flat float32 vectors (elements,)."""

    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


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


@dataclass(frozen=True, slots=True)
class AdamW:
    """The mean, over target tokens, is the gradient. With m and v the moments, m̂ and v̂ their bias-corrected values:
    p ← p·(1 − lr·decay) − lr·m̂ / (√v̂ + eps), the first factor only where the layout decays (Loshchilov and Hutter,
    arXiv 1711.05101, algorithm 2).

    ``in_c``: by the kernel in C where there is one; without it the same bits.
    """

    config: OptimizerConfig
    in_c: bool = True

    @property
    def vectors(self) -> tuple[str, ...]:
        """See :class:`~swarm.optim.update.Update`."""
        return AdamWState._fields

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """See :class:`~swarm.optim.update.Update`: all of them."""
        return slice(0, layout.elements)

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device = _CPU
    ) -> StepPlan:
        """See :class:`~swarm.optim.update.Update`."""
        check_mean(mean, state)
        step = self.element_step(numbers, in_c=self.in_c and mean.device.type == "cpu")
        runs = tuple(ElementRun(start, stop, step(decay)) for start, stop, decay in layout.decay_runs())
        return StepPlan((mean.contiguous(),), runs)

    def element_step(self, numbers: StepNumbers, *, in_c: bool) -> Callable[[bool], ElementStep]:
        """Return what is done to elements that decay (True) or do not; its first source is the mean."""
        decayed = _scalars(self.config, numbers)
        plain = replace(decayed, shrink=1.0)
        kernel = trusted_kernel() if in_c else None
        if kernel is not None:
            return lambda decay: functools.partial(_step_in_c, kernel, decayed if decay else plain)
        return lambda decay: functools.partial(_step_apart, decayed if decay else plain)


def adamw_step(
    state: AdamWState,
    gradient: Tensor,
    layout: FlatLayout,
    config: OptimizerConfig,
    numbers: StepNumbers,
    *,
    in_c: bool = True,
) -> AdamWState:
    """The state after a step of :class:`AdamW`, in new vectors; ``state`` and ``gradient`` stay as they are, both on
    one device. Raises BugError for a gradient of another shape or dtype."""
    return AdamWState(*stepped(AdamW(config, in_c).plan(state, gradient, layout, numbers), state))


@functools.cache
def trusted_kernel() -> native.Kernel | None:
    """Return the kernel in C, if set-up compiled one and its bits are those of the operations below; tried once."""
    kernel = native.load(native.library())
    if kernel is not None and not gives_the_same_bits(kernel):
        logger.warning("did not use the optimizer step in C: it rounds otherwise than torch on this machine")
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
    old, sources = AdamWState(params, mean, square.square()), (gradient,)
    for shrink in (1.0, single(1.0 - 1e-4)):
        scalars = _Scalars(
            clip=single(0.7), beta1=single(0.9), rest1=single(0.1), beta2=single(0.95), rest2=single(0.05),
            eps=single(1e-8), correction2=single(3.2), step_size=single(1.1e-3), shrink=shrink,
        )  # fmt: skip
        ours, theirs = (AdamWState(*(torch.empty_like(params) for _ in range(3))) for _ in range(2))
        _step_apart(scalars, old, sources, ours)
        _step_in_c(kernel, scalars, old, sources, theirs)
        for one, other in zip(ours, theirs, strict=True):
            if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
                return False
    return True


def _step_in_c(kernel: native.Kernel, s: _Scalars, old: Vectors, sources: Vectors, new: Vectors) -> None:
    kernel(AdamWState(*old), sources[0], AdamWState(*new), astuple(s))


def _step_apart(s: _Scalars, old: Vectors, sources: Vectors, new: Vectors) -> None:
    old_params, old_mean, old_square = old
    params, mean, square = new
    clipped = torch.mul(sources[0], s.clip)
    torch.mul(old_mean, s.beta1, out=mean)
    work = torch.mul(clipped, s.rest1)
    torch.add(mean, work, out=mean)

    torch.mul(old_square, s.beta2, out=square)
    torch.mul(clipped, clipped, out=work)
    torch.mul(work, s.rest2, out=work)
    torch.add(square, work, out=square)

    torch.mul(square, s.correction2, out=work)
    root(work)
    torch.add(work, s.eps, out=work)
    torch.mul(mean, s.step_size, out=clipped)
    torch.div(clipped, work, out=work)

    torch.mul(old_params, s.shrink, out=params)
    torch.sub(params, work, out=params)


def _scalars(config: OptimizerConfig, numbers: StepNumbers) -> _Scalars:
    step, lr = numbers.step, numbers.lr
    return _Scalars(
        clip=single(numbers.clip),
        beta1=single(config.beta1),
        rest1=single(1.0 - config.beta1),
        beta2=single(config.beta2),
        rest2=single(1.0 - config.beta2),
        eps=single(config.eps),
        correction2=single(1.0 / (1.0 - power(config.beta2, step))),
        step_size=single(lr / (1.0 - power(config.beta1, step))),
        shrink=single(1.0 - lr * config.weight_decay),
    )

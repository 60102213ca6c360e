"""The gradients of a step's microbatches, each counted once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from swarm.errors import BugError, Violation
from swarm.ids import MicrobatchId
from swarm.models.layout import FlatLayout
from swarm.models.passes import Gradients

AccumulatorDType = Literal["float32", "float64"]

GRID = 2.0**30
"""In float64 a gradient is first rounded to multiples of 2⁻³⁰. Sums of such numbers are exact while they stay below
2²³, on one replica and in the reducer: then the order of arrival, and who computed what, cannot change a bit. Plain
float64 sums would differ now and then in the bit that survives rounding to float32. Beyond 2²³ only that is lost.
What it costs: a loss-*sum*'s gradient below 2⁻³¹ counts as zero."""


class Accumulator:
    """Sum over microbatches of a part's gradient: one flat vector (elements,), and the set of ids in it."""

    def __init__(self, layout: FlatLayout, dtype: AccumulatorDType, device: torch.device) -> None:
        self._sum = torch.zeros(layout.elements, dtype=getattr(torch, dtype), device=device)
        views = layout.views(self._sum)
        self._views = {name: view for name, view in views.items() if name not in layout.buffers}
        self._microbatches: set[MicrobatchId] = set()

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """The microbatches whose gradients are in the sum."""
        return frozenset(self._microbatches)

    @property
    def total(self) -> Tensor:
        """The sum itself, not a copy: (elements,), gaps zero. Valid until the next call that changes it."""
        return self._sum

    def add(self, microbatch: MicrobatchId, gradients: Gradients, *, checked: bool = False) -> None:
        """Add one microbatch, all of it or nothing. ``checked``: :meth:`check` has seen these gradients.

        Raises BugError when it is in the sum already, and else as :meth:`check`.
        """
        if microbatch in self._microbatches:
            raise BugError(f"{microbatch} is already in the sum")
        if not checked:
            self.check(gradients)
        self._microbatches.add(microbatch)
        self._take(gradients, +1)

    def remove(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Take one microbatch out again, given the same gradients, recomputed. Exact in float64; in float32 up to the
        rounding of the additions since. Raises as :meth:`add`, BugError when it is not in the sum."""
        if microbatch not in self._microbatches:
            raise BugError(f"{microbatch} is not in the sum")
        self.check(gradients)
        self._microbatches.remove(microbatch)
        self._take(gradients, -1)

    def reset(self) -> None:
        """Empty: ready for the next step."""
        self._sum.zero_()
        self._microbatches.clear()

    def check(self, gradients: Gradients) -> None:
        """Raise BugError when a parameter's gradient is missing, named twice or misshapen, and Violation when a value
        is not finite: the caller adds whose gradient it was. Waits for the device."""
        if sorted(name for name, _ in gradients) != sorted(self._views):
            raise BugError(f"gradients of {[name for name, _ in gradients]} for a part of {list(self._views)}")
        for name, gradient in gradients:
            if gradient.shape != self._views[name].shape:
                raise BugError(f"gradient of {name} has shape {tuple(gradient.shape)}")
        if not gradients:  # a part with nothing to train
            return
        # A sum is not finite when an element is not: one pass and no temporary, a twelfth of what looking at each
        # element costs. Only sums that overflow need that look.
        sums = torch.stack([gradient.sum(dtype=torch.float32) for _, gradient in gradients])
        if bool(sums.isfinite().all()):
            return
        for name, gradient in gradients:
            if not bool(gradient.isfinite().all()):
                raise Violation(f"the gradient of {name} is not finite")

    def _take(self, gradients: Gradients, sign: int) -> None:
        """Add or subtract them: on a GPU in a few launches, but one after the other where each is rounded first."""
        if self._sum.dtype == torch.float64:
            for name, gradient in gradients:
                self._views[name].add_(gradient.double().mul_(GRID).round_().div_(GRID), alpha=sign)
        elif gradients:
            views, found = [self._views[name] for name, _ in gradients], [gradient for _, gradient in gradients]
            torch._foreach_add_(views, found, alpha=sign)

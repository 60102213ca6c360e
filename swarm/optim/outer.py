"""The outer optimizer of replicas that train apart (`local`, DiLoCo): the mean of how far they came, as a gradient.

Replicas begin at one anchor, train alone for H steps, and average their *deltas*, anchor − parameters. The mean delta
is taken for a gradient at the anchor and stepped along with Nesterov momentum; the result is the next anchor, from
which everybody goes on, each with its own inner moments.

With F *fragments* a step averages one of them, step mod F, and leaves anchor and momentum of the others as they are
(Streaming DiLoCo, Douillard et al., arXiv 2501.18512): each still is averaged every F steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarm.models.layout import ALIGNMENT, FlatLayout
from swarm.optim.adamw import AdamWState
from swarm.optim.update import (
    ElementRun,
    ElementStep,
    StepNumbers,
    StepPlan,
    Vectors,
    check_mean,
    single,
    stay,
    stepped,
)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class OuterState:
    """The state that all replicas share: the parameters on which they last agreed, and the momentum. Two flat float32
    vectors (elements,)."""

    anchor: Tensor
    momentum: Tensor

    @classmethod
    def first(cls, anchor: Tensor) -> OuterState:
        """Return the state of a run before its first synchronisation: no momentum. ``anchor`` is taken as it is, not
        copied."""
        return cls(anchor, torch.zeros_like(anchor))


@dataclass(frozen=True, slots=True)
class OuterNesterov:
    """Gradient descent with Nesterov momentum over mean deltas Δ, m₀ = 0:

        m ← μ·m + Δ
        anchor ← anchor − lr·(Δ + μ·m)

    Source: DiLoCo, Douillard et al., arXiv 2311.08105, algorithm 1, with the rates it found best; momentum as in
    Sutskever et al., ICML 2013, in the form of ``torch.optim.SGD(nesterov=True)``.
    ``lr`` = 1 and ``momentum`` = 0 average the parameters: the result is anchor − Δ to the bit, and that is their mean
    up to three roundings: of each replica's difference, of Δ and of this one.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def step(self, state: OuterState, delta: Tensor) -> OuterState:
        """The next anchor and momentum, in new vectors; ``state`` and ``delta`` stay as they are.

        ``delta`` is the mean of anchor − parameters over replicas, float32 (elements,), finite, on the state's device,
        the same bits everywhere. Raises BugError for a delta of another shape or dtype, and for a rate that is no
        float32.
        """
        vectors = (state.anchor, state.momentum)
        check_mean(delta, vectors)
        return OuterState(*stepped(StepPlan((delta,), (ElementRun(0, len(delta), self.element_step(1.0)),)), vectors))

    def element_step(self, clip: float) -> ElementStep:
        """Return what is done to anchor and momentum with Δ times ``clip``. Raises BugError for a rate that is no
        float32."""
        return partial(_step, single(self.lr), single(self.momentum), single(clip))


def _step(lr: float, momentum: float, clip: float, old: Vectors, sources: Vectors, new: Vectors) -> None:
    (anchor, velocity), delta = new[:2], sources[0] * clip
    torch.mul(old[1], momentum, out=velocity)
    torch.add(velocity, delta, out=velocity)
    ahead = torch.mul(velocity, momentum)
    torch.add(ahead, delta, out=ahead)
    torch.mul(ahead, lr, out=ahead)
    torch.sub(old[0], ahead, out=anchor)
    stay(old[2:], (), new[2:])


# --- fragments (pure) ------------------------------------------------------------------------------------------------

LEAST_ELEMENTS = 4 * ALIGNMENT
"""Of a fragment: a part that is shorter than F of them has fewer than F."""
LONGEST = 1.5
"""How much longer than the F-th share of a part a fragment is at most, but for an alignment."""


def fragment_of(layout: FlatLayout, fragments: int, step: int) -> slice:
    """Return the elements that a step averages: fragment ``step`` mod ``fragments``.

    Each is a run of whole parameters of about the same length. A bound is where a parameter begins, if one does within
    a quarter of a fragment from the even cut; else it cuts a long parameter, which no element of the outer step minds.
    """
    count = max(1, min(fragments, layout.elements // LEAST_ELEMENTS))
    number = step % count
    return slice(_bound(layout, count, number), _bound(layout, count, number + 1))


def _bound(layout: FlatLayout, count: int, number: int) -> int:
    if number in (0, count):
        return layout.elements * number // count
    even = layout.elements * number // count // ALIGNMENT * ALIGNMENT
    near = min((slot.offset for slot in layout.slots), key=lambda offset: (abs(offset - even), offset), default=even)
    return near if 4 * count * abs(near - even) <= layout.elements else even


@dataclass(frozen=True, slots=True)
class Outer:
    """The mean is that of anchor − parameters over replicas that trained apart. The record's learning rate is not used:
    it is the inner optimizer's. Its clip factor is 1 but where Δ is longer than honest steps can lead.

    The state is anchor and momentum; its third vector stays zero, so that it is stored and sent as AdamW's is.
    A step changes one of so many ``fragments``.
    """

    nesterov: OuterNesterov
    fragments: int = 1

    @property
    def vectors(self) -> tuple[str, ...]:
        """See :class:`~swarm.optim.update.Update`."""
        return AdamWState._fields

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """See :class:`~swarm.optim.update.Update` and :func:`fragment_of`."""
        return fragment_of(layout, self.fragments, step)

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device = _CPU
    ) -> StepPlan:
        """See :class:`~swarm.optim.update.Update` and :class:`OuterNesterov`."""
        part = self.averaged(layout, numbers.step)
        check_mean(mean, tuple(vector[part] for vector in state))
        runs = (
            ElementRun(0, part.start, stay),
            ElementRun(part.start, part.stop, self.nesterov.element_step(numbers.clip)),
            ElementRun(part.stop, layout.elements, stay),
        )
        return StepPlan((mean,), tuple(run for run in runs if run.start < run.stop), part.start)

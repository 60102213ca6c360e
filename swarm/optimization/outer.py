"""The outer optimizer of DiLoCo: what replicas that trained apart make of where each of them arrived.

Replicas begin at one anchor, train alone for H steps, and average their *deltas*, anchor − parameters. The mean delta
is taken for a gradient at the anchor and stepped along with Nesterov momentum; the result is the next anchor, from
which everybody goes on, each with its own inner moments. Every replica computes that itself, and all must get the same
bits, so the rules of :mod:`swarm.optimization.adamw` hold: separately rounded float32 +, − and ×, no fused kernels,
scalars rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.optimization.adamw import CHUNK_ELEMENTS, single


@dataclass(frozen=True, slots=True, eq=False)
class OuterState:
    """What all replicas hold in common: the parameters they last agreed on, and the momentum. Two flat float32 vectors
    (elements,), never written to again."""

    anchor: Tensor
    momentum: Tensor

    @classmethod
    def first(cls, anchor: Tensor) -> OuterState:
        """Of a run that has not met yet: no momentum. ``anchor`` is taken as it is, not copied."""
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

    @torch.no_grad()
    def step(self, state: OuterState, delta: Tensor) -> OuterState:
        """The next anchor and momentum, in new vectors; ``state`` and ``delta`` stay as they are, so the result can be
        a shadow until the step is decided.

        ``delta`` is the mean of anchor − parameters over replicas, float32 (elements,), finite, on the state's device,
        the same bits everywhere. Memory: the two vectors of the result, and one chunk. Cost: 7 passes over memory.
        Raises BugError for a delta of another shape or dtype, and for a rate that is no float32.
        """
        if delta.shape != state.anchor.shape or delta.dtype != torch.float32:
            raise BugError(f"delta is {delta.dtype} {tuple(delta.shape)}, expected float32 {tuple(state.anchor.shape)}")
        lr, momentum = single(self.lr), single(self.momentum)
        shadow = OuterState(torch.empty_like(state.anchor), torch.empty_like(state.momentum))
        scratch = torch.empty(min(CHUNK_ELEMENTS, delta.numel()), dtype=torch.float32, device=delta.device)
        for first in range(0, delta.numel(), CHUNK_ELEMENTS):
            chunk = slice(first, min(first + CHUNK_ELEMENTS, delta.numel()))
            velocity, ahead = shadow.momentum[chunk], scratch[: chunk.stop - chunk.start]
            torch.mul(state.momentum[chunk], momentum, out=velocity)
            torch.add(velocity, delta[chunk], out=velocity)
            torch.mul(velocity, momentum, out=ahead)
            torch.add(ahead, delta[chunk], out=ahead)
            torch.mul(ahead, lr, out=ahead)
            torch.sub(state.anchor[chunk], ahead, out=shadow.anchor[chunk])
        return shadow

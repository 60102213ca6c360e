"""The strategies as one process does them: what replicas make of each other's gradients or parameters in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from swarm.averaging.gossip.pushing import PushSum
from swarm.averaging.strategies import Strategy
from swarm.ids import PeerId
from swarm.models.layout import FlatLayout
from swarm.optim.outer import OuterNesterov, OuterState, fragment_of


class Mixing(Protocol):
    """One run's averaging. Steps count from 1 to ``last``; tensors are (replicas, elements)."""

    def gradients(self, gradients: Tensor) -> Tensor:
        """What the optimizers get instead of their own gradients."""

    def parameters(self, params: Tensor, step: int, last: int) -> Tensor:
        """What the replicas go on from after the step."""

    def vectors(self, replicas: int, step: int, last: int) -> float:
        """What a replica sends in a step, on average, in vectors of the model's size."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The mean gradient at every replica in every step: synchronous training."""

    def gradients(self, gradients: Tensor) -> Tensor:
        """All the same."""
        return gradients.mean(0).expand_as(gradients)

    def parameters(self, params: Tensor, step: int, last: int) -> Tensor:
        """They are the same already."""
        return params

    def vectors(self, replicas: int, step: int, last: int) -> float:
        """Reduce-scatter and all-gather of all."""
        return _of_group(replicas)


@dataclass(frozen=True, slots=True)
class Grouped:
    """One round of parameters in groups after every step; every ``sync`` steps (0: never) all average instead, but not
    after the last, so that what the groups left is seen. Groups that do not ``swap`` are those of round 0 for ever."""

    strategy: Strategy
    peers: Sequence[PeerId]
    sync: int = 0
    swap: bool = True

    def gradients(self, gradients: Tensor) -> Tensor:
        """Each its own."""
        return gradients

    def parameters(self, params: Tensor, step: int, last: int) -> Tensor:
        """Means of groups, or of all."""
        mixed = torch.empty_like(params)
        for members in self._groups(step, last):
            mixed[members] = params[members].mean(0)
        return mixed

    def vectors(self, replicas: int, step: int, last: int) -> float:
        """A reduce-scatter and all-gather in each group."""
        groups = self._groups(step, last)
        return sum(len(members) * _of_group(len(members)) for members in groups) / replicas

    def _groups(self, step: int, last: int) -> list[list[int]]:
        if _all_meet(self.sync, step, last):
            return [list(range(len(self.peers)))]
        place = {peer: number for number, peer in enumerate(self.peers)}
        groups = self.strategy.groups(self.peers, 0, step - 1 if self.swap else 0, 0)
        return [[place[peer] for peer in group.members] for group in groups]


@dataclass(slots=True)
class Pushing:
    """Stochastic gradient push: half of (sum, weight) to one other after every step; all average every ``sync``."""

    strategy: PushSum
    peers: Sequence[PeerId]
    sync: int = 0
    _weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._weights = torch.ones(len(self.peers), 1)

    def gradients(self, gradients: Tensor) -> Tensor:
        """Each its own, of the parameters sum ÷ weight."""
        return gradients

    def parameters(self, params: Tensor, step: int, last: int) -> Tensor:
        """Sum ÷ weight after what was pushed has arrived; all go in step here."""
        if _all_meet(self.sync, step, last):
            return ((params * self._weights).sum(0) / self._weights.sum()).expand_as(params).clone()
        place = {peer: number for number, peer in enumerate(self.peers)}
        targets = [self.strategy.target(peer, self.peers, step - 1, 0) for peer in self.peers]
        to = torch.tensor([place[peer] for peer in targets if peer is not None])
        sums, weights = params * self._weights / 2, self._weights / 2
        arrived = sums.index_add(0, to, sums)
        self._weights = weights.index_add(0, to, weights)
        return arrived / self._weights

    def vectors(self, replicas: int, step: int, last: int) -> float:
        """One, whatever the number of replicas."""
        return _of_group(replicas) if _all_meet(self.sync, step, last) else 1.0


@dataclass(slots=True)
class Local:
    """``every`` steps alone, then the outer optimizer over the mean delta: DiLoCo. With a ``layout`` over that of one
    of ``fragments`` in turn, of which a replica goes on from the new anchor times ``weight``: Streaming DiLoCo."""

    every: int
    outer: OuterNesterov
    layout: FlatLayout | None = None
    fragments: int = 1
    weight: float = 1.0
    _state: OuterState | None = None

    @property
    def anchor(self) -> Tensor:
        """What the run would store now, (elements,)."""
        assert self._state is not None, "start() comes first"
        return self._state.anchor

    def gradients(self, gradients: Tensor) -> Tensor:
        """Each its own."""
        return gradients

    def start(self, anchor: Tensor) -> None:
        """Where all replicas begin, (elements,)."""
        self._state = OuterState.first(anchor.clone())

    def parameters(self, params: Tensor, step: int, last: int) -> Tensor:
        """The next anchor of what is averaged, when the round is over."""
        if step % self.every:
            return params
        assert self._state is not None, "start() comes first"
        (anchor, momentum), part = (self._state.anchor, self._state.momentum), self._averaged(step)
        new = self.outer.step(OuterState(anchor[part], momentum[part]), (anchor[part] - params[:, part]).mean(0))
        anchor[part], momentum[part] = new.anchor, new.momentum
        after = params.clone()
        after[:, part] = torch.lerp(params[:, part], new.anchor.expand_as(params[:, part]), self.weight)
        return after

    def vectors(self, replicas: int, step: int, last: int) -> float:
        """As `everyone`, once a round, of what is averaged."""
        if step % self.every:
            return 0.0
        part = self._averaged(step)
        share = 1.0 if self.layout is None else (part.stop - part.start) / self.layout.elements
        return share * _of_group(replicas)

    def _averaged(self, step: int) -> slice:
        return slice(None) if self.layout is None else fragment_of(self.layout, self.fragments, step // self.every)


def _all_meet(sync: int, step: int, last: int) -> bool:
    return bool(sync) and step % sync == 0 and step != last


def _of_group(members: int) -> float:
    """Vectors that one member sends: its parts to their reducers, the part it reduced to the others."""
    return 2 * (members - 1) / members

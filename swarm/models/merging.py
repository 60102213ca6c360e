"""Models that sites trained apart from one base, as one: each tensor a weighted sum of theirs and the base's.

With θ₀ of the base and θᵢ of the sites a merged tensor is θ₀ + Σ λᵢ·(θᵢ − θ₀), task arithmetic (Ilharco et al., arXiv
2212.04089), written as (1 − Σ λᵢ)·θ₀ + Σ λᵢ·θᵢ, so that a site with all the weight is itself, bit for bit. Linear
merging has λᵢ = rᵢ, the preference, whose sum is 1. :func:`learn` finds a λ for each tensor and site that minimises
Σ rᵢ·Lᵢ, the sites' losses by preference, after weight-ensembling mixture of experts (Tang et al., arXiv 2406.09770).
There a router gives λ for every preference; here λ is learnt for the one that is asked for, which costs the same and
came out better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.models.family import PartModule
from swarm.models.layout import install_weights
from swarm.models.packing import packed

STEPS, RATE = 60, 0.05
"""Of Adam, whose rate falls to nothing."""
TOKENS_AT_ONCE = 1024
"""Of each site's text in a step; a row where that is longer."""

Shares = Mapping[str, Sequence[float]]
"""By tensor: what the base and then each site weigh, 1 together."""


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """Rows of a text: int64 (rows, T) tokens, targets (-1: none) and, of packed rows, positions in the documents."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None

    def take(self, numbers: Tensor | slice) -> TextRows:
        """Return some of them."""
        positions = None if self.positions is None else self.positions[numbers]
        return TextRows(self.inputs[numbers], self.targets[numbers], positions)

    def loss(self, model: PartModule) -> Tensor:
        """Return a whole model's mean cross entropy in nats."""
        with packed(self.positions):
            total, count = model.loss(model(self.inputs), self.targets)
        return total / max(1, count)


def linear(names: Collection[str], preference: Sequence[float]) -> Shares:
    """Return the shares that are the preference itself in every tensor: the base has none."""
    return dict.fromkeys(names, (0.0, *preference))


def add_share(total: dict[str, Tensor], weights: Mapping[str, Tensor], shares: Shares, number: int) -> None:
    """Add what a model brings to a merged one: the base is number 0, the sites follow. All in this order give the
    merged model, on any device with its own bits."""
    for name, tensor in weights.items():
        share = shares[name][number]
        if share == 0.0:
            continue
        if name in total:
            total[name].add_(tensor, alpha=share)
        else:
            total[name] = tensor * share


def weighed(models: Sequence[Mapping[str, Tensor]], shares: Shares) -> dict[str, Tensor]:
    """Return the merge of a base and its sites."""
    total = dict[str, Tensor]()
    for number, weights in enumerate(models):
        add_share(total, weights, shares, number)
    return total


def learning_bytes(elements: int, sites: int) -> int:
    """Return what :func:`learn` holds for a model of so many elements: base and sites, a merge, and its gradient or the
    next merge, in float32. What a microbatch takes comes on top."""
    return 4 * elements * (sites + 3)


def learn(
    model: PartModule,
    models: Sequence[Mapping[str, Tensor]],
    preference: Sequence[float],
    texts: Sequence[TextRows],
    told: Callable[[int], None],
) -> dict[str, tuple[float, ...]]:
    """Learn the shares of a base and its sites for a preference.

    Args:
        model: The whole model, which is left with weights of the last step.
        models: Base and sites, on one device.
        preference: What each site's loss weighs.
        texts: A text of each site's kind, that it was not trained on; as many rows as there are.
        told: Called before each step with its number.
    """
    base, *sites = models
    names, chance = list(base), torch.Generator().manual_seed(0)
    scales = torch.tensor(preference)[:, None].repeat(1, len(names)).requires_grad_()
    adam = torch.optim.Adam([scales], RATE)
    for step in range(STEPS):
        told(step)
        install_weights(model, weighed(models, _shares(names, scales)), requires_grad=True)
        for weight, text in zip(preference, texts, strict=True):
            (weight * _some(text, chance).loss(model)).backward()  # type: ignore[no-untyped-call]
        scales.grad = _gradient(model, names, base, sites)
        model.zero_grad()  # the next merge takes the memory of this one's gradient
        adam.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        adam.step()
    return _shares(names, scales)


def _shares(names: Sequence[str], scales: Tensor) -> dict[str, tuple[float, ...]]:
    of_each = zip(names, scales.detach().T.tolist(), strict=True)
    return {name: (1.0 - math.fsum(found), *found) for name, found in of_each}


def _some(text: TextRows, chance: torch.Generator) -> TextRows:
    rows, length = text.inputs.shape
    return text.take(torch.randint(rows, (max(1, TOKENS_AT_ONCE // length),), generator=chance))


def _gradient(
    model: PartModule, names: Sequence[str], base: Mapping[str, Tensor], sites: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Return that of the scales (sites, tensors): the merged tensor's along each site's change. None reaches a buffer,
    whose scale stays."""
    parameters, found = dict(model.named_parameters()), torch.zeros(len(sites), len(names))
    for column, name in enumerate(names):
        gradient = parameters[name].grad if name in parameters else None
        if gradient is not None:
            for row, site in enumerate(sites):
                found[row, column] = (gradient.float() * (site[name] - base[name])).sum()
    return found

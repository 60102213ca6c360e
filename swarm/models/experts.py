"""A layer of several experts: each token passes those few that the layer's router finds likeliest.

After the Switch Transformer (Fedus et al., arXiv 2101.03961): what an expert answers is weighed with its probability,
by which the router learns, and in training an expert has room for its even share of a microbatch's tokens and some
more. A token that finds none there, in the order of rows, passes the layer unchanged.

What a step has to know of all its microbatches are counts of tokens. They travel as gradients of parameters that no
loss depends on, the *tallies*: so they are added, taken out again, averaged and computed anew with the gradients, once
for each microbatch. A token counts :data:`TALLY`, so little that a gradient's norm has at most its last digit from it.
Sums of it are exact to 2²⁴ tokens in float32, and in float64 on the grid of reproducible runs.

Shapes: B microbatch, T sequence, D width, N = B·T tokens, E experts, k experts that a token passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarm.errors import BugError
from swarm.models.balance import balance_loss, with_loss
from swarm.models.exchange import ask_experts
from swarm.models.family import PartModule, Work
from swarm.models.gpt_config import GptConfig
from swarm.models.spec import ModelConfig, PartSpec

TALLY = 2.0**-30
"""What one token counts in a tally's gradient."""
STEERED, TOLD = ".feed_forward.bias", ".feed_forward.crowding"
"""The ends of tallies' names: of what experts got, and of how many choices found no room."""


class Experts(nn.Module):
    """The experts of one layer, or where others hold them none, and their router, which is float32.

    ``bias`` (E,), where a step steers by it, is added to what ranks the experts and to nothing else: experts that got
    less than the others become likelier (Wang et al., arXiv 2408.15664). Its gradient are the tokens that chose each.
    That of ``crowding`` (2,), where room is limited, are the choices that found none, and all choices.
    """

    def __init__(self, model: GptConfig, layer: int, make: Callable[[], nn.Module] | None) -> None:
        """``layer`` is counted over all stages. ``make`` makes an expert: a module (…, D) → (…, D) that treats each
        token by itself; None where others hold them."""
        super().__init__()
        self._model, self._layer = model, layer
        self.router = nn.Linear(model.dim, model.experts, bias=False, dtype=torch.float32)
        self.experts = None if make is None else nn.ModuleDict({str(at): make() for at in range(model.experts)})
        self.bias = nn.Parameter(_none(model.experts)) if model.steering else None
        self.crowding = nn.Parameter(_none(2)) if model.capacity else None

    def forward(self, x: Tensor, limited: bool, weight: float) -> Tensor:
        """(B, T, D) → (B, T, D).

        Args:
            x: What the layer is given.
            limited: Whether room is: in training, where the model has a ``capacity``.
            weight: Of the balance loss, whose gradient backward adds.
        """
        tokens, used = x.reshape(-1, x.shape[-1]), self._model.top_k
        scores = self.router(tokens.float())  # (N, E)
        likely = scores.softmax(-1)
        ranked = likely if self.bias is None else likely + self.bias
        chosen = ranked.detach().topk(used, dim=-1).indices  # (N, k)
        found = chosen.view(-1).bincount(minlength=self._model.experts)  # (E,)
        index = _with_room(chosen, found, self._model.room(len(tokens))) if limited else chosen
        gates = likely.gather(1, chosen)
        if self.experts is None:
            output = ask_experts(self._layer, tokens, index, gates)
        else:
            output = mixed(self.experts, self._model.experts, tokens, index, gates)
        if weight:
            output = with_loss(output, weight * balance_loss(scores, used))
        if self.bias is not None:
            output = _Tallied.apply(output, self.bias, found)  # type: ignore[no-untyped-call]
        if self.crowding is not None:
            counts = torch.stack(((index == self._model.experts).sum(), found.sum()))
            output = _Tallied.apply(output, self.crowding, counts)  # type: ignore[no-untyped-call]
        return output.view_as(x)


def _with_room(chosen: Tensor, found: Tensor, room: int) -> Tensor:
    """Return the choices (N, k) with the number of experts in place of those that find no room: for an expert's choices
    it is had in the order of rows."""
    by_expert = chosen.view(-1).argsort(stable=True)
    begin = found.cumsum(0) - found
    place = torch.arange(len(by_expert), device=chosen.device) - begin.repeat_interleave(found)
    index = chosen.view(-1).clone()
    index[by_expert[place >= room]] = len(found)
    return index.view_as(chosen)


def mixed(experts: nn.ModuleDict, number: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what experts make of rows (N, D), weighted and added up in the order of experts: (N, D).

    Args:
        experts: By their numbers, in order; perhaps not all of them.
        number: How many there are. A choice of this number, and one of an expert that is not here, adds nothing.
        hidden: (N, D).
        index: int64 (N, k).
        weights: float32 (N, k).
    """
    used, choices = index.shape[1], index.reshape(-1)
    gates = weights.to(hidden.dtype).view(-1, 1)  # (N·k, 1)
    by_expert = choices.argsort(stable=True)  # an expert's choices in the order of rows
    counts = choices.bincount(minlength=number + 1).tolist()
    begins = [0, *accumulate(counts)]
    output = torch.zeros_like(hidden)
    for name, expert in experts.items():
        taken = by_expert[begins[int(name)] : begins[int(name) + 1]]
        rows = taken.div(used, rounding_mode="floor")
        answer = expert(hidden.index_select(0, rows)) * gates.index_select(0, taken)
        output.index_add_(0, rows, answer)  # no row twice: one order, on a GPU too
    return output


class ExpertShard(PartModule):
    """Some of the experts of each layer of a stage, the same of each: one parameter, or few, an expert.

    They have the names that they have in a stage that holds them itself. What it computes of a row depends on that row,
    and on which rows have the same expert: a shard's answer is the same bits at every replica.
    """

    def __init__(self, model: ModelConfig, layers: Mapping[int, str]) -> None:
        """``layers`` are those of the whole model that have experts, with the path of these in the part."""
        super().__init__(model)
        self._paths = dict(layers)

    def forward(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """Return what this shard adds to the rows that have an expert of it.

        Args:
            layer: Of the whole model, counted from 0.
            hidden: (N, D).
            index: int64 (N, k), of which others' experts and no experts count for nothing.
            weights: float32 (N, k).

        Returns:
            (N, D) in the dtype of ``hidden``.
        """
        raise NotImplementedError

    def experts_of(self, layer: int) -> nn.Module:
        """Return the module that has the experts of a layer. Raises BugError where it has none."""
        if layer not in self._paths:
            raise BugError(f"layer {layer} has no experts here")
        return self.get_submodule(self._paths[layer])

    def of_layer(self, layer: int) -> dict[str, nn.Parameter]:
        """Return the parameters of one layer's experts by name."""
        inside = self.experts_of(layer)
        return {f"{self._paths[layer]}.{name}": parameter for name, parameter in inside.named_parameters()}

    def parameters_of(self, work: Work) -> dict[str, nn.Parameter]:
        """See :meth:`~swarm.models.family.PartModule.parameters_of`."""
        return dict(self.named_parameters()) if work == "forward" else {}

    def put(self, path: str, module: nn.Module) -> None:
        """Have a module at a path, with empty ones above it."""
        above: nn.Module = self
        *names, last = path.split(".")
        for name in names:
            if name not in above._modules:
                above.add_module(name, nn.Module())
            above = above.get_submodule(name)
        above.add_module(last, module)


class GptShard(ExpertShard):
    """A shard of our own model's experts."""

    def __init__(self, model: GptConfig, spec: PartSpec, make: Callable[[], nn.Module]) -> None:
        numbers = spec.experts_of(model.experts)
        layers = filter(model.has_experts, range(spec.first_layer, spec.last_layer))
        super().__init__(model, {layer: f"blocks.{layer}.feed_forward.experts" for layer in layers})
        self._number = model.experts
        for path in self._paths.values():
            self.put(path, nn.ModuleDict({str(number): make() for number in numbers}))

    def forward(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """See :class:`ExpertShard`."""
        experts = self.experts_of(layer)
        assert isinstance(experts, nn.ModuleDict)  # noqa: S101 - put there
        return mixed(experts, self._number, hidden, index, weights)


class _Tallied(torch.autograd.Function):
    """A tensor unchanged, with counts that become the gradient of a tally."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tally: Tensor, counts: Tensor) -> Tensor:
        """Remember the counts."""
        ctx.counts = counts
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        """Hand them on."""
        return grad_output, ctx.counts.float() * TALLY, None


def _none(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float32)

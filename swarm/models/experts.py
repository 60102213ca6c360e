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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarm.models.balance import balance_loss, with_loss
from swarm.models.gpt_config import GptConfig

TALLY = 2.0**-30
"""What one token counts in a tally's gradient."""
STEERED, TOLD = ".feed_forward.bias", ".feed_forward.crowding"
"""The ends of tallies' names: of what experts got, and of how many choices found no room."""


class Experts(nn.Module):
    """The experts of one layer and their router, which is float32.

    ``bias`` (E,), where a step steers by it, is added to what ranks the experts and to nothing else: experts that got
    less than the others become likelier (Wang et al., arXiv 2408.15664). Its gradient are the tokens that chose each.
    That of ``crowding`` (2,), where room is limited, are the choices that found none, and all choices.
    """

    def __init__(self, model: GptConfig, make: Callable[[], nn.Module]) -> None:
        """``make`` makes an expert: a module (…, D) → (…, D) that treats each token by itself."""
        super().__init__()
        self._model = model
        self.router = nn.Linear(model.dim, model.experts, bias=False, dtype=torch.float32)
        self.experts = nn.ModuleDict({str(number): make() for number in range(model.experts)})
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
        gates = likely.gather(1, chosen).to(x.dtype).view(-1, 1)  # (N·k, 1)
        by_expert = chosen.view(-1).argsort(stable=True)  # an expert's choices in the order of rows
        found = chosen.view(-1).bincount(minlength=self._model.experts)  # (E,)
        room = self._model.room(len(tokens)) if limited else len(tokens)
        output, begin, turned_away = torch.zeros_like(tokens), 0, 0
        for expert, count in zip(self.experts.values(), found.tolist(), strict=True):
            taken = by_expert[begin : begin + min(count, room)]
            rows = taken.div(used, rounding_mode="floor")
            answer = expert(tokens.index_select(0, rows)) * gates.index_select(0, taken)
            output.index_add_(0, rows, answer)  # no row twice: one order, on a GPU too
            begin, turned_away = begin + count, turned_away + max(0, count - room)
        if weight:
            output = with_loss(output, weight * balance_loss(scores, used))
        for tally, counts in ((self.bias, found), (self.crowding, found.new_tensor([turned_away, begin]))):
            if tally is not None:
                output = _Tallied.apply(output, tally, counts)  # type: ignore[no-untyped-call]
        return output.view_as(x)


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

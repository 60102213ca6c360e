"""Cross entropy over vocabularies so large that a microbatch's logits would not fit beside everything else.

Eight rows of 2,048 tokens over 128,000 words have 8.4 GB of logits in float32, and as much in gradients. So logits are
made a piece at a time, :data:`LOGITS_AT_ONCE` of them, and a piece's gradients are taken before the next one is made.
What is cut follows from shapes alone, so every replica gets the same bits; what fits into one piece is not cut at all.

Shapes: B microbatch, T sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarm.errors import BugError

LOGITS_AT_ONCE = 1 << 25
"""134 MB in float32, and some three times as much with what their gradient takes. More than 8 rows of 256 tokens over
8,192 words have, less than 2 rows of 1,024 over 50,257. At a vocabulary of 128,000 a piece still has 256 tokens: enough
that the head's weights are not what it waits for. Changing it changes the bits of large runs."""

_IGNORED = -100

Piece = tuple[slice, slice]
"""Which rows, and which tokens of each."""
Logits = Callable[[Tensor], Tensor]


def pieces(rows: int, sequence: int, vocab_size: int) -> list[Piece]:
    """Cut (B, T) into the fewest pieces of at most :data:`LOGITS_AT_ONCE` logits: whole rows where one fits, else equal
    stretches of each row. One piece is everything."""
    tokens = max(1, LOGITS_AT_ONCE // vocab_size)
    if rows * sequence <= tokens:
        return [(slice(0, rows), slice(0, sequence))]
    at_once = max(1, tokens // sequence)
    stretch = sequence if sequence <= tokens else -(-sequence // -(-sequence // tokens))
    return [
        (slice(row, min(row + at_once, rows)), slice(at, min(at + stretch, sequence)))
        for row in range(0, rows, at_once)
        for at in range(0, sequence, stretch)
    ]


def cross_entropy(logits: Logits, hidden: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the sum of cross entropy in nats, float32, of hidden states (B, T, D) over the targets (B, T) ≥ 0. Holds
    all logits at once until backward is done."""
    labels = targets.masked_fill(targets < 0, _IGNORED).reshape(-1)
    scores = logits(hidden).view(-1, vocab_size)
    return F.cross_entropy(scores, labels, ignore_index=_IGNORED, reduction="sum")


def cross_entropy_in_pieces(
    part: Callable[[Tensor, Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    parameters: Sequence[nn.Parameter],
    cut: Sequence[Piece],
) -> Tensor:
    """Return the sum of ``part`` over the pieces of ``hidden`` (B, T, D) and ``targets`` (B, T): of what a loss says of
    each piece, which needs no other piece and no parameters but these.

    Where gradients are wanted they are taken here, so that backward has nothing left to do: those of the parameters are
    summed in float32, one more tensor of each parameter's size, and rounded once to its dtype. For one backward.
    """
    if not torch.is_grad_enabled():
        return torch.stack([part(hidden[piece], targets[piece]) for piece in cut]).sum()
    total: Tensor = _InPieces.apply(part, targets, cut, hidden, *parameters)  # type: ignore[no-untyped-call]
    return total


class _InPieces(torch.autograd.Function):
    """See :func:`cross_entropy_in_pieces`."""

    @staticmethod
    def forward(ctx: Any, part: Any, targets: Tensor, cut: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """Take loss and gradients, piece by piece."""
        losses, gradient = [], torch.empty_like(hidden)
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        for piece in cut:
            inputs = hidden[piece].detach().requires_grad_()
            with torch.enable_grad():
                loss = part(inputs, targets[piece])
            gradient[piece], *found = torch.autograd.grad(loss, (inputs, *parameters))
            for total, one in zip(sums, found, strict=True):
                total.add_(one)
            losses.append(loss.detach())
        ctx.found, ctx.dtypes = (gradient, sums), [parameter.dtype for parameter in parameters]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> Any:
        """Scale what was found. A factor of 1 changes no bit."""
        if ctx.found is None:
            raise BugError("the loss was used for a second backward")
        (gradient, sums), ctx.found = ctx.found, None
        rounded: list[Tensor] = []
        while sums:  # one after the other: not all of them twice
            rounded.append(sums.pop(0).mul_(grad_total).to(ctx.dtypes[len(rounded)]))
        return None, None, None, gradient.mul_(grad_total), *rounded

"""The loss that keeps a mixture's experts evenly used: of each layer by itself, so that no cut changes it.

A layer's loss depends on what its own router answers, so the stage that has the layer adds its gradient, and nothing of
it crosses a boundary. It weighs as much as the microbatch's cross entropy: a sum over target tokens, of which the stage
is told how many there are (:func:`weighed`).

Shapes: N tokens of a microbatch, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_targets: ContextVar[int] = ContextVar("targets", default=0)


@contextlib.contextmanager
def weighed(targets: int) -> Iterator[None]:
    """Have what this thread computes be of a microbatch with so many targets that count."""
    before = _targets.set(targets)
    try:
        yield
    finally:
        _targets.reset(before)


def targets_counted() -> int:
    """Return how many targets count of the microbatch that this thread computes; 0 where nobody said."""
    return _targets.get()


def balance_loss(logits: Tensor, used: int) -> Tensor:
    """Return how unevenly a layer's experts are used: ``used`` where they are evenly (Fedus et al., arXiv 2101.03961,
    equations 4 to 6, for more than one expert a token).

    Args:
        logits: The router's, (N, E).
        used: Experts that a token goes to.
    """
    scores = logits.float()
    chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(used, dim=-1).indices, 1.0)
    return scores.shape[-1] * (chosen.mean(0) * scores.softmax(-1).mean(0)).sum()


def balanced(compute: Callable[[Tensor], Tensor], router: nn.Module, weight: float, hidden: Tensor) -> Tensor:
    """Return ``compute(hidden)``, which runs ``router`` once. Its backward adds the gradient of ``weight`` times the
    router's balance loss, whatever it is given."""
    answers: list[Any] = []
    hook = router.register_forward_hook(lambda _module, _args, answer: answers.append(answer))
    try:
        output = compute(hidden)
    finally:
        hook.remove()
    (answer,) = answers
    return with_loss(output, weight * balance_loss(answer[0], int(router.top_k)))  # type: ignore[arg-type]


def with_loss(output: Tensor, loss: Tensor) -> Tensor:
    """Return a tensor unchanged. Its backward adds the gradient of the loss, whatever it is given."""
    beside: Tensor = _Beside.apply(output, loss)  # type: ignore[no-untyped-call]
    return beside


class _Beside(torch.autograd.Function):
    """A tensor unchanged, with a loss whose gradient its backward adds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        """Remember nothing but what kind of number the loss is."""
        ctx.one = torch.ones_like(loss)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """The loss is a sum of its own."""
        return grad_output, ctx.one

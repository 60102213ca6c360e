"""Activation checkpointing: of a layer keep what went in, and compute the rest again in the backward.

A graph then holds one hidden state a layer in place of some twenty, for about 1.4 times the time. The gradients are the
same, bit for bit: what a layer answers follows from its input, its weights, the microbatch's seed and where documents
begin, and all of these are what they were. So each peer may choose for itself, and anew for each microbatch.

Not ``torch.utils.checkpoint``: it imports torch's compiler, three seconds and 800 modules, and its second pass would
use the weights that are installed by then.

Shapes: B microbatch, T sequence, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarm.models.dropout import dropping, seed_of_drops
from swarm.models.packing import packed, packed_positions

Compute = Callable[[Tensor], Tensor]


def recomputed(layer: nn.Module, compute: Compute, hidden: Tensor) -> Tensor:
    """Return ``compute(hidden)``, (B, T, D) → (B, T, D), which runs ``layer`` and depends on no other weights, with a
    graph that keeps only ``hidden``. For one backward, which costs the forward once more, and raises RuntimeError where
    the layer's weights were changed in place since."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    output: Tensor = _Recomputed.apply(AsItWas(layer), compute, hidden, *trained)  # type: ignore[no-untyped-call]
    return output


class AsItWas:
    """The tensors that a layer has, how rows are packed and what is dropped when this is made. While it is entered they
    are so again, in the thread that entered: weights may have been installed since, and backward has a thread of
    its own on a GPU. Raises RuntimeError where one was changed in place."""

    def __init__(self, layer: nn.Module) -> None:
        tables = [table for module in layer.modules() for table in (module._parameters, module._buffers)]
        self._tensors: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables if table]
        self._positions, self._seed, self._versions = packed_positions(), seed_of_drops(), self._count_changes()

    def _count_changes(self) -> int:
        return sum(one._version for _, values in self._tensors for one in values.values() if one is not None)

    def __enter__(self) -> None:
        if self._count_changes() != self._versions:
            raise RuntimeError("a weight that is needed to compute a layer again was modified by an inplace operation")
        self._now = [(table, dict(table)) for table, _ in self._tensors]
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(packed(self._positions))
        self._inside.enter_context(dropping(self._seed))
        self._put(self._tensors)

    def __exit__(self, *_: object) -> None:
        self._put(self._now)
        self._inside.close()

    @staticmethod
    def _put(tensors: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for table, values in tensors:
            table.update(values)


class _Recomputed(torch.autograd.Function):
    """See :func:`recomputed`."""

    @staticmethod
    def forward(ctx: Any, then: AsItWas, compute: Compute, hidden: Tensor, *trained: Tensor) -> Tensor:
        """Compute as if for a graph, since kernels may be chosen by whether one is wanted, and let it go."""
        with torch.enable_grad():
            output = compute(hidden.detach().requires_grad_(hidden.requires_grad))
        ctx.save_for_backward(hidden)
        ctx.then, ctx.compute, ctx.trained = then, compute, trained
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Compute again, with a graph, and go back through that."""
        (hidden,) = ctx.saved_tensors
        again = hidden.detach().requires_grad_(hidden.requires_grad)
        with torch.enable_grad(), ctx.then:
            output = ctx.compute(again)
        wanted = [again, *ctx.trained] if hidden.requires_grad else list(ctx.trained)
        found = torch.autograd.grad(output, wanted, grad_output, allow_unused=True)
        return None, None, *(found if hidden.requires_grad else (None, *found))

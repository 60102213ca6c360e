"""Linear layers of which a run trains and keeps some weights alone: in each row as many, the *survivors*.

Which they are follows from the weight's name and shape: a row's inputs are cut into as many runs of neighbours as it
has survivors, and a hash draws one of each. So no peer sends and no checkpoint keeps where they stand, and a run that
is resumed with another seed has the same. The layer's weight is (O, k): what trains, averages, copies and stores it
knows nothing else. The whole matrix, with zeros in all other places, is made for a pass and again for its backward, and
never held.

Shapes: O and I widths of a layer's output and input, k survivors of a row.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from swarm.models.dropout import hashed


def survivors(inputs: int, sparsity: float) -> int:
    """Return how many weights of a row of so many inputs are trained."""
    return max(1, round((1.0 - sparsity) * inputs))


def make_sparse(module: Any, name: str, sparsity: float) -> None:
    """Have a linear module without bias, on the meta device, train survivors alone. It stays what it is, so that
    whatever looks at it finds it.

    Args:
        module: The module.
        name: Of its weight in the whole model.
        sparsity: The share of its weights that are none.
    """
    rows, inputs = module.weight.shape
    shape = (rows, survivors(inputs, sparsity))
    module.weight = nn.Parameter(torch.empty(shape, dtype=module.weight.dtype, device="meta"))
    module.drawn_by = name
    module.register_buffer("drawn", None, persistent=False)
    module.forward = partial(_forward, module)  # no function of its own: a copy must use its own weight


def spread(name: str, weight: Tensor, inputs: int) -> Tensor:
    """Return the whole matrix (O, I) of the survivors (O, k) of this name."""
    return _whole(weight, _draw(name, weight, inputs), inputs)


def _forward(module: Any, x: Tensor) -> Tensor:
    if module.drawn is None:  # once, and where it is needed: building a part costs no memory
        module.drawn = _draw(module.drawn_by, module.weight, module.in_features)
    output: Tensor = _SparseLinear.apply(x, module.weight, module.drawn, module.in_features)  # type: ignore[no-untyped-call]
    return output


class _SparseLinear(torch.autograd.Function):
    """x·Wᵀ; the gradient of W is that of a whole matrix, of which survivors alone are looked at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, drawn: Tensor, inputs: int) -> Tensor:
        """Keep the survivors alone."""
        ctx.save_for_backward(x, weight, drawn)
        return linear(x, _whole(weight, drawn, inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradients of input and survivors."""
        x, weight, drawn = ctx.saved_tensors
        inputs, of_input, of_weight = x.shape[-1], None, None
        if ctx.needs_input_grad[0]:
            of_input = grad.matmul(_whole(weight, drawn, inputs))
        if ctx.needs_input_grad[1]:
            whole = grad.reshape(-1, grad.shape[-1]).t().mm(x.reshape(-1, inputs))
            of_weight = whole.gather(1, _columns(drawn, inputs))
        return of_input, of_weight, None, None


def _draw(name: str, weight: Tensor, inputs: int) -> Tensor:
    """Return of each survivor its place in its run of neighbours, uint8 (O, k): runs are short, for the largest
    sparsity is .99."""
    begins = _begins(weight, inputs)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    drawn = hashed(weight.numel(), key, weight.device).view(weight.shape)
    return (drawn * begins.diff() >> 32).to(torch.uint8)


def _columns(drawn: Tensor, inputs: int) -> Tensor:
    """int64 (O, k)"""
    return _begins(drawn, inputs)[:-1] + drawn


def _begins(of: Tensor, inputs: int) -> Tensor:
    """Where the runs of a row's inputs begin, and its end: (k + 1,), as even as they go."""
    kept = of.shape[1]
    return torch.arange(kept + 1, device=of.device) * inputs // kept


def _whole(weight: Tensor, drawn: Tensor, inputs: int) -> Tensor:
    return weight.new_zeros(weight.shape[0], inputs).scatter_(1, _columns(drawn, inputs), weight)

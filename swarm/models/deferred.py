"""The weight gradients of linear layers, computed later than what the stage before waits for.

Half of a linear layer's backward is the gradient of its input, half that of its weight, which nobody waits for. While a
forward is recorded (:class:`LinearRecorder`), a linear layer's weight takes no part in its graph; going back through
that, each output's gradient is noted beside the input that the layer had. :class:`DeferredGradients` makes of both what
autograd would have made: by the same product, so with the same bits.

Recorded are the linear modules of any family, and adapters, where their weight is trained. What is not (norms, tables,
biases, layers whose activations are computed again, another device than a CPU or CUDA) is differentiated at once.

Shapes: N tokens of a microbatch, I and O widths of a layer's input and output.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from swarm.errors import BugError

Gradients = list[tuple[str, Tensor]]
"""One microbatch's gradient of the loss sum: (parameter name, tensor in the parameter's dtype). Lists of several
passes of one microbatch are joined, and :func:`~swarm.models.passes.summed`, to make a part's whole gradient."""

_DEVICES = ("cpu", "cuda")
"""Where a linear layer's backward is known to be two products."""


class LinearPass(NamedTuple):
    """One use of a layer: its weight's name, its input (..., I), and the gradient of its output (..., O)."""

    name: str
    input: Tensor
    grad_output: Tensor

    def weight_gradient(self) -> Tensor:
        """(O, I): the product that autograd computes."""
        x, grad = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (self.input, self.grad_output))
        return grad.t().mm(x)


class LinearRecorder:
    """While it is entered, in the thread that entered, linear layers with one of these weights are recorded.

    ``passes`` has, after the backward, each use of a layer, in the order in which the backward came by.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in trained.items()}
        self.passes: list[LinearPass] = []

    @classmethod
    def of(cls, part: nn.Module, trained: Mapping[str, nn.Parameter]) -> LinearRecorder:
        """Return one for a forward of this part, whose linear modules can be recorded from now on."""
        if "linears_recorded" not in part.__dict__:
            for module in part.modules():
                if type(module) is nn.Linear and "forward" not in module.__dict__:
                    module.__dict__["forward"] = partial(_linear_forward, module)
            part.__dict__["linears_recorded"] = True
        return cls(trained)

    def __enter__(self) -> None:
        self._token = _recorder.set(self)

    def __exit__(self, *_: object) -> None:
        _recorder.reset(self._token)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output; see :func:`recorded_linear`."""
        name = self._names.get(id(weight))
        # A kernel is chosen by the strides of what comes in, and may be by whether the weight wants a gradient.
        plain = x.requires_grad and x.dim() > 1 and x.is_contiguous() and x.device.type in _DEVICES
        if name is None or not plain:
            return linear(x, weight, bias)
        output = linear(x, weight.detach(), bias)
        if output.requires_grad:
            output.register_hook(partial(self._came_by, name, x.detach(), x._version))  # type: ignore[no-untyped-call]
        return output

    def _came_by(self, name: str, x: Tensor, version: int, grad_output: Tensor) -> None:
        if x._version != version:
            raise BugError(f"what went into the layer of {name} was changed in place")
        self.passes.append(LinearPass(name, x, grad_output))


_recorder: ContextVar[LinearRecorder | None] = ContextVar("recorder", default=None)


def recorded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` (..., I) → (..., O) as :func:`torch.nn.functional.linear` does, recorded where that is wanted."""
    recorder = _recorder.get()
    return linear(x, weight, bias) if recorder is None else recorder.linear(x, weight, bias)


def _linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return recorded_linear(x, module.weight, module.bias)


class DeferredGradients:
    """What is left of a backward: ``found`` are the gradients that are there, ``passes`` give the rest.

    Holds the inputs and the outputs' gradients of linear layers, and neither graph nor weights.
    """

    def __init__(self, names: tuple[str, ...], found: Mapping[str, Tensor], passes: list[LinearPass]) -> None:
        self._names, self._found, self._passes = names, found, passes
        tensors = [*found.values(), *(tensor for one in passes for tensor in one[1:])]
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
        self.bytes = sum(storages.values())
        """Of memory that it holds, some of which others may hold, too."""

    def finish(self) -> Gradients:
        """Compute the rest; return all, in the order of the part's parameters. Spends this, whose tensors are freed.

        Raises BugError where a parameter took no part in the forward, or this was spent. Cost: a product for each pass.
        """
        found, passes = dict(self._found), self._passes
        self._found, self._passes = {}, []
        passes.reverse()
        while passes:
            one = passes.pop()
            gradient = one.weight_gradient()
            found[one.name] = found[one.name] + gradient if one.name in found else gradient
        if lacking := [name for name in self._names if name not in found]:
            raise BugError(f"{lacking[0]} has no gradient")
        return [(name, found[name]) for name in self._names]

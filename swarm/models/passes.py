"""One microbatch through one part, forward and backward, with its gradient kept apart from all others.

Half of a linear layer's backward is the gradient of its input, half that of its weight, which nobody waits for. While a
forward is recorded (:class:`LinearRecorder`), the weight takes no part in the graph; going back through that, each
output's gradient is noted beside the input that the layer had. :class:`DeferredGradients` makes of both what autograd
would have made: by the same product, so with the same bits. Recorded are the linear modules of any family, and
adapters, where their weight is trained. What is not (norms, tables, biases, layers whose activations are computed
again, another device than a CPU or CUDA) is differentiated at once.

Shapes: B microbatch, T sequence, D model width, N tokens, I and O widths of a layer's input and output. Everything here
is synchronous and belongs on the device thread. The result of a backward is that of the same operations in one process:
cutting a graph at a boundary changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from swarm.errors import BugError, Violation
from swarm.models.exchange import CutGraph, Dispatch, Steps, cutting
from swarm.models.experts import ExpertShard
from swarm.models.family import PartModule
from swarm.models.layout import aligned
from swarm.models.suspend import suspended

T = TypeVar("T")

Gradients = list[tuple[str, Tensor]]
"""One microbatch's gradient of the loss sum: (parameter name, tensor in the parameter's dtype). Lists of several
passes of one microbatch are joined, and :func:`summed`, to make a part's whole gradient."""

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


class Bound(NamedTuple):
    """The ``most`` that one microbatch's gradients of a part may be long, and the length of the gradient that they were
    computed from, as it ``arrived``; 0 where none did. L2 norms."""

    most: float
    arrived: float = 0.0


@dataclass(slots=True, eq=False)
class Graph:
    """The state that a forward leaves for its backward: activations and the very parameters that were used.

    It stays right when the part swaps to new weights, and is spent by one :func:`run_backward`. Dropping it frees
    the activations.
    """

    output: Tensor | None
    input: Tensor | None
    parameters: dict[str, nn.Parameter]
    linears: LinearRecorder | None = None
    cut: CutGraph | None = None
    gates: Tensor | None = None


def run_forward(
    module: PartModule, x: Tensor, *, seed: int | None, graph: bool, defers: bool = False
) -> tuple[Tensor, Graph | None]:
    """Hidden (B, T, D), or tokens (B, T) where the embedding is, → (B, T, D), and the graph when asked for.

    ``defers``: the graph's weight gradients may be computed later, see :func:`run_backward_input`. Raises Violation for
    a token id outside the vocabulary, which on CUDA would otherwise kill the whole process.
    """
    x = _enter(module, x)
    if not graph:
        with torch.no_grad():
            return module(x, seed), None
    inputs, trained = _leaf(x), _trained(module.trained_of("forward"))
    linears = LinearRecorder.of(module, trained) if defers else None
    cut = CutGraph(inputs) if module.asks else None
    with linears or nullcontext(), cutting(cut):
        output: Tensor = module(x if inputs is None else inputs, seed)
    return output.detach(), Graph(output, inputs, trained, linears, _finished(cut, output))


def run_loss(
    module: PartModule, x: Tensor, targets: Tensor, *, seed: int | None, graph: bool
) -> tuple[float, int, Graph | None]:
    """A last stage with head: its forward, then (loss sum in nats, targets counted, graph).

    ``targets`` int64 (B, T), below 0 not counted. Raises Violation for ids outside the vocabulary.
    """
    x, targets = _enter(module, x), _checked(module, targets)
    inputs = _leaf(x) if graph else None
    cut = CutGraph(inputs) if graph and module.asks else None
    with torch.set_grad_enabled(graph), cutting(cut):
        total, count = module.loss(module(x if inputs is None else inputs, seed), targets)
    kept = Graph(total, inputs, _trained(module.trained_of()), cut=_finished(cut, total)) if graph else None
    return total.item(), count, kept


def forward_steps(
    module: PartModule, x: Tensor, *, seed: int | None, graph: bool, defers: bool = False
) -> Steps[tuple[Tensor, Graph | None]]:
    """Return the steps of :func:`run_forward`, of a stage that asks others: see :func:`in_steps`."""
    return in_steps(module, partial(run_forward, module, x, seed=seed, graph=graph, defers=defers))


def loss_steps(
    module: PartModule, x: Tensor, targets: Tensor, *, seed: int | None, graph: bool
) -> Steps[tuple[float, int, Graph | None]]:
    """Return the steps of :func:`run_loss`, of a stage that asks others: see :func:`in_steps`."""
    return in_steps(module, partial(run_loss, module, x, targets, seed=seed, graph=graph))


def in_steps(module: PartModule, run: Callable[[], T]) -> Steps[T]:
    """Return the steps of a forward of a part: none, done as they are driven, where it asks nobody.

    What is set around this call (:func:`~swarm.models.packing.packed`, :func:`~swarm.models.balance.weighed`) holds for
    all steps of one that asks, whatever is set when these are driven, and by which thread.
    """
    return suspended(run) if module.asks else _in_one(run, copy_context())


def _in_one(run: Callable[[], T], context: Context) -> Steps[T]:
    yield from ()
    return context.run(run)


def run_experts(
    shard: ExpertShard, asked: Dispatch, *, graph: bool, defers: bool = False
) -> tuple[Tensor, Graph | None]:
    """What a shard's experts of one layer answer: (N, D), and the graph when asked for, whose parameters are that
    layer's. See :func:`run_forward`."""
    device = next(shard.parameters()).device
    hidden, weights = aligned(asked.hidden, device), aligned(asked.weights, device)
    index = asked.index.to(device)
    if not graph:
        with torch.no_grad():
            return shard(asked.layer, hidden, index, weights), None
    hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
    trained = _trained(shard.of_layer(asked.layer))
    linears = LinearRecorder.of(shard, trained) if defers else None
    with linears or nullcontext():
        output: Tensor = shard(asked.layer, hidden, index, weights)
    return output.detach(), Graph(output, hidden, trained, linears, gates=weights)


def run_experts_backward(graph: Graph, gradient: Tensor) -> tuple[Tensor, Tensor, DeferredGradients]:
    """(gradient of the rows (N, D), that of their gates (N, k), the rest). Spends the graph.

    ``gradient`` (N, D) is that of what the experts answered.
    """
    if graph.input is None or graph.gates is None:
        raise BugError("a graph of experts was expected, which is not spent")
    found, rest = _at_once(_back(graph, gradient, (graph.input, graph.gates)))
    of_hidden, of_weights = found
    return of_hidden, of_weights, rest  # type: ignore[return-value]


def run_embedding(module: PartModule, tokens: Tensor, *, seed: int | None) -> tuple[Tensor, Graph]:
    """int64 tokens (B, T) → hidden (B, T, D) and its graph. Raises Violation for ids outside the vocabulary."""
    output = module.embed(_enter(module, tokens), seed)
    return output.detach(), Graph(output, None, _trained(module.trained_of("embed")))


def run_head(module: PartModule, hidden: Tensor, targets: Tensor) -> tuple[float, int, Tensor, Gradients]:
    """Head and loss, forward and backward at once, since no logits should outlive the call.

    Returns (loss sum in nats, targets counted, gradient of ``hidden``, gradients of the head).
    """
    hidden = _enter(module, hidden)
    inputs = hidden.detach().requires_grad_()
    parameters = _trained(module.trained_of("head"))
    total, count = module.loss(inputs, _checked(module, targets))
    grad_hidden, gradients = run_backward(Graph(total, inputs, parameters), None)
    if grad_hidden is None:
        raise BugError("the head gave no gradient for its input")
    # read when the backward is on its way: a GPU does not stand still
    return total.item(), count, grad_hidden, gradients


def run_backward(graph: Graph, grad_output: Tensor | None) -> tuple[Tensor | None, Gradients]:
    """(gradient of the input, None where that was tokens; gradients of the parameters). Spends the graph.

    ``grad_output`` has the output's shape; None where the output is the loss. Raises BugError for a spent graph.
    """
    grad_input, rest = run_backward_input(graph, grad_output)
    return grad_input, rest.finish()


def run_backward_input(graph: Graph, grad_output: Tensor | None) -> tuple[Tensor | None, DeferredGradients]:
    """The half of :func:`run_backward` that the stage before waits for: the gradient of the input, None where that was
    tokens; and the rest, which is all of it where the graph was not made to defer anything. Both halves together give
    the bits of the whole. Raises BugError for a graph of a stage that asks others: :func:`backward_steps` does it."""
    return _at_once(backward_steps(graph, grad_output))


def backward_steps(graph: Graph, grad_output: Tensor | None) -> Steps[tuple[Tensor | None, DeferredGradients]]:
    """Return the steps of :func:`run_backward_input`: none, but for a stage that asks others."""
    found, rest = yield from _back(graph, grad_output, () if graph.input is None else (graph.input,))
    return (found[0] if found else None), rest


def _back(
    graph: Graph, grad_output: Tensor | None, starts: Sequence[Tensor]
) -> Steps[tuple[Sequence[Tensor | None], DeferredGradients]]:
    """Gradients of where it starts, and the rest."""
    output, graph.output = graph.output, None
    if output is None:
        raise BugError("a graph was used for a second backward")
    if grad_output is not None:
        grad_output = aligned(grad_output, output.device).to(output.dtype)
    linears, cut, names = graph.linears, graph.cut, tuple(graph.parameters)
    wanted, passes = (*starts, *graph.parameters.values()), [] if linears is None else linears.passes
    mixed = graph.gates is not None  # no row need go to an expert
    graph.input = graph.gates = graph.linears = graph.cut = None
    found: Sequence[Tensor | None] = ()
    if cut is not None:
        found = yield from cut.backward(grad_output, wanted, passes)
    elif mixed and not output.requires_grad:
        found = [None] * len(wanted)
    elif wanted:  # else a table that is frozen: there is nothing to go back to
        found = torch.autograd.grad((output,), wanted, (grad_output,), allow_unused=mixed or linears is not None)
    if mixed:
        late = {one.name for one in passes}
        found = [
            torch.zeros_like(one) if gradient is None and name not in late else gradient
            for one, gradient, name in zip(wanted, found, (*[""] * len(starts), *names), strict=True)
        ]
    own = zip(names, found[len(starts) :], strict=True)
    rest = DeferredGradients(names, {name: gradient for name, gradient in own if gradient is not None}, passes)
    return found[: len(starts)], rest


def _at_once(steps: Steps[T]) -> T:
    try:
        next(steps)
    except StopIteration as end:
        value: T = end.value
        return value
    raise BugError("a stage whose experts are elsewhere computes in steps")


def summed(gradients: Gradients) -> Gradients:
    """Return one gradient a name, of those of all passes of one microbatch through a part.

    A weight that is tied has one of each pass that used it: they are added in their order.
    """
    total: dict[str, Tensor] = {}
    for name, gradient in gradients:
        total[name] = total[name] + gradient if name in total else gradient
    return list(total.items())


def rehearse() -> None:
    """A backward of one number. The first of a process makes torch import some five hundred modules, half a second of a
    processor: better before others wait for this one. Not before a fork: autograd's threads do not survive it."""
    number = torch.ones(1, requires_grad=True)
    run_backward(Graph(2 * number, number, {}), torch.ones(1))


def _trained(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    if not all(parameter.requires_grad for parameter in named.values()):
        raise BugError("a graph was asked of weights installed without requires_grad")
    return named


def _finished(cut: CutGraph | None, output: Tensor) -> CutGraph | None:
    if cut is not None:
        cut.finish(output)
    return cut


def _leaf(x: Tensor) -> Tensor | None:
    return x.detach().requires_grad_() if x.is_floating_point() else None


def _enter(module: PartModule, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        _check_tokens(x, 0, module.vocab_size)
    return aligned(x, next(module.parameters()).device)


def _checked(module: PartModule, targets: Tensor) -> Tensor:
    _check_tokens(targets, None, module.vocab_size)
    return targets


def _check_tokens(tokens: Tensor, least: int | None, vocab_size: int) -> None:
    if tokens.numel() == 0:
        raise Violation("an empty microbatch")
    if int(tokens.max()) >= vocab_size or (least is not None and int(tokens.min()) < least):
        raise Violation(f"token ids outside 0 … {vocab_size - 1}")

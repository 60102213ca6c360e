"""Experts that others hold: what a stage asks of them in a forward and a backward, and its graph, cut for that.

A stage whose experts are elsewhere does all the rest of its layers: attention, router, balance, residual stream. Where
a layer's experts would compute, the stage asks with a :class:`Dispatch`, and on the way back with a
:class:`GradientDispatch`. Passes are steps (:mod:`swarm.models.suspend`): generators that yield these, and are sent
what they ask for. Nothing is held up in between, and no autograd function waits.

The graph of such a forward is cut before and behind each layer, and at the experts. Going back through a layer needs
the gradient of what the experts answered, which autograd finds by going from the layer's output to there and no
further; then, with theirs, it goes through the layer's rest. So a backward costs what it does in one piece, and has the
same bits: only a layer's last addition is gone through twice.

Shapes: N tokens of a microbatch, D width, k experts that a token passes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import aligned
from swarm.models.suspend import ask

T = TypeVar("T")
Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """What a layer asks of its experts: for each row the sum, weighted by the gates, of what its experts make of it.

    The answer is (N, D) in the dtype of ``hidden``: the sums of all shards, added in the order of shards. A shard is
    sent the rows that have an expert of it, in their order.

    Attributes:
        layer: Of the whole model, counted from 0.
        hidden: (N, D).
        index: int64 (N, k): numbers of experts, each at most once in a row. As many as there are experts stands for
            none: of a choice that found no room.
        weights: float32 (N, k), the gates.
    """

    layer: int
    hidden: Tensor
    index: Tensor
    weights: Tensor

    def rows_of(self, experts: range) -> Tensor:
        """Return the numbers, in order, of the rows that have one of these experts: int64."""
        there = (self.index >= experts.start) & (self.index < experts.stop)
        return there.any(dim=1).nonzero().view(-1)

    def taken(self, rows: Tensor) -> Dispatch:
        """Return the same of some rows."""
        return Dispatch(self.layer, *(one.index_select(0, rows) for one in (self.hidden, self.index, self.weights)))


@dataclass(frozen=True, slots=True, eq=False)
class GradientDispatch:
    """What a layer asks of its experts on the way back: the answer is the gradient of ``hidden`` (N, D) and that of
    ``weights`` (N, k), each added over shards in their order.

    Attributes:
        layer: Of the whole model, counted from 0.
        gradient: (N, D), of what the :class:`Dispatch` of this layer was answered.
    """

    layer: int
    gradient: Tensor


Steps = Generator[Dispatch | GradientDispatch, Any, T]
"""A pass of a stage that asks: for a dispatch it is sent a tensor, for a dispatch of a gradient two."""


@dataclass(frozen=True, slots=True, eq=False)
class _Exchanged:
    """A dispatch whose tensors have their graph, and its answer, where the next one begins."""

    layer: int
    hidden: Tensor
    weights: Tensor
    answer: Tensor


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of a graph: from ``start``, None of token ids, to ``end``, with what was exchanged between. Where
    ``again`` computes the end, neither is kept but the answers ``known``, and ``then`` has things be as they were."""

    start: Tensor | None
    end: Tensor | None = None
    exchanged: list[_Exchanged] = field(default_factory=list)
    again: Compute | None = None
    then: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    known: deque[Tensor] = field(default_factory=deque)


class CutGraph:
    """The graph of a forward in pieces, of which one begins before and one behind each layer."""

    def __init__(self, start: Tensor | None) -> None:
        """``start`` is what came into the stage, with no graph; None of token ids."""
        self._pieces = [_Piece(start)]

    def through(self, compute: Compute, hidden: Tensor, then: AbstractContextManager[Any] | None) -> Tensor:
        """Return ``compute(hidden)``, which runs one layer. Its graph is not kept where there is a ``then``, in which
        computing again gives the same."""
        self._pieces[-1].end, entered = hidden, _leaf(hidden)
        piece = _Piece(entered)
        self._pieces.append(piece)
        output = compute(entered)
        if then is None:
            piece.end = output
        else:
            piece.again, piece.then = compute, then
            piece.known = deque(one.answer.detach() for one in piece.exchanged)
            piece.exchanged = []
        left = _leaf(output)
        self._pieces.append(_Piece(left))
        return left

    def finish(self, output: Tensor) -> None:
        """The forward has come to its end."""
        self._pieces[-1].end = output

    def asked(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return what experts answer: now, or when they were asked for the same before."""
        piece = self._pieces[-1]
        answer = piece.known.popleft() if piece.known else _asked(layer, hidden, index, weights)
        piece.exchanged.append(_Exchanged(layer, hidden, weights, answer.requires_grad_()))
        return answer

    def backward(
        self, gradient: Tensor | None, wanted: Sequence[Tensor], passes: list[Any]
    ) -> Steps[list[Tensor | None]]:
        """Return the gradients of the ``wanted``, None of those that took no part. Spends this.

        Args:
            gradient: Of the output; None where that is a loss.
            wanted: What came into the stage, and parameters.
            passes: Where recorded layers note that the backward came by, once each.
        """
        found: list[Tensor | None] = [None] * len(wanted)
        while self._pieces:
            piece = self._pieces[-1]
            if piece.again is not None and piece.start is not None:
                with torch.enable_grad(), piece.then, cutting(self):
                    piece.end = piece.again(piece.start)
            if piece.end is None:
                raise BugError("a graph was cut and not finished")
            roots = [(piece.end, gradient)]
            for one in reversed(piece.exchanged):
                before = len(passes)
                (back,) = _gradients(roots, [one.answer], retain=True)
                del passes[before:]
                if back is None:
                    raise BugError(f"nothing of layer {one.layer} depends on what its experts answered")
                of_hidden, of_weights = yield GradientDispatch(one.layer, back)
                roots += [(one.hidden, of_hidden), (one.weights, of_weights)]
            self._pieces.pop()
            starts = [] if piece.start is None else [piece.start]
            gradients = _gradients(roots, [*starts, *wanted])
            gradient = gradients[0] if starts else None
            for at, one_more in enumerate(gradients[len(starts) :]):
                if one_more is not None:
                    known = found[at]
                    found[at] = one_more if known is None else known + one_more
        return found


_graph: ContextVar[CutGraph | None] = ContextVar("graph", default=None)


@contextlib.contextmanager
def cutting(graph: CutGraph | None) -> Iterator[None]:
    """Have the graph of what this thread computes be cut; None: have it be whole."""
    before = _graph.set(graph)
    try:
        yield
    finally:
        _graph.reset(before)


def graph_to_cut() -> CutGraph | None:
    """Return what :func:`cutting` set for this thread, where it keeps a graph at all."""
    return _graph.get() if torch.is_grad_enabled() else None


def ask_experts(layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts of a layer answer that are elsewhere: see :class:`Dispatch`. In steps only."""
    graph = graph_to_cut()
    if graph is not None:
        return graph.asked(layer, hidden, index, weights)
    if torch.is_grad_enabled() and hidden.requires_grad:
        raise BugError("the graph of a stage whose experts are elsewhere was not cut")
    return _asked(layer, hidden, index, weights)


def _asked(layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    answer: Tensor = ask(Dispatch(layer, hidden.detach(), index, weights.detach().float()))
    return aligned(answer.detach(), hidden.device)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradients(
    roots: Sequence[tuple[Tensor, Tensor | None]], wanted: Sequence[Tensor], *, retain: bool = False
) -> Sequence[Tensor | None]:
    there = [(tensor, gradient) for tensor, gradient in roots if tensor.requires_grad]
    if not there or not wanted:
        return [None] * len(wanted)
    tensors, gradients = zip(*there, strict=True)
    given = [
        None if gradient is None else aligned(gradient, tensor.device).to(tensor.dtype)
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]
    return torch.autograd.grad(tensors, wanted, given, retain_graph=retain, allow_unused=True)

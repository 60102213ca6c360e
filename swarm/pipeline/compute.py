"""Compute one microbatch: decode, differentiate, encode. Synchronous, no network.

:class:`StageCompute` is a replica's work, :class:`EndsCompute` a trainer's; a :class:`NormGate` refuses gradients that
are far too large. Payloads are wire bytes; B is the microbatch size, T the context, D the model width.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from swarm.compression.dense import INT32
from swarm.device import is_out_of_memory
from swarm.errors import BugError, PeerError, Violation, WrongStep
from swarm.ids import PeerId, StepWork
from swarm.models.balance import weighed
from swarm.models.packing import packed
from swarm.models.passes import Bound
from swarm.network.protocols import Payload
from swarm.phases import Phases, complete
from swarm.pipeline.boundary import (
    BoundarySpecs,
    Mark,
    RowNotes,
    coming_back,
    entered,
    going_forward,
    mark,
    wait,
)

Graph = Any
Gradients = Any
Rest = Any
"""What a backward has left to do for the gradients of its parameters; its ``bytes`` are what it holds for that."""


class OpenPart(Protocol):
    """What a stage and the private ends have in common; implemented by ``swarm.optim.part``."""

    def is_open(self, step: int) -> bool:
        """Return whether work of that step can be added."""

    def computes(self, version: int) -> bool:
        """Return whether the parameters after that step are held. Any thread may ask."""

    def accumulated(self, step: int) -> frozenset[StepWork]:
        """Return what is in an open step's sum."""

    def accumulate(
        self, work: StepWork, gradients: Gradients, *, checked: bool = False, bound: Bound | None = None
    ) -> None:
        """Add to its step, once; scaled down to the ``bound``, None where nothing is bounded. Raises Violation, before
        anything is added, for gradients that are not finite, unless they were ``checked``."""

    def reverse(self, work: StepWork, gradients: Gradients) -> None:
        """Take the same gradients out of its step again."""

    def take_all_out(self, step: int) -> None:
        """Take all out of an open step's sum. Raises Refused where that cannot be done."""


class StagePart(OpenPart, Protocol):
    """The trained part of a stage. All passes are done with the parameters of the ``work``; they raise WrongStep where
    these are not held."""

    def forward(
        self, x: torch.Tensor, *, seed: int | None, work: StepWork, graph: bool = True
    ) -> tuple[torch.Tensor, Graph]:
        """(B, T, D) or, hosted first stage, (B, T) int64 → (B, T, D) and what backward needs."""

    def forward_loss(
        self, x: torch.Tensor, targets: torch.Tensor, *, seed: int | None, work: StepWork, graph: bool = True
    ) -> tuple[float, int, Graph]:
        """Hosted last stage: the sum of the loss, the number of targets counted, and what backward needs."""

    def backward_input(self, graph: Graph, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Rest]:
        """Gradient of the input (None for token ids), and what gives that of every parameter."""

    def backward_weights(self, rest: Rest) -> Gradients:
        """The gradient of every parameter, separate for this microbatch. Spends the rest."""

    def check(self, gradients: Gradients) -> None:
        """Raise Violation for gradients that are not finite. Any thread may."""


class EndsPart(OpenPart, Protocol):
    """The private ends on a trainer."""

    def embed(self, tokens: torch.Tensor, *, seed: int | None, work: StepWork) -> tuple[torch.Tensor, Graph]:
        """(B, T) int64 → (B, T, D)."""

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, work: StepWork
    ) -> tuple[float, int, torch.Tensor, Gradients]:
        """Loss sum, targets counted, gradient of ``hidden``, gradients of norm and head."""

    def embed_backward(self, graph: Graph, grad: torch.Tensor) -> Gradients:
        """Gradients of the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a stage's contribution is computed from, wire-encoded: the stage's input, and the gradient of its output
    or, hosted last stage, the targets. ``seed`` is that of the microbatch's dropout; ``first``: the first stage."""

    work: StepWork
    seed: int
    first: bool
    input: Payload
    gradient: Payload | None = None
    targets: Payload | None = None


@dataclass(frozen=True, slots=True)
class Contributed:
    """What came of it: the input's gradient, wire-encoded (None for token ids); a hosted last stage's loss. ``far``:
    what :meth:`Bounds.far` says of who sent the gradient that came for it."""

    gradient: memoryview | None
    loss_sum: float = 0.0
    tokens: int = 0
    far: float = 0.0


class BackwardResult(NamedTuple):
    """The first half of a backward that a device was asked for: the input's gradient, None for token ids; what gives
    the parameters'; a hosted last stage's loss and the targets that it is over."""

    grad_input: torch.Tensor | None
    rest: Rest
    loss_sum: float
    tokens: int


class StageCompute:
    """One replica's work on one microbatch, from payload to payload.

    Computing again what was computed before gives the same bits: same input, same seed, same parameters. What is done
    for each microbatch is in phases (:mod:`swarm.phases`), so that a GPU goes on computing while payloads come and go;
    what is done now and then is not.
    """

    def __init__(self, part: StagePart, specs: BoundarySpecs, device: torch.device) -> None:
        self.part, self._specs, self._device = part, specs, device
        self._gate, self.bounds = NormGate(), Bounds()
        self.most_loss = math.inf
        """Nats a token, more than which no honest microbatch has."""

    def _input(self, payload: Payload, first: bool, step: int) -> tuple[torch.Tensor, RowNotes]:
        """The stage's input, and what came beside it."""
        payload, (positions, counted) = self._specs.parted(payload)
        rows = RowNotes(None if positions is None else positions.to(self._device), counted)
        if first and self._specs.hosted:
            return INT32.decode(payload, self._specs.tokens), rows  # checked there, then moved
        return self._specs.arrive(payload, self._device, "forward", step), rows

    def held(self, step: int) -> frozenset[StepWork]:
        """Return what is in an open step's sum. Raises WrongStep."""
        return self.part.accumulated(step)

    def forward(self, payload: Payload, seed: int, work: StepWork, *, first: bool) -> Phases[tuple[Payload, Graph]]:
        """Input bytes → output bytes and the graph. Raises Violation for an output that is not finite."""
        inputs, rows = self._input(payload, first, work.ready_in)
        yield
        with _heeding(rows):
            output, graph = self.part.forward(entered(inputs), seed=seed, work=work)
        ready = mark(self._device)
        yield
        payload = self._output(output, rows, work, ready)
        self.bounds.gave(work, output)
        return payload, graph

    def output(self, payload: Payload, seed: int, work: StepWork, *, first: bool) -> Payload:
        """Input bytes → output bytes again, without a graph. Raises as :meth:`forward`."""
        inputs, rows = self._input(payload, first, work.ready_in)
        with _heeding(rows):
            output, _ = self.part.forward(inputs, seed=seed, work=work, graph=False)
        return self._output(output, rows, work, mark(self._device))

    def evaluate(self, payload: Payload, work: StepWork, *, first: bool) -> Phases[Payload]:
        """Input bytes → output bytes of rows that nobody learns from: nothing is dropped or kept. Raises as
        :meth:`forward`."""
        inputs, rows = self._input(payload, first, work.ready_in)
        yield
        with _heeding(rows):
            output, _ = self.part.forward(entered(inputs), seed=None, work=work, graph=False)
        ready = mark(self._device)
        yield
        return self._output(output, rows, work, ready)

    def evaluate_loss(self, payload: Payload, work: StepWork, *, first: bool) -> Phases[tuple[float, int]]:
        """Hosted last stage, of input bytes and the targets behind them: the sum of the loss and the number of targets
        counted. Raises as :meth:`forward`."""
        data = memoryview(payload).cast("B")
        split = data.nbytes - self._specs.target_bytes
        labels = INT32.decode(data[split:], self._specs.tokens)
        inputs, rows = self._input(data[:split], first, work.ready_in)
        yield
        with _heeding(rows):
            loss_sum, tokens, _ = self.part.forward_loss(entered(inputs), labels, seed=None, work=work, graph=False)
        _check_loss(loss_sum, tokens, math.inf)
        return loss_sum, tokens

    def _output(self, output: torch.Tensor, rows: RowNotes, work: StepWork, ready: Mark) -> Payload:
        return self._specs.joined(self._specs.leave(output, going_forward(work), "output", ready), rows)

    def contribute(self, material: Material, graph: Graph | None, sender: PeerId | None) -> Phases[Contributed]:
        """Both directions, or the way back only where there is a ``graph``: :meth:`turn_back` and :meth:`add_weights`,
        and raises as they do."""
        contributed, rest = yield from self.turn_back(material, graph, sender)
        yield from self.add_weights(material, rest)
        return contributed

    def turn_back(
        self, material: Material, graph: Graph | None, sender: PeerId | None
    ) -> Phases[tuple[Contributed, Rest]]:
        """Return what the stage before waits for, and what is left to do; nothing is added.

        Raises Violation for a gradient that is not finite, theirs or ours, or where nothing is bounded one of
        ``sender`` that the norm gate refuses, and WrongStep when the step has been closed meanwhile.
        """
        _check_step(self.part, material.work)
        arrived, norm = None, None
        if material.gradient is not None:
            arrived, length = self._arrived(material)
            self.bounds.came(material.work, length)
            norm = None if self.bounds.on(material.work) or sender is None else _length(arrived)
        yield
        _check_step(self.part, material.work)
        if sender is not None and norm is not None and (refusal := self._gate.check(norm)) is not None:
            raise Violation(refusal, peer=sender)
        result = self._backward(material, graph, entered(arrived))
        ready = mark(self._device)
        yield
        far = 0.0 if sender is None else self.bounds.far(material.work, sender)
        return replace(self._contributed(material, result, ready), far=far), result.rest

    def _arrived(self, material: Material) -> tuple[torch.Tensor, float]:
        """See :meth:`Bounds.arrived`."""
        work, payload = material.work, material.gradient or b""
        return self.bounds.arrived(work, self._specs.arrive(payload, self._device, "backward", work.ready_in))

    def add_weights(self, material: Material, rest: Rest) -> Phases[None]:
        """The parameters' gradients: the microbatch is in its step's sum afterwards, once, whether it was or not.

        Raises Violation, having added nothing, for a gradient that is not finite, and WrongStep as above.
        """
        yield
        _check_step(self.part, material.work)
        gradients = self.part.backward_weights(rest)
        ready = mark(self._device)
        yield
        wait(ready)
        self.part.check(gradients)
        yield
        _check_step(self.part, material.work)
        if material.work not in self.part.accumulated(material.work.step):
            _change(self.part, material.work, gradients, self.bounds, checked=True)

    def again(self, material: Material, *, shaken: bool = False) -> tuple[Payload | None, Contributed]:
        """The output again, None of a last stage that computes the loss, and what goes back; nothing is added, and no
        gradient of a weight computed. ``shaken``: of other numbers in the last place. Raises Violation for what is not
        finite."""
        if shaken:
            other = copy(self)
            other._specs = replace(self._specs, shaken=True)
            return other.again(material)
        output, graph, work = None, None, material.work
        if material.targets is None:
            output, graph = complete(self.forward(material.input, material.seed, work, first=material.first))
        return output, self._contributed(material, self._backward(material, graph), mark(self._device))

    def gradient(self, material: Material) -> memoryview | None:
        """The input's gradient again; nothing is added."""
        return self._contributed(material, self._backward(material, None), mark(self._device)).gradient

    def reverse(self, material: Material) -> None:
        """Take the microbatch out of its step's sum, if it is there. Exact in float64."""
        _check_step(self.part, material.work)
        if material.work in self.part.accumulated(material.work.step):
            rest = self._backward(material, None).rest
            _change(self.part, material.work, self.part.backward_weights(rest), self.bounds)

    def take_all_out(self, step: int) -> None:
        """Take all out of an open step's sum. Raises WrongStep, or Refused where that cannot be done."""
        _check_open(self.part, step)
        self.part.take_all_out(step)

    def _backward(
        self, material: Material, graph: Graph | None, gradient: torch.Tensor | None = None
    ) -> BackwardResult:
        """``gradient`` is the material's, where it has arrived on the device."""
        loss_sum, tokens = 0.0, 0
        if material.targets is not None:
            labels = INT32.decode(material.targets, self._specs.tokens)
            inputs, rows = self._input(material.input, material.first, material.work.ready_in)
            with _heeding(rows):
                loss_sum, tokens, graph = self.part.forward_loss(inputs, labels, seed=material.seed, work=material.work)
            _check_loss(loss_sum, tokens, self.most_loss)
        elif material.gradient is not None:
            if gradient is None:
                gradient, _ = self._arrived(material)
            if graph is None:
                inputs, rows = self._input(material.input, material.first, material.work.ready_in)
                with _heeding(rows):
                    output, graph = self.part.forward(inputs, seed=material.seed, work=material.work)
                self.bounds.gave(material.work, output)
        else:
            raise BugError("a backward was asked for without a gradient or targets")
        grad_input, rest = self.part.backward_input(graph, gradient)
        return BackwardResult(grad_input, rest, loss_sum, tokens)

    def _contributed(self, material: Material, result: BackwardResult, ready: Mark) -> Contributed:
        payload, context = None, coming_back(material.work)
        if result.grad_input is not None:
            payload = self._specs.leave(result.grad_input, context, "gradient of the input", ready)
        else:
            wait(ready)
        return Contributed(payload, result.loss_sum, result.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsMaterial:
    """What the private ends' contribution is computed from: tokens, targets and, of packed rows, positions, (B, T)
    int64, and, wire-encoded, the last stage's output and the gradient of the first stage's input."""

    work: StepWork
    seed: int
    tokens: torch.Tensor
    targets: torch.Tensor
    output: Payload
    gradient: Payload
    positions: torch.Tensor | None = None


class EndsCompute:
    """A trainer's private ends on one microbatch."""

    def __init__(self, part: EndsPart, specs: BoundarySpecs, device: torch.device) -> None:
        self.part, self._specs, self._device = part, specs, device
        self.bounds, self.most_loss = Bounds(), math.inf

    def held(self, step: int) -> frozenset[StepWork]:
        """Return what is in an open step's sum. Raises WrongStep."""
        return self.part.accumulated(step)

    def embed(self, tokens: torch.Tensor, seed: int | None, work: StepWork, rows: RowNotes) -> tuple[Payload, Graph]:
        """Token ids → activation bytes for the first stage."""
        with packed(None if rows.positions is None else rows.positions.to(self._device)):
            hidden, graph = self.part.embed(tokens, seed=seed, work=work)
        payload = self._specs.leave(hidden, going_forward(work), "embedding", mark(self._device))
        return self._specs.joined(payload, rows), graph

    def loss(self, payload: Payload, targets: torch.Tensor, work: StepWork) -> tuple[float, int, memoryview, Gradients]:
        """Last stage's output → loss sum, targets counted, gradient bytes for the way back, head gradients."""
        payload, _ = self._specs.parted(payload)  # no layer of the ends looks across a row
        hidden = self._specs.arrive(payload, self._device, "forward", work.ready_in)
        loss_sum, tokens, grad_hidden, gradients = self.part.loss(hidden, targets, work=work)
        _check_loss(loss_sum, tokens, self.most_loss)
        back = self._specs.leave(grad_hidden, coming_back(work), "gradient of the loss", mark(self._device))
        return loss_sum, tokens, back, gradients

    def finish(self, graph: Graph, payload: Payload, head_gradients: Gradients, work: StepWork) -> None:
        """Input gradient from the first stage → the microbatch is in its step's sum, once, whether it was before
        or not. Raises WrongStep when that step has been closed meanwhile."""
        _check_step(self.part, work)
        embedding_gradients = self.part.embed_backward(graph, self._arrived(payload, work))
        if work not in self.part.accumulated(work.step):
            _change(self.part, work, [*embedding_gradients, *head_gradients], self.bounds)

    def _arrived(self, payload: Payload, work: StepWork) -> torch.Tensor:
        """The gradient that came, scaled down where it is too long."""
        came = self._specs.arrive(payload, self._device, "backward", work.ready_in)
        gradient, length = self.bounds.arrived(work, came)
        self.bounds.came(work, length)
        return gradient

    def replay(self, material: EndsMaterial) -> None:
        """Add a microbatch from what was retained, if it is not in its step's sum."""
        _check_step(self.part, material.work)
        if material.work not in self.part.accumulated(material.work.step):
            _change(self.part, material.work, self._gradients(material), self.bounds)

    def reverse(self, material: EndsMaterial) -> None:
        """Take it out again, if it is there."""
        _check_step(self.part, material.work)
        if material.work in self.part.accumulated(material.work.step):
            _change(self.part, material.work, self._gradients(material), self.bounds)

    def take_all_out(self, step: int) -> None:
        """As :meth:`StageCompute.empty`."""
        _check_open(self.part, step)
        self.part.take_all_out(step)

    def _gradients(self, material: EndsMaterial) -> Gradients:
        graph = self.embed(material.tokens, material.seed, material.work, RowNotes(material.positions))[1]
        head = self.loss(material.output, material.targets, material.work)[3]
        gradient = self._arrived(material.gradient, material.work)
        return [*self.part.embed_backward(graph, gradient), *head]


@contextmanager
def _heeding(rows: RowNotes) -> Iterator[None]:
    """Have what this thread computes be of such rows."""
    with packed(entered(rows.positions)), weighed(rows.counted):
        yield


def _check_loss(loss_sum: float, tokens: int, most: float) -> None:
    if not math.isfinite(loss_sum):
        raise Violation(f"the loss is {loss_sum}")
    if tokens and loss_sum > most * tokens:
        raise Violation(f"the loss is {loss_sum / tokens:.4g} nats a token, and {most:.4g} is the most")


def _check_step(part: OpenPart, work: StepWork) -> None:
    """Work that waited in line behind the swap would else be added to another step."""
    _check_open(part, work.step)


def _check_open(part: OpenPart, step: int) -> None:
    if not part.is_open(step):
        raise WrongStep(f"step {step} is not open any more")


def _change(part: OpenPart, work: StepWork, gradients: Gradients, bounds: Bounds, *, checked: bool = False) -> None:
    """Add the microbatch to its step's sum, or take it out where it is in. The last thing that is done for it, so that
    whatever failed before has changed nothing. A change that broke off half-way cannot be mended: BugError, which ends
    the replica; one that found no memory before it began comes out as it is."""
    held = work in part.accumulated(work.step)
    try:
        if held:
            part.reverse(work, gradients)
        else:
            part.accumulate(work, gradients, checked=checked, bound=bounds.of(work))
    except (PeerError, BugError):
        raise
    except Exception as error:
        if is_out_of_memory(error) and (work in part.accumulated(work.step)) is held:
            raise
        raise BugError(f"the step's sum is corrupt: {type(error).__name__}: {error}") from error


# --- bounds ----------------------------------------------------------------------------------------------------------
# How much of a step's sum one microbatch can be, no matter who computed what of it.


LOUD, LOUD_ONES, LOUD_STEPS, RECENT = 16.0, 3, 8, 64
"""A peer is told of that sent gradients that are so many times as long as usual: so many of them in so many steps. (Of
512 honest ones of one microbatch each the longest was 18 times the median.) Of so many outputs the median is usual."""


class Bounds:
    """How long gradients may be, where the manifest bounds them (``optimizer.influence``): all replicas of a part have
    the same from the record of whose parameters the work is. So a microbatch is scaled alike no matter who adds it,
    takes it out or computes it again. Nothing is bounded before a record says what is usual. Written by the loop, used
    by the threads that compute."""

    def __init__(self) -> None:
        self._influence = 1.0
        self._usual: dict[int, tuple[float, float]] = {}
        self._came: dict[int, dict[StepWork, float]] = {}
        self._gave: dict[int, dict[StepWork, float]] = {}
        self._outputs = deque[float](maxlen=RECENT)
        self._loud: dict[int, Counter[PeerId]] = {}

    def open(self, step: int, usual: tuple[float, float], influence: float) -> None:
        """The record of this step says how long gradients of the part usually are, and those that come to it; 0 where
        it does not know. ``influence`` times as much is the most."""
        self._influence = influence
        self._usual = {step: usual} | {one: known for one, known in self._usual.items() if one == step - 1}
        for lengths in (self._came, self._gave):
            for over in [one for one in list(lengths) if one <= step]:
                lengths.pop(over, None)
        for over in [one for one in list(self._loud) if one <= step - LOUD_STEPS]:
            self._loud.pop(over, None)

    def on(self, work: StepWork) -> bool:
        """Return whether work is bounded."""
        return work.version in self._usual

    def arrived(self, work: StepWork, gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return a gradient that came, no longer than it may be, and how long it was; 0.0 where nothing is bounded.
        Nothing is kept: who judges another's work may do the same itself."""
        if (usual := self._usual.get(work.version)) is None:
            return gradient, 0.0
        length, most = _length(gradient), self._most(usual[1])
        return (gradient if length <= most else gradient * (most / length)), length

    def came(self, work: StepWork, length: float) -> None:
        """What is added here of work is computed from a gradient that was so long."""
        if self.on(work):
            self._came.setdefault(work.step, {})[work] = length

    def gave(self, work: StepWork, output: torch.Tensor) -> None:
        """This is what is handed on of work."""
        if self.on(work):
            length = self._gave.setdefault(work.step, {})[work] = _length(output)
            self._outputs.append(length)

    def far(self, work: StepWork, sender: PeerId) -> float:
        """Return how many times as long as usual the gradient was that came from ``sender``, where it is the one by
        which it is told of in a step; else 0. One long gradient may be honest. Behind a norm a gradient is as many
        times longer as what we gave is shorter: that is not its doing."""
        usual = self._usual.get(work.version, (0.0, 0.0))[1]
        times = self._came.get(work.step, {}).get(work, 0.0) / usual if usual else 0.0
        if (gave := self._gave.get(work.step, {}).get(work)) is not None:
            times *= min(1.0, gave / (median(list(self._outputs)) or 1.0))
        if times <= LOUD:
            return 0.0
        before = sum(heard[sender] for step, heard in list(self._loud.items()) if step != work.step)
        now = self._loud.setdefault(work.step, Counter())
        now[sender] += 1
        return times if now[sender] == max(1, LOUD_ONES - before) else 0.0

    def of(self, work: StepWork) -> Bound | None:
        """Return the bound of work that is added; None where it has none."""
        if (usual := self._usual.get(work.version)) is None:
            return None
        return Bound(self._most(usual[0]), self._came.get(work.step, {}).get(work, 0.0))

    def _most(self, usual: float) -> float:
        return self._influence * usual if usual else math.inf


def _length(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float32))


# --- norm gate -------------------------------------------------------------------------------------------------------
# Refuses a boundary gradient far above what this replica has seen, in runs that bound nothing.


class NormGate:
    """Compares a gradient's L2 norm with the running median of accepted ones.

    ``factor`` is wide on purpose: of 512 honest norms of one microbatch the largest was 18 times the median, while a
    single poisoned microbatch only hurts when it is larger by several orders of magnitude. Nothing is refused before
    ``warmup`` norms were seen.
    """

    def __init__(self, factor: float = 64.0, window: int = 256, warmup: int = 16) -> None:
        self._factor, self._warmup = factor, warmup
        self._norms: deque[float] = deque(maxlen=window)

    def check(self, norm: float) -> str | None:
        """None when the norm is accepted (and remembered), else the reason for refusing it, which names nobody: who
        sent it may have been given what it comes of."""
        if not math.isfinite(norm):
            return "the gradient has no finite norm"
        if len(self._norms) >= self._warmup:
            limit = self._factor * max(median(self._norms), 1e-12)
            if norm > limit:
                return f"gradient norm {norm:.3g} exceeds {limit:.3g}, {self._factor:g} times the median"
        self._norms.append(norm)
        return None

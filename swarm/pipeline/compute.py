"""Compute one microbatch: decode, differentiate, encode. Synchronous, no network.

:class:`StageCompute` is a replica's work, :class:`EndsCompute` a trainer's; a :class:`NormGate` refuses gradients that
are far too large. Payloads are wire bytes; B is the microbatch size, T the context, D the model width.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from swarm.compression.dense import INT32
from swarm.device import is_out_of_memory
from swarm.errors import BugError, PeerError, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.models.packing import packed
from swarm.network.protocols import Payload
from swarm.phases import Phases
from swarm.pipeline.boundary import (
    BoundarySpecs,
    Mark,
    Place,
    coming_back,
    entered,
    going_forward,
    mark,
    wait,
    with_starts,
)

Graph = Any
Gradients = Any


class StagePart(Protocol):
    """The trained part of a stage; implemented by ``swarm.optim.part``."""

    @property
    def step(self) -> int:
        """The closed step whose parameters it holds: the one after it is open."""

    def forward(self, x: torch.Tensor, *, seed: int, graph: bool = True) -> tuple[torch.Tensor, Graph]:
        """(B, T, D) or, hosted first stage, (B, T) int64 → (B, T, D) and what backward needs."""

    def forward_loss(self, x: torch.Tensor, targets: torch.Tensor, *, seed: int) -> tuple[float, int, Graph]:
        """Hosted last stage: the sum of the loss, the number of targets counted, and what backward needs."""

    def backward(self, graph: Graph, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Gradients]:
        """Gradient of the input (None for token ids) and of every parameter, separate for this microbatch."""

    def check(self, gradients: Gradients) -> None:
        """Raise Violation for gradients that are not finite. Any thread may."""

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients, *, checked: bool = False) -> None:
        """Add to the open step, once. Raises as :meth:`check`, before anything is added, where that was not asked."""

    def reverse(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Take the same gradients out of the open step again."""

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """What is in the open step."""


class EndsPart(Protocol):
    """The private ends on a trainer; implemented by ``swarm.optim.part``."""

    @property
    def step(self) -> int:
        """As for a stage."""

    def embed(self, tokens: torch.Tensor, *, seed: int) -> tuple[torch.Tensor, Graph]:
        """(B, T) int64 → (B, T, D)."""

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[float, int, torch.Tensor, Gradients]:
        """Loss sum, targets counted, gradient of ``hidden``, gradients of norm and head."""

    def embed_backward(self, graph: Graph, grad: torch.Tensor) -> Gradients:
        """Gradients of the embedding."""

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients, *, checked: bool = False) -> None:
        """As for a stage."""

    def reverse(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """As for a stage."""

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """As for a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a stage's contribution is computed from, wire-encoded: the stage's input, and the gradient of its output
    or, hosted last stage, the targets. ``seed`` is that of the microbatch's dropout; ``first``: the first stage."""

    step: int
    microbatch: MicrobatchId
    seed: int
    first: bool
    input: Payload
    gradient: Payload | None = None
    targets: Payload | None = None


@dataclass(frozen=True, slots=True)
class Contributed:
    """What came of it: the input's gradient, wire-encoded (None for token ids); a hosted last stage's loss."""

    gradient: memoryview | None
    loss_sum: float = 0.0
    tokens: int = 0


class BackwardResult(NamedTuple):
    """A backward that a device was asked for: the input's gradient, None for token ids; the parameters'; a hosted last
    stage's loss and the targets that it is over."""

    grad_input: torch.Tensor | None
    gradients: Gradients
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
        self._gate = NormGate()

    def _input(self, payload: Payload, first: bool, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stage's input, and the positions of packed rows."""
        payload, positions = self._specs.parted(payload)
        positions = None if positions is None else positions.to(self._device)
        if first and self._specs.hosted:
            return INT32.decode(payload, self._specs.tokens), positions  # checked there, then moved
        return self._specs.arrive(payload, self._device, "forward", step), positions

    def held(self) -> frozenset[MicrobatchId]:
        """The microbatches in the open step."""
        return self.part.microbatches

    def forward(self, payload: Payload, seed: int, place: Place, *, first: bool) -> Phases[tuple[Payload, Graph]]:
        """Input bytes → output bytes and the graph. Raises Violation for an output that is not finite."""
        inputs, positions = self._input(payload, first, place[0])
        yield
        with packed(entered(positions)):
            output, graph = self.part.forward(entered(inputs), seed=seed)
        ready = mark(self._device)
        yield
        return self._output(output, positions, place, ready), graph

    def output(self, payload: Payload, seed: int, place: Place, *, first: bool) -> Payload:
        """Input bytes → output bytes again, without a graph. Raises as :meth:`forward`."""
        inputs, positions = self._input(payload, first, place[0])
        with packed(positions):
            output, _ = self.part.forward(inputs, seed=seed, graph=False)
        return self._output(output, positions, place, mark(self._device))

    def _output(self, output: torch.Tensor, positions: torch.Tensor | None, place: Place, ready: Mark) -> Payload:
        payload = self._specs.leave(output, going_forward(place), "output", ready)
        return with_starts(payload, positions)

    def contribute(self, material: Material, graph: Graph | None, sender: PeerId | None) -> Phases[Contributed]:
        """Both directions, or the way back only where there is a ``graph``; the microbatch is in the open step
        afterwards, once, whether it was before or not.

        Raises Violation, having added nothing, for a gradient that is not finite, theirs or ours, or one of ``sender``
        that the norm gate refuses, and WrongStep when the step has been closed meanwhile.
        """
        _check_step(self.part, material.step)
        arrived, norm = None, 0.0
        if material.gradient is not None:
            arrived = self._specs.arrive(material.gradient, self._device, "backward", material.step)
            norm = 0.0 if sender is None else float(torch.linalg.vector_norm(arrived, dtype=torch.float32))
        yield
        _check_step(self.part, material.step)
        if sender is not None and arrived is not None and (refusal := self._gate.check(sender, norm)) is not None:
            raise Violation(refusal, peer=sender)
        result = self._backward(material, graph, entered(arrived))
        ready = mark(self._device)
        yield
        contributed = self._contributed(material, result, ready)
        self.part.check(result.gradients)
        yield
        _check_step(self.part, material.step)
        if material.microbatch not in self.part.microbatches:
            _change(self.part, material.microbatch, result.gradients, checked=True)
        return contributed

    def gradient(self, material: Material) -> memoryview | None:
        """The input's gradient again; nothing is added."""
        return self._contributed(material, self._backward(material, None), mark(self._device)).gradient

    def reverse(self, material: Material) -> None:
        """Take the microbatch out of the open step, if it is there. Exact in float64."""
        _check_step(self.part, material.step)
        if material.microbatch in self.part.microbatches:
            _change(self.part, material.microbatch, self._backward(material, None).gradients)

    def _backward(
        self, material: Material, graph: Graph | None, gradient: torch.Tensor | None = None
    ) -> BackwardResult:
        """``gradient`` is the material's, where it has arrived on the device."""
        loss_sum, tokens = 0.0, 0
        if material.targets is not None:
            labels = INT32.decode(material.targets, self._specs.tokens)
            inputs, positions = self._input(material.input, material.first, material.step)
            with packed(positions):
                loss_sum, tokens, graph = self.part.forward_loss(inputs, labels, seed=material.seed)
            _check_loss(loss_sum)
        elif material.gradient is not None:
            if gradient is None:
                gradient = self._specs.arrive(material.gradient, self._device, "backward", material.step)
            if graph is None:
                inputs, positions = self._input(material.input, material.first, material.step)
                with packed(positions):
                    _, graph = self.part.forward(inputs, seed=material.seed)
        else:
            raise BugError("a backward was asked for without a gradient or targets")
        grad_input, gradients = self.part.backward(graph, gradient)
        return BackwardResult(grad_input, gradients, loss_sum, tokens)

    def _contributed(self, material: Material, result: BackwardResult, ready: Mark) -> Contributed:
        payload, context = None, coming_back((material.step, material.microbatch))
        if result.grad_input is not None:
            payload = self._specs.leave(result.grad_input, context, "gradient of the input", ready)
        else:
            wait(ready)
        return Contributed(payload, result.loss_sum, result.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsMaterial:
    """What the private ends' contribution is computed from: tokens, targets and, of packed rows, positions, (B, T)
    int64, and, wire-encoded, the last stage's output and the gradient of the first stage's input."""

    step: int
    microbatch: MicrobatchId
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

    def held(self) -> frozenset[MicrobatchId]:
        """The microbatches in the ends' open step."""
        return self.part.microbatches

    def embed(
        self, tokens: torch.Tensor, seed: int, place: Place, positions: torch.Tensor | None = None
    ) -> tuple[Payload, Graph]:
        """Token ids → activation bytes for the first stage; ``positions`` of packed rows."""
        with packed(None if positions is None else positions.to(self._device)):
            hidden, graph = self.part.embed(tokens, seed=seed)
        payload = self._specs.leave(hidden, going_forward(place), "embedding", mark(self._device))
        return with_starts(payload, positions), graph

    def loss(self, payload: Payload, targets: torch.Tensor, place: Place) -> tuple[float, int, memoryview, Gradients]:
        """Last stage's output → loss sum, targets counted, gradient bytes for the way back, head gradients."""
        payload, _ = self._specs.parted(payload)  # no layer of the ends looks across a row
        hidden = self._specs.arrive(payload, self._device, "forward", place[0])
        loss_sum, tokens, grad_hidden, gradients = self.part.loss(hidden, targets)
        _check_loss(loss_sum)
        back = self._specs.leave(grad_hidden, coming_back(place), "gradient of the loss", mark(self._device))
        return loss_sum, tokens, back, gradients

    def finish(self, graph: Graph, payload: Payload, head_gradients: Gradients, place: Place) -> None:
        """Input gradient from the first stage → the microbatch is in the ends' open step, once, whether it was before
        or not. Raises WrongStep when that step has been closed meanwhile."""
        step, microbatch = place
        _check_step(self.part, step)
        arrived = self._specs.arrive(payload, self._device, "backward", step)
        embedding_gradients = self.part.embed_backward(graph, arrived)
        if microbatch not in self.part.microbatches:
            _change(self.part, microbatch, [*embedding_gradients, *head_gradients])

    def replay(self, material: EndsMaterial) -> None:
        """Add a microbatch from what was retained, if it is not in the open step."""
        _check_step(self.part, material.step)
        if material.microbatch not in self.part.microbatches:
            _change(self.part, material.microbatch, self._gradients(material))

    def reverse(self, material: EndsMaterial) -> None:
        """Take it out again, if it is there."""
        _check_step(self.part, material.step)
        if material.microbatch in self.part.microbatches:
            _change(self.part, material.microbatch, self._gradients(material))

    def _gradients(self, material: EndsMaterial) -> Gradients:
        place = (material.step, material.microbatch)
        graph = self.embed(material.tokens, material.seed, place, material.positions)[1]
        head = self.loss(material.output, material.targets, place)[3]
        gradient = self._specs.arrive(material.gradient, self._device, "backward", material.step)
        return [*self.part.embed_backward(graph, gradient), *head]


def _check_loss(loss_sum: float) -> None:
    if not math.isfinite(loss_sum):
        raise Violation(f"the loss is {loss_sum}")


def _check_step(part: StagePart | EndsPart, step: int) -> None:
    """Work that waited in line behind the swap would else be added to the next step."""
    if part.step + 1 != step:
        raise WrongStep(f"step {step} is not open any more, step {part.step + 1} is")


def _change(
    part: StagePart | EndsPart, microbatch: MicrobatchId, gradients: Gradients, *, checked: bool = False
) -> None:
    """Add the microbatch to the open step's sum, or take it out where it is in. The last thing that is done for it, so
    that whatever failed before has changed nothing. A change that broke off half-way cannot be mended: BugError, which
    ends the replica; one that found no memory before it began comes out as it is."""
    held = microbatch in part.microbatches
    try:
        if held:
            part.reverse(microbatch, gradients)
        else:
            part.accumulate(microbatch, gradients, checked=checked)
    except (PeerError, BugError):
        raise
    except Exception as error:
        if is_out_of_memory(error) and (microbatch in part.microbatches) is held:
            raise
        raise BugError(f"the open step's sum is spoilt: {type(error).__name__}: {error}") from error


# --- norm gate -------------------------------------------------------------------------------------------------------
# Refuses a boundary gradient far above what this replica has seen: one of the bounds within which a peer can lie.


class NormGate:
    """Compares a gradient's L2 norm with the running median of accepted ones.

    ``factor`` is wide on purpose: of 512 honest norms of one microbatch the largest was 18 times the median, while a
    single poisoned microbatch only hurts when it is larger by several orders of magnitude. Nothing is refused before
    ``warmup`` norms were seen.
    """

    def __init__(self, factor: float = 64.0, window: int = 256, warmup: int = 16) -> None:
        self._factor, self._warmup = factor, warmup
        self._norms: deque[float] = deque(maxlen=window)

    def check(self, sender: PeerId, norm: float) -> str | None:
        """None when the norm is accepted (and remembered), else the reason for refusing it."""
        if not math.isfinite(norm):
            return f"the gradient from {sender} has no finite norm"
        if len(self._norms) >= self._warmup:
            limit = self._factor * max(median(self._norms), 1e-12)
            if norm > limit:
                return f"gradient norm {norm:.3g} from {sender} exceeds {limit:.3g}, {self._factor:g} times the median"
        self._norms.append(norm)
        return None

"""Compute one microbatch on the device thread: decode, differentiate, encode. Synchronous, no network.

:class:`StageCompute` is a replica's work, :class:`EndsCompute` a trainer's; a :class:`NormGate` refuses gradients that
are far too large. Payloads are wire bytes; B is the microbatch size, T the context, D the model width.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from swarm.compression.codec import Codec, EncodeContext
from swarm.compression.dense import INT32
from swarm.device import is_out_of_memory
from swarm.errors import BugError, PeerError, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.models.packing import decode_starts, encode_starts, packed, starts_bytes
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Payload

Graph = Any
Gradients = Any
Place = tuple[int, MicrobatchId]
"""What is computed: step and microbatch."""


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

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Add to the open step, once. Raises Violation for non-finite gradients, before anything is added."""

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

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """As for a stage."""

    def reverse(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """As for a stage."""

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """As for a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySpecs:
    """What crosses a stage boundary in this run, and how it is encoded."""

    activation: TensorSpec
    tokens: TensorSpec
    codec: Codec
    hosted: bool
    packed: bool = False

    @property
    def gradient_bytes(self) -> int:
        """Exact size of a boundary gradient's payload."""
        return self.codec.wire_bytes(self.activation)

    @property
    def activation_bytes(self) -> int:
        """Exact size of what goes forward to a stage: an activation, in packed rows with where documents begin."""
        return self.gradient_bytes + self.starts_bytes

    @property
    def target_bytes(self) -> int:
        """Exact size of hosted targets, (B, T)."""
        return INT32.wire_bytes(self.tokens)

    @property
    def token_bytes(self) -> int:
        """Exact size of hosted token ids, (B, T), in packed rows with where documents begin."""
        return self.target_bytes + self.starts_bytes

    @property
    def starts_bytes(self) -> int:
        """Exact size of where documents begin, behind each payload that goes forward."""
        return starts_bytes(*self.tokens.shape) if self.packed else 0

    def parted(self, payload: Payload) -> tuple[Payload, torch.Tensor | None]:
        """Part what goes forward into the tensor and the positions (B, T) of packed rows."""
        if not self.packed:
            return payload, None
        data = memoryview(payload).cast("B")
        split = data.nbytes - self.starts_bytes
        rows, sequence = self.tokens.shape
        return data[:split], decode_starts(data[split:], rows, sequence)


def with_starts(payload: Payload, positions: torch.Tensor | None) -> Payload:
    """Return what goes forward: a tensor's payload, and behind it where the documents of packed rows begin."""
    return payload if positions is None else memoryview(b"".join((payload, encode_starts(positions))))


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


def going_forward(place: Place) -> EncodeContext:
    """Return what tells a codec that encodes an activation, or token ids, which they are."""
    return EncodeContext(step=place[0], microbatch=place[1], direction="forward")


def _coming_back(place: Place) -> EncodeContext:
    """Return what tells a codec that encodes a gradient which it is."""
    return EncodeContext(step=place[0], microbatch=place[1], direction="backward")


class StageCompute:
    """One replica's work on one microbatch, from payload to payload.

    Computing again what was computed before gives the same bits: same input, same seed, same parameters.
    """

    def __init__(self, part: StagePart, specs: BoundarySpecs, device: torch.device) -> None:
        self.part, self._specs, self._device = part, specs, device
        self._gate = NormGate()

    def _decoded(self, payload: Payload) -> torch.Tensor:
        return self._specs.codec.decode(payload, self._specs.activation, check_finite=True)

    def _activation(self, payload: Payload) -> torch.Tensor:
        return self._decoded(payload).to(self._device)

    def _input(self, payload: Payload, first: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stage's input, and the positions of packed rows."""
        payload, positions = self._specs.parted(payload)
        positions = None if positions is None else positions.to(self._device)
        if first and self._specs.hosted:
            return INT32.decode(payload, self._specs.tokens), positions  # checked there, then moved
        return self._activation(payload), positions

    def held(self) -> frozenset[MicrobatchId]:
        """The microbatches in the open step."""
        return self.part.microbatches

    def forward(self, payload: Payload, seed: int, place: Place, *, first: bool) -> tuple[Payload, Graph]:
        """Input bytes → output bytes and the graph. Raises Violation for an output that is not finite."""
        inputs, positions = self._input(payload, first)
        with packed(positions):
            output, graph = self.part.forward(inputs, seed=seed)
        return self._output(output, positions, place), graph

    def output(self, payload: Payload, seed: int, place: Place, *, first: bool) -> Payload:
        """Input bytes → output bytes again, without a graph. Raises as :meth:`forward`."""
        inputs, positions = self._input(payload, first)
        with packed(positions):
            output, _ = self.part.forward(inputs, seed=seed, graph=False)
        return self._output(output, positions, place)

    def _output(self, output: torch.Tensor, positions: torch.Tensor | None, place: Place) -> Payload:
        return with_starts(self._encode(output, "output", going_forward(place)), positions)

    def contribute(self, material: Material, graph: Graph | None, sender: PeerId | None) -> Contributed:
        """Both directions, or the way back only where there is a ``graph``; the microbatch is in the open step
        afterwards, once, whether it was before or not.

        Raises Violation, having added nothing, for a gradient that is not finite, theirs or ours, or one of ``sender``
        that the norm gate refuses, and WrongStep when the step has been closed meanwhile.
        """
        _check_step(self.part, material.step)
        decoded = None if material.gradient is None else self._decoded(material.gradient)
        if sender is not None and decoded is not None:
            norm = float(torch.linalg.vector_norm(decoded.float()))  # on the host: a GPU is not waited for
            refusal = self._gate.check(sender, norm)
            if refusal is not None:
                raise Violation(refusal, peer=sender)
        result, gradients = self._backward(material, graph, decoded)
        if material.microbatch not in self.part.microbatches:
            _change(self.part, material.microbatch, gradients)
        return result

    def gradient(self, material: Material) -> memoryview | None:
        """The input's gradient again; nothing is added."""
        return self._backward(material, None)[0].gradient

    def reverse(self, material: Material) -> None:
        """Take the microbatch out of the open step, if it is there. Exact in float64."""
        _check_step(self.part, material.step)
        if material.microbatch in self.part.microbatches:
            _change(self.part, material.microbatch, self._backward(material, None)[1])

    def _backward(
        self, material: Material, graph: Graph | None, known: torch.Tensor | None = None
    ) -> tuple[Contributed, Gradients]:
        loss_sum, tokens, gradient = 0.0, 0, None
        if material.targets is not None:
            labels = INT32.decode(material.targets, self._specs.tokens)
            inputs, positions = self._input(material.input, material.first)
            with packed(positions):
                loss_sum, tokens, graph = self.part.forward_loss(inputs, labels, seed=material.seed)
            _check_loss(loss_sum)
        elif material.gradient is not None:
            gradient = (self._decoded(material.gradient) if known is None else known).to(self._device)
            if graph is None:
                inputs, positions = self._input(material.input, material.first)
                with packed(positions):
                    _, graph = self.part.forward(inputs, seed=material.seed)
        else:
            raise BugError("a backward was asked for without a gradient or targets")
        grad_input, gradients = self.part.backward(graph, gradient)
        if grad_input is None:
            return Contributed(None, loss_sum, tokens), gradients
        context = _coming_back((material.step, material.microbatch))
        return Contributed(self._encode(grad_input, "gradient of the input", context), loss_sum, tokens), gradients

    def _encode(self, tensor: torch.Tensor, what: str, context: EncodeContext) -> memoryview:
        """What is not finite is refused by whoever gets it, who would then be blamed for it."""
        _check_finite(tensor, what)
        return self._specs.codec.encode(tensor, context)


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
        _check_finite(hidden, "embedding")
        return with_starts(self._specs.codec.encode(hidden, going_forward(place)), positions), graph

    def loss(self, payload: Payload, targets: torch.Tensor, place: Place) -> tuple[float, int, memoryview, Gradients]:
        """Last stage's output → loss sum, targets counted, gradient bytes for the way back, head gradients."""
        payload, _ = self._specs.parted(payload)  # no layer of the ends looks across a row
        hidden = self._specs.codec.decode(payload, self._specs.activation, check_finite=True).to(self._device)
        loss_sum, tokens, grad_hidden, gradients = self.part.loss(hidden, targets)
        _check_loss(loss_sum)
        _check_finite(grad_hidden, "gradient of the loss")
        return loss_sum, tokens, self._specs.codec.encode(grad_hidden, _coming_back(place)), gradients

    def finish(self, graph: Graph, payload: Payload, head_gradients: Gradients, place: Place) -> None:
        """Input gradient from the first stage → the microbatch is in the ends' open step, once, whether it was before
        or not. Raises WrongStep when that step has been closed meanwhile."""
        step, microbatch = place
        _check_step(self.part, step)
        gradient = self._specs.codec.decode(payload, self._specs.activation, check_finite=True).to(self._device)
        embedding_gradients = self.part.embed_backward(graph, gradient)
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
        decoded = self._specs.codec.decode(material.gradient, self._specs.activation, check_finite=True)
        return [*self.part.embed_backward(graph, decoded.to(self._device)), *head]


def _check_loss(loss_sum: float) -> None:
    if not math.isfinite(loss_sum):
        raise Violation(f"the loss is {loss_sum}")


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise Violation(f"the {what} is not finite")


def _check_step(part: StagePart | EndsPart, step: int) -> None:
    """Work that waited in line behind the swap would else be added to the next step."""
    if part.step + 1 != step:
        raise WrongStep(f"step {step} is not open any more, step {part.step + 1} is")


def _change(part: StagePart | EndsPart, microbatch: MicrobatchId, gradients: Gradients) -> None:
    """Add the microbatch to the open step's sum, or take it out where it is in. The last thing that is done for it, so
    that whatever failed before has changed nothing. A change that broke off half-way cannot be mended: BugError, which
    ends the replica; one that found no memory before it began comes out as it is."""
    held = microbatch in part.microbatches
    try:
        (part.reverse if held else part.accumulate)(microbatch, gradients)
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
        if len(self._norms) >= self._warmup:
            limit = self._factor * max(median(self._norms), 1e-12)
            if norm > limit:
                return f"gradient norm {norm:.3g} from {sender} exceeds {limit:.3g}, {self._factor:g} times the median"
        self._norms.append(norm)
        return None

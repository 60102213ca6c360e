"""What runs on the device thread for one microbatch: decode, differentiate, encode. Synchronous, no network.

Payloads are wire bytes; B is the microbatch size, T the context, D the model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swarm.compression.codec import Codec
from swarm.compression.dense import INT32
from swarm.errors import BugError, PeerError, Violation
from swarm.ids import MicrobatchId, PeerId
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Payload
from swarm.pipeline.gate import NormGate

Graph = Any
Gradients = Any


class StagePart(Protocol):
    """The trained part of a stage; implemented by ``optimization.part``."""

    def forward(self, x: torch.Tensor, *, seed: int, graph: bool = True) -> tuple[torch.Tensor, Graph]:
        """(B, T, D) or, hosted first stage, (B, T) int64 → (B, T, D) and what backward needs."""

    def forward_loss(self, x: torch.Tensor, targets: torch.Tensor, *, seed: int) -> tuple[float, int, Graph]:
        """Hosted last stage: the sum of the loss, the number of targets counted, and what backward needs."""

    def backward(self, graph: Graph, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Gradients]:
        """Gradient of the input (None for token ids) and of every parameter, separate for this microbatch."""

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Add to the open step, once. Raises Violation for non-finite gradients, before anything is added."""


class EndsPart(Protocol):
    """The private ends on a trainer; implemented by ``optimization.part``."""

    def embed(self, tokens: torch.Tensor, *, seed: int) -> tuple[torch.Tensor, Graph]:
        """(B, T) int64 → (B, T, D)."""

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[float, int, torch.Tensor, Gradients]:
        """Loss sum, targets counted, gradient of ``hidden``, gradients of norm and head."""

    def embed_backward(self, graph: Graph, grad: torch.Tensor) -> Gradients:
        """Gradients of the embedding."""

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """As for a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySpecs:
    """What crosses a stage boundary in this run, and how it is encoded."""

    activation: TensorSpec
    tokens: TensorSpec
    codec: Codec
    hosted: bool

    @property
    def activation_bytes(self) -> int:
        """Exact size of an activation's or a boundary gradient's payload."""
        return self.codec.wire_bytes(self.activation)

    @property
    def token_bytes(self) -> int:
        """Exact size of hosted token ids or targets, (B, T)."""
        return INT32.wire_bytes(self.tokens)


class StageCompute:
    """One replica's work on one microbatch, from payload to payload."""

    def __init__(self, part: StagePart, specs: BoundarySpecs, device: torch.device) -> None:
        self.part, self._specs, self._device = part, specs, device
        self._gate = NormGate()

    def _activation(self, payload: Payload) -> torch.Tensor:
        return self._specs.codec.decode(payload, self._specs.activation, check_finite=True).to(self._device)

    def _input(self, payload: Payload, first: bool) -> torch.Tensor:
        if first and self._specs.hosted:
            return INT32.decode(payload, self._specs.tokens).to(self._device)
        return self._activation(payload)

    def forward(self, payload: Payload, seed: int, *, first: bool) -> tuple[memoryview, Graph]:
        """Input bytes → output bytes and the graph."""
        output, graph = self.part.forward(self._input(payload, first), seed=seed)
        return self._specs.codec.encode(output), graph

    def backward(self, graph: Graph, payload: Payload, microbatch: MicrobatchId, sender: PeerId) -> memoryview | None:
        """Output-gradient bytes → input-gradient bytes; the microbatch is in the open step afterwards.

        Raises Violation, having added nothing, for a non-finite gradient or one that the norm gate refuses.
        """
        gradient = self._activation(payload)
        refusal = self._gate.check(sender, float(torch.linalg.vector_norm(gradient.float())))
        if refusal is not None:
            raise Violation(refusal, peer=sender)
        grad_input, gradients = self.part.backward(graph, gradient)
        encoded = None if grad_input is None else self._specs.codec.encode(grad_input)
        _accumulate(self.part, microbatch, gradients)
        return encoded

    def forward_backward(
        self, payload: Payload, targets: Payload, seed: int, microbatch: MicrobatchId, *, first: bool
    ) -> tuple[memoryview | None, float, int]:
        """Hosted last stage: both directions at once. Returns input-gradient bytes, loss sum, targets counted."""
        labels = INT32.decode(targets, self._specs.tokens).to(self._device)
        loss_sum, tokens, graph = self.part.forward_loss(self._input(payload, first), labels, seed=seed)
        _check_loss(loss_sum)
        grad_input, gradients = self.part.backward(graph, None)
        encoded = None if grad_input is None else self._specs.codec.encode(grad_input)
        _accumulate(self.part, microbatch, gradients)
        return encoded, loss_sum, tokens


class EndsCompute:
    """A trainer's private ends on one microbatch."""

    def __init__(self, part: EndsPart, specs: BoundarySpecs, device: torch.device) -> None:
        self.part, self._specs, self._device = part, specs, device

    def embed(self, tokens: torch.Tensor, seed: int) -> tuple[memoryview, Graph]:
        """Token ids → activation bytes for the first stage."""
        hidden, graph = self.part.embed(tokens.to(self._device), seed=seed)
        return self._specs.codec.encode(hidden), graph

    def loss(self, payload: Payload, targets: torch.Tensor) -> tuple[float, int, memoryview, Gradients]:
        """Last stage's output → loss sum, targets counted, gradient bytes for the way back, head gradients."""
        hidden = self._specs.codec.decode(payload, self._specs.activation, check_finite=True).to(self._device)
        loss_sum, tokens, grad_hidden, gradients = self.part.loss(hidden, targets.to(self._device))
        _check_loss(loss_sum)
        return loss_sum, tokens, self._specs.codec.encode(grad_hidden), gradients

    def finish(self, graph: Graph, payload: Payload, head_gradients: Gradients, microbatch: MicrobatchId) -> None:
        """Input gradient from the first stage → the microbatch is in the ends' open step."""
        gradient = self._specs.codec.decode(payload, self._specs.activation, check_finite=True).to(self._device)
        embedding_gradients = self.part.embed_backward(graph, gradient)
        _accumulate(self.part, microbatch, [*embedding_gradients, *head_gradients])


def _check_loss(loss_sum: float) -> None:
    if not math.isfinite(loss_sum):
        raise Violation(f"the loss is {loss_sum}")


def _accumulate(part: StagePart | EndsPart, microbatch: MicrobatchId, gradients: Gradients) -> None:
    """The last thing that is done for a microbatch, so that whatever failed before has added nothing.

    A sum that broke off half-way cannot be mended: BugError, which ends the replica.
    """
    try:
        part.accumulate(microbatch, gradients)
    except (PeerError, BugError):
        raise
    except Exception as error:
        raise BugError(f"the open step's sum is spoilt: {type(error).__name__}: {error}") from error

"""What travels between the stages of a test's pipeline, and cheap parts that compute it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.compression.codec import EncodeContext
from swarm.compression.dense import FLOAT32, INT32
from swarm.errors import BugError
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.passes import Bound
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Answer, AnyMethod, Incoming, Payload, Rpc
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.messages import (
    ADOPT,
    ATTEND,
    BACKWARD,
    BLOCKED,
    DROP,
    FORWARD,
    GRADIENT,
    HOP,
    OUTPUT,
    RECALL,
    RESEND,
    TARGETS,
    TRAINER_RECALL,
)
from swarm.sim.network import SimEndpoint

TRAINER, THIEF = PeerId("tr"), PeerId("thief")
CONTEXT = EncodeContext(step=1, direction="forward")
ACTIVATION, TOKENS = TensorSpec((1, 2, 4), "float32"), TensorSpec((1, 2), "int64")
ACTIVATION_BYTES, TOKEN_BYTES = 32, 8
RPCS: tuple[Rpc[Any, Any], ...] = (
    FORWARD,
    TARGETS,
    BACKWARD,
    RESEND,
    ADOPT,
    DROP,
    RECALL,
    ATTEND,
    TRAINER_RECALL,
    OUTPUT,
    GRADIENT,
    HOP,
    BLOCKED,
)
BY_KIND = {rpc.request: rpc for rpc in RPCS}


def specs(*, hosted: bool = False) -> BoundarySpecs:
    """Return the specs of eight float32 per activation."""
    return BoundarySpecs(activation=ACTIVATION, tokens=TOKENS, codec=FLOAT32, hosted=hosted)


def microbatch(position: int, trainer: PeerId = TRAINER) -> MicrobatchId:
    """Return a microbatch of a trainer."""
    return MicrobatchId(trainer, "00" * 8, 0, position)


def tensor(value: float) -> bytes:
    """Return an activation or a boundary gradient that is ``value`` everywhere."""
    return bytes(FLOAT32.encode(torch.full(ACTIVATION.shape, value), CONTEXT))


def token_ids() -> bytes:
    """Return hosted inputs or targets."""
    return bytes(INT32.encode(torch.ones(TOKENS.shape, dtype=torch.int64), CONTEXT))


def value(payload: Payload) -> float:
    """Return the first element."""
    return float(FLOAT32.decode(bytes(payload), ACTIVATION)[0, 0, 0])


@dataclass(eq=False)
class FakeGraph:
    """What a forward leaves behind; weakly referenced by tests."""

    input: torch.Tensor


@dataclass(eq=False)
class FakeRest:
    """What a backward leaves to do; weakly referenced by tests."""

    gradient: float
    bytes: int = 100


class CheapPart:
    """Doubles on the way out, adds one on the way back. Each hook may raise instead."""

    def __init__(self) -> None:
        self.held: dict[MicrobatchId, float] = {}
        self.on: dict[str, Callable[[], None]] = {}
        self.scale = 2.0
        self.embedded = 1.0
        self.loss_value = 3.0
        self.graphs: list[Any] = []
        self.step = 0

    def is_open(self, step: int) -> bool:
        """See :class:`~swarm.pipeline.compute.OpenPart`."""
        return step == self.step + 1

    def computes(self, version: int) -> bool:
        """See :class:`~swarm.pipeline.compute.OpenPart`."""
        return version == self.step

    def accumulated(self, step: int) -> frozenset[StepWork]:
        """See :class:`~swarm.pipeline.compute.OpenPart`."""
        return frozenset(StepWork(step, microbatch) for microbatch in self.held)

    def reverse(self, work: StepWork, gradients: Any) -> None:
        """See :class:`~swarm.pipeline.compute.OpenPart`."""
        if self.held.pop(work.microbatch) != gradients:
            raise BugError(f"{work} was added with other gradients")

    def take_all_out(self, step: int) -> None:
        """See :class:`~swarm.pipeline.compute.OpenPart`."""
        self.held.clear()

    def _hook(self, name: str) -> None:
        if name in self.on:
            self.on[name]()

    def forward(self, x: torch.Tensor, *, seed: int, work: StepWork, graph: bool = True) -> tuple[torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("forward")
        return (x if x.is_floating_point() else torch.ones(ACTIVATION.shape)) * self.scale, FakeGraph(x)

    def forward_loss(
        self, x: torch.Tensor, targets: torch.Tensor, *, seed: int, work: StepWork
    ) -> tuple[float, int, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("forward")
        return self.loss_value, targets.numel(), FakeGraph(x)

    def backward_input(self, graph: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("backward")
        if graph.input is None:
            raise BugError("a graph was used for a second backward")
        gradient = torch.ones(ACTIVATION.shape) if grad_output is None else grad_output
        of_tokens, graph.input = not graph.input.is_floating_point(), None
        return None if of_tokens else gradient + 1, FakeRest(float(gradient.sum()))

    def backward_weights(self, rest: Any) -> Any:
        """See :class:`~swarm.pipeline.compute.StagePart`."""
        self._hook("weights")
        return rest.gradient

    def check(self, gradients: Any) -> None:
        """See :class:`~swarm.pipeline.compute.StagePart`."""

    def accumulate(self, work: StepWork, gradients: Any, *, checked: bool = False, bound: Bound | None = None) -> None:
        """See :class:`~swarm.pipeline.compute.OpenPart`."""
        self._hook("accumulate")
        if work.microbatch in self.held:
            raise BugError(f"{work} is already in the sum")
        self.held[work.microbatch] = gradients

    # --- the private ends -----------------------------------------------------------------------------------------

    def embed(self, tokens: torch.Tensor, *, seed: int, work: StepWork) -> tuple[torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.EndsPart`."""
        return torch.full(ACTIVATION.shape, self.embedded), FakeGraph(tokens)

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, work: StepWork
    ) -> tuple[float, int, torch.Tensor, Any]:
        """See :class:`~swarm.pipeline.compute.EndsPart`."""
        self._hook("loss")
        return self.loss_value, targets.numel(), torch.ones(ACTIVATION.shape), []

    def embed_backward(self, graph: Any, grad: torch.Tensor) -> Any:
        """See :class:`~swarm.pipeline.compute.EndsPart`."""
        return [float(grad.sum())]


def failing(error: BaseException) -> Callable[[], None]:
    """Return a hook that raises."""

    def hook() -> None:
        raise error

    return hook


class Mailbox:
    """Takes every message and keeps it; or answers with an error that the test chose for the method."""

    def __init__(self, endpoint: SimEndpoint, methods: Sequence[Rpc[Any, Any]] = RPCS) -> None:
        self.endpoint, self._methods = endpoint, methods
        self.mail: list[tuple[str, Any, bytes]] = []
        self.errors: dict[Rpc[Any, Any], Exception] = {}
        endpoint.mount(self)

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [rpc.handled_with_payload(self._handler(rpc), admit=lambda *about: None) for rpc in self._methods]

    def _handler(self, rpc: Rpc[Any, Any]) -> Any:
        async def handle(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
            if rpc in self.errors:
                raise self.errors[rpc]
            if rpc is ATTEND:
                await asyncio.Event().wait()
            self.mail.append((rpc.name.rpartition("/")[2], body, bytes(incoming.payload)))
            return Answer(rpc.reply())

        return handle

    def of(self, verb: str) -> list[Any]:
        """Return the bodies of one kind."""
        return [body for name, body, _ in self.mail if name == verb]

    def payloads(self, verb: str) -> list[float]:
        """Return the first elements of the tensors of one kind."""
        return [value(payload) for name, _, payload in self.mail if name == verb]

    async def call(self, target: PeerId, body: Any, payload: Payload = b"") -> None:
        """Send something to a replica or a trainer."""
        await self.endpoint.call(target, BY_KIND[type(body)], body, timeout_s=5, payload=payload)

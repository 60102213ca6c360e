"""What the rigs of several layers share: the run, signatures, work without a thread, kept events, and asking a service
without a network."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from swarm.events import EventList as EventList
from swarm.events import EventT as EventT
from swarm.ids import MicrobatchId, PeerId, RunId, StepWork
from swarm.network.protocols import Incoming, Service
from swarm.phases import OnePhase
from swarm.pipeline.trainer.issued import IssuedTable
from swarm.pipeline.trainer.journey import IssuedMicrobatch
from swarm.schema import Message

T = TypeVar("T")

RUN = RunId("ab" * 32)
"""The run of all who do not care which."""
NOTHING_BESIDE = Incoming(memoryview(b""), 1e9)
"""No payload, and all the time there is."""
NO_BATCH: Any = None


def sign(peer: PeerId, data: bytes) -> bytes:
    """Return 64 bytes that :func:`verify` accepts. Anybody could make them; nobody in these tests does."""
    return hashlib.sha512(peer.encode() + data).digest()


def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Return whether :func:`sign` made the signature."""
    return signature == sign(peer, data)


def issued(step: int, microbatch: MicrobatchId) -> IssuedMicrobatch:
    """Return a row of a trainer's table of which nobody wants the tensors."""
    return IssuedMicrobatch(StepWork(step, microbatch), NO_BATCH)


def set_aside(table: IssuedTable, step: int, microbatch: MicrobatchId) -> None:
    """As a trainer does with a microbatch that cannot be computed, if it counts."""
    row = table.find(StepWork(step, microbatch))
    if row is not None and row.standing == "counts":
        row.standing = "set aside"


async def asked(service: Service, body: Message, caller: PeerId) -> Any:
    """Return what the service answers to this body; its kind says which of the methods is meant."""
    method = next(each for each in service.methods() if each.rpc.request is type(body))
    return (await method.handle(caller, body, NOTHING_BESIDE)).body


async def inline(work: Callable[..., T], /, *args: Any) -> T:
    """Run on the loop, at once, what else runs in a thread."""
    return work(*args)


class InlineDevice(OnePhase):
    """A device thread that is the loop itself, whose work ``gate`` holds up.

    What is held up is done even when its awaiter is cancelled, as on the real one. With ``forgets`` it is not: a gate
    that is never opened leaves no task behind.
    """

    def __init__(self, *, forgets: bool = False) -> None:
        self.gate: asyncio.Event | None = None
        self._forgets = forgets
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def torch_device(self) -> torch.device:
        """See :class:`swarm.device.DeviceThread`."""
        return torch.device("cpu")

    def free_memory(self) -> int:
        """See :class:`swarm.device.DeviceThread`."""
        return 1 << 40

    free_host_memory = free_memory

    async def run(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """See :class:`swarm.device.DeviceThread`."""
        if self.gate is None:
            return fn(*args)
        if self._forgets:
            return await self._later(self.gate, fn, *args)
        work = asyncio.ensure_future(self._later(self.gate, fn, *args))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await asyncio.shield(work)

    async def _later(self, gate: asyncio.Event, fn: Callable[..., Any], /, *args: Any) -> Any:
        await gate.wait()
        return fn(*args)

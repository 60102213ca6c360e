"""One member of ours in the benchmark ``allreduce-kill``: ``python -m tests.benchmarks._allreduce_ours HOME SLOT``.

It runs what a peer of a run averages with: daemon, endpoint, :class:`AllReduce`. A result is held until an order says
that all live members reported the same one, as a close record would; then it replaces the member's numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.messages import AGREE, CHUNK
from swarm.averaging.allreduce.output import Floats, weighted_mean
from swarm.averaging.allreduce.plan import RoundKey, RoundPlan, WireType
from swarm.clock import SystemClock
from swarm.errors import RoundFailed
from swarm.ids import PeerId, RunId, stage_part
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.protocols import Answer, AnyMethod, Endpoint, Incoming, Rpc, Service
from tests.benchmarks._allreduce_load import SIGNED, TIMEOUT_S, Fuse, Kill, Vector, vector_of
from tests.benchmarks._pipeline_load import threads
from tests.benchmarks._worker import orders, say

RUN = RunId("4a" * 32)


@dataclass(frozen=True, slots=True)
class _Tapped:
    """A service whose every handler passes through ``tap``."""

    inner: Service
    tap: FusedEndpoint

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [replace(method, handle=self.tap.handler(method)) for method in self.inner.methods()]


class FusedEndpoint:
    """A real endpoint that notes what passes it for the round's fuse, and is otherwise that endpoint."""

    def __init__(self, inner: LibP2PEndpoint) -> None:
        self._inner = inner
        self.light(Fuse(None, {}), others=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def light(self, fuse: Fuse, others: int) -> None:
        """A round with so many other members begins."""
        self.fuse, self._unheard = fuse, others
        self._heard_all, self._signing = asyncio.Event(), asyncio.Lock()

    def mount(self, service: Service) -> None:
        """See :class:`~swarm.network.protocols.Endpoint`."""
        self._inner.mount(_Tapped(service, self))

    def handler(self, method: AnyMethod) -> Any:
        """The method's own, with a note of each answer before it leaves."""

        async def handle(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
            answer = await method.handle(caller, body, incoming)
            if method.rpc == CHUNK:
                self.fuse.note("answered")
            elif method.rpc == AGREE:
                self._unheard -= 1
                if not self._unheard:
                    self._heard_all.set()
            return answer

        return handle

    async def call(self, target: PeerId, rpc: Rpc[Any, Any], *args: Any, **options: Any) -> Any:
        """See :class:`~swarm.network.protocols.Endpoint`.

        Where the victim is to die between two signatures, they leave one by one, and not before everybody else's has
        come and been acknowledged: otherwise who was told would fail because it could not tell.
        """
        if rpc == CHUNK:
            self.fuse.note("sent")
        if rpc != AGREE or self.fuse.event != SIGNED:
            return await self._inner.call(target, rpc, *args, **options)
        await self._heard_all.wait()
        async with self._signing:
            answer = await self._inner.call(target, rpc, *args, **options)
            self.fuse.note(SIGNED)
            return answer


class Member:
    """Its numbers, the result it holds, and the all-reduce."""

    def __init__(self, endpoint: LibP2PEndpoint, slot: int, elements: int) -> None:
        self._tapped, self._slot, self._elements = FusedEndpoint(endpoint), slot, elements
        tapped = cast(Endpoint, self._tapped)
        self._allreduce = AllReduce(tapped, SystemClock(), reducer=self._reduce)
        self._tapped.mount(self._allreduce)
        self._numbers: Vector = vector_of(0, slot, "whole", elements)
        self._held: torch.Tensor | None = None
        self._before = ""

    def _reduce(self, sums: Mapping[PeerId, Floats], order: Sequence[PeerId], divisor: int, dtype: WireType) -> Floats:
        result = weighted_mean(sums, order, divisor, dtype)
        self._tapped.fuse.note("reduced")
        return result

    def begin(self, number: int, kind: str) -> None:
        """Make this round's numbers."""
        self._numbers = vector_of(number, self._slot, kind, self._elements)
        self._before, self._held = _digest(self._numbers), None

    async def attempt(self, key: RoundKey, members: Sequence[PeerId], kill: Kill | None) -> dict[str, Any]:
        """One attempt at the round. ``digest`` is empty when it failed; ``kept`` says that the inputs are unharmed."""
        weights = dict.fromkeys(members, 1)
        shape: dict[str, Any] = {"elements": self._elements, "timeout_s": TIMEOUT_S, "dtype": "float32"}
        plan = RoundPlan(key=key, members=tuple(members), weights=weights, **shape)
        self._tapped.light(Fuse(kill, self._totals(plan)), len(members) - 1)
        began = time.monotonic()
        found: dict[str, Any] = {"digest": "", "error": "", "contributors": []}
        try:
            result = await self._allreduce.reduce(plan, torch.from_numpy(self._numbers))
            self._held = result.tensor
            found |= {"digest": result.digest, "contributors": list(result.contributors)}
        except RoundFailed as failure:
            self._held = None
            found["error"] = str(failure)
        found["seconds"] = time.monotonic() - began
        return found | {"kept": _digest(self._numbers) == self._before}

    def _totals(self, plan: RoundPlan) -> dict[str, int]:
        mine, others = len(plan.chunks_of(self._allreduce.peer)), len(plan.members) - 1
        return {"sent": len(plan.chunks) - mine, "reduced": mine, "answered": mine * others, SIGNED: others}

    def apply(self) -> None:
        """The result that was held becomes the member's numbers."""
        assert self._held is not None, "an order to apply what this member does not hold"
        self._numbers = self._held.numpy()


def _digest(values: Vector) -> str:
    return hashlib.sha256(values.data).hexdigest()


async def _obey(order: dict[str, Any], endpoint: LibP2PEndpoint, member: Member) -> dict[str, Any]:
    match order:
        case {"meet": dict(addresses)}:
            for peer, known in addresses.items():
                endpoint.learn(PeerId(peer), known)
        case {"begin": int(number), "kind": str(kind)}:
            member.begin(number, kind)
        case {"step": int(step), "attempt": int(attempt), "members": members, "kill": kill}:
            peers = [PeerId(peer) for peer in members]
            return await member.attempt(RoundKey(step, stage_part(0), attempt), peers, Kill(**kill) if kill else None)
        case {"apply": True}:
            member.apply()
        case {"save": str(path)}:
            member._numbers.tofile(path)
        case _:
            raise ValueError(f"an order that this member does not understand: {order}")
    return {}


async def main(home: str, slot: str, elements: str) -> None:
    """Serve orders until stdin ends."""
    threads(1)
    config = EndpointConfig(run_dir=Path(home) / "run")
    endpoint = await LibP2PEndpoint.open(config, load_or_create(Path(home) / "identity.key"), SystemClock())
    try:
        await endpoint.enter(RUN)
        member = Member(endpoint, int(slot), int(elements))
        addresses = endpoint.addresses
        say({"peer": endpoint.peer, "addresses": addresses, "pid": os.getpid(), "daemon": endpoint.daemon_pid})
        async for order in orders():
            say(await _obey(order, endpoint, member))
    finally:
        await endpoint.close()

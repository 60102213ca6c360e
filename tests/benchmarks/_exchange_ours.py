"""One member of ours in the benchmark ``allreduce``: ``python -m tests.benchmarks._exchange_ours HOME SLOT``.

It runs what a peer of a run averages with: daemon, endpoint, :class:`AllReduce`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.plan import RoundKey, RoundResult
from swarm.averaging.allreduce.round import RoundCall, average, plan_rounds
from swarm.averaging.strategies import STRATEGIES
from swarm.clock import SystemClock
from swarm.device import keep_freed_memory
from swarm.events import Event
from swarm.ids import PeerId, RunId, stage_part
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from tests.benchmarks._exchange_load import TIMEOUT_S, error_of, vector_of
from tests.benchmarks._exchange_meter import Meter
from tests.benchmarks._pipeline_load import threads
from tests.benchmarks._worker import orders, say

RUN = RunId("4b" * 32)


class _Unheard:
    def emit(self, event: Event) -> None:
        """Nobody listens."""


class Member:
    """Its numbers, the last result, and the all-reduce."""

    def __init__(self, endpoint: LibP2PEndpoint, slot: int, codec: str, elements: int) -> None:
        self._endpoint, self._codec = endpoint, codec
        self._allreduce = AllReduce(endpoint, SystemClock())
        endpoint.mount(self._allreduce)
        self._numbers = torch.from_numpy(vector_of(slot, elements))
        self._result: RoundResult | None = None
        self._meter = Meter({"peer": [os.getpid()], "daemon": [endpoint.daemon_pid]}, elements)

    async def round(self, number: int, members: Sequence[PeerId]) -> dict[str, Any]:
        """From the roster to a result that all signed; ``exchange_s`` leaves out the plan alone."""
        self._result = None
        self._meter.begin()
        began = time.monotonic()
        call = RoundCall(
            key=RoundKey(number, stage_part(0), 0),
            replicas=members,
            weights=dict.fromkeys(members, 1),
            elements=len(self._numbers),
            timeout_s=TIMEOUT_S,
            codec=self._codec,
        )
        plans = plan_rounds(call, STRATEGIES["everyone"], self._endpoint.peer)
        self._result = await average(self._allreduce, plans, self._numbers, _Unheard())
        seconds = time.monotonic() - began
        used = self._meter.end()
        return used | {"round_s": seconds, "exchange_s": self._result.seconds, "digest": self._result.digest}

    def error(self, peers: int) -> float:
        """See :func:`error_of`."""
        assert self._result is not None
        return error_of(self._result.tensor.numpy(), peers)


async def _obey(order: dict[str, Any], endpoint: LibP2PEndpoint, member: Member) -> dict[str, Any]:
    match order:
        case {"meet": dict(addresses)}:
            for peer, known in addresses.items():
                endpoint.learn(PeerId(peer), known)
        case {"round": int(number), "members": members}:
            return await member.round(number, [PeerId(peer) for peer in members])
        case {"error": int(peers)}:
            return {"error": member.error(peers)}
        case _:
            raise ValueError(f"an order that this member does not understand: {order}")
    return {}


async def main(home: str, slot: str, codec: str, elements: str) -> None:
    """Serve orders until stdin ends."""
    threads(1)
    keep_freed_memory()
    config = EndpointConfig(run_dir=Path(home) / "run")
    endpoint = await LibP2PEndpoint.open(config, load_or_create(Path(home) / "identity.key"), SystemClock())
    try:
        await endpoint.enter(RUN)
        member = Member(endpoint, int(slot), codec, int(elements))
        say({"peer": endpoint.peer, "addresses": endpoint.addresses})
        async for order in orders():
            say(await _obey(order, endpoint, member))
    finally:
        await endpoint.close()

"""A peer that is no member of the run: it floods whom it is told to, or takes what another sends and refuses it.

A worker that says its addresses, and answers ``{"to": …, "addresses": […], "seconds": …}`` with what it sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from peers.chaos.strangers.attacks import PlainBody
from peers.chaos.strangers.bodies import all_rpcs, frames
from swarm.clock import SystemClock
from swarm.errors import PeerError
from swarm.ids import PeerId, RunId
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.protocols import Rpc
from swarm.network.rpc.strangers import MAX_STRANGER_BODY_BYTES
from swarm.schema import Empty
from tests.benchmarks._worker import orders, say

BYTES_A_SECOND = 1e6
SEED, EACH, LEAST_BYTES = 5, 16, 8 << 10
AT_ONCE = 48
"""Calls that wait for an answer: below what a stranger is cut off for."""
ANSWER_S = 5.0


Shot = tuple[Rpc[PlainBody, Empty], PlainBody, int]


def shots() -> list[Shot]:
    """The longer ones of fuzzed frames of every method, with their sizes, in turns."""
    by_method = [
        [
            (Rpc(rpc.name, PlainBody, Empty), PlainBody(content=msgpack.unpackb(packed, use_list=False)), len(packed))
            for packed in frames(rpc, EACH, SEED, MAX_STRANGER_BODY_BYTES)
            if len(packed) >= LEAST_BYTES
        ]
        for rpc in all_rpcs()
        if not rpc.public
    ]
    return [made[number] for number in range(EACH) for made in by_method if number < len(made)]


class Flood:
    """A megabyte a second to one peer."""

    def __init__(self, endpoint: LibP2PEndpoint, ammunition: Sequence[Shot]) -> None:
        self._endpoint, self._shots = endpoint, ammunition
        self._free = asyncio.Semaphore(AT_ONCE)
        self._outcomes = Counter[str]()
        self._sent = 0

    async def run(self, target: PeerId, seconds: float) -> dict[str, Any]:
        """Send for so long; returns bytes sent, and how the calls ended."""
        loop = asyncio.get_running_loop()
        began, number = loop.time(), 0
        async with asyncio.TaskGroup() as group:
            while loop.time() < began + seconds:
                await self._free.acquire()
                shot = self._shots[number % len(self._shots)]
                number += 1
                group.create_task(self._send(target, shot))
                self._sent += shot[2]
                await asyncio.sleep(max(0.0, began + self._sent / BYTES_A_SECOND - loop.time()))
        return {"bytes": self._sent, "outcomes": self._outcomes}

    async def _send(self, target: PeerId, shot: Shot) -> None:
        rpc, body, _ = shot
        try:
            await self._endpoint.call(target, rpc, body, timeout_s=ANSWER_S)
            self._outcomes["answered"] += 1
        except PeerError as error:
            self._outcomes[type(error).__name__] += 1
        finally:
            self._free.release()


async def main(home: str, run: str) -> None:
    """Open an endpoint that enters the run's protocols, and do what is asked."""
    ammunition = shots()
    identity = load_or_create(Path(home) / "identity.key")
    endpoint = await LibP2PEndpoint.open(EndpointConfig(run_dir=Path(home) / "run"), identity, SystemClock())
    try:
        await endpoint.enter(RunId(run))
        say({"peer": endpoint.peer, "addresses": endpoint.addresses})
        async for asked in orders():
            target = PeerId(asked["to"])
            endpoint.learn(target, asked["addresses"])
            say(await Flood(endpoint, ammunition).run(target, asked["seconds"]))
    finally:
        await endpoint.close()

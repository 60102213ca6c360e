"""A peer that is no member of the run: it floods whom it is told to, or takes what another sends and refuses it.

``python -m tests.benchmarks._doors_stranger HOME RUN`` makes its home and prints its addresses as a line of JSON,
reads lines ``{"to": …, "addresses": […], "seconds": …}``, and answers each with what it sent. It ends when its input
ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import uvloop

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


async def main(home: Path, run: RunId) -> None:
    """Open an endpoint that enters the run's protocols, and do what is asked."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ammunition = shots()
    identity = load_or_create(home / "identity.key")
    endpoint = await LibP2PEndpoint.open(EndpointConfig(run_dir=home / "run"), identity, SystemClock())
    try:
        await endpoint.enter(run)
        print(json.dumps({"peer": endpoint.peer, "addresses": endpoint.addresses}), flush=True)
        while line := await reader.readline():
            asked = json.loads(line)
            target = PeerId(asked["to"])
            endpoint.learn(target, asked["addresses"])
            print(json.dumps(await Flood(endpoint, ammunition).run(target, asked["seconds"])), flush=True)
    finally:
        await endpoint.close()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(mode=0o700)
    uvloop.run(main(Path(sys.argv[1]), RunId(sys.argv[2])))

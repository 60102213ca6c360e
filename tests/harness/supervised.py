"""Endpoints of the real network whose events a test can see, and whose daemon it can kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarm.clock import SystemClock
from swarm.errors import PeerError, Unreachable
from swarm.events import DaemonRestarted, Event
from swarm.ids import PeerId, RunId
from swarm.network.addresses import parse_address
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from tests.harness.expect import LOOK_EVERY_S, eventually
from tests.harness.mortal_peer import RUN
from tests.harness.rigs.network import ECHO, Note, ServiceBench

# Who announces only an address where nobody listens cannot be dialled, also on loopback.
HIDDEN: dict[str, Any] = {"behind_nat": True, "announce": [parse_address("/ip4/127.0.0.1/tcp/1", peer=False)]}


class Sink:
    """Events, and what a test does at one of them, at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at: dict[type[Event], Callable[[], object]] = {}

    def emit(self, event: Event) -> None:
        """See EventSink."""
        self.events.append(event)
        self.at.get(type(event), lambda: None)()

    def count(self, kind: type[Event]) -> int:
        """How many there were."""
        return sum(isinstance(event, kind) for event in self.events)


class Peer:
    """An endpoint with the test methods, and its events."""

    def __init__(self, endpoint: LibP2PEndpoint, sink: Sink) -> None:
        self.endpoint, self.sink, self.bench = endpoint, sink, ServiceBench()
        endpoint.mount(self.bench)

    def kill_daemon(self) -> None:
        """Without a word."""
        os.kill(self.endpoint.daemon_pid, signal.SIGKILL)

    async def restarted(self, times: int = 1) -> None:
        """Until its daemon has been replaced so many times in all."""
        await eventually(lambda: self.sink.count(DaemonRestarted) >= times, deadline_s=60, what="the restart")

    async def ask(self, other: Peer, timeout_s: float = 20.0) -> int:
        """One call that is answered with 7."""
        return await self.ask_at(other.endpoint.peer, timeout_s)

    async def ask_at(self, peer: PeerId, timeout_s: float = 20.0) -> int:
        """As :meth:`ask`, of a peer in another process."""
        return (await self.endpoint.call(peer, ECHO, Note(number=7), timeout_s=timeout_s))[0].number

    async def ask_until_answered(self, other: Peer, deadline_s: float = 30.0) -> None:
        """As somebody who depends on the other and is told that it is gone."""
        async with asyncio.timeout(deadline_s):
            while True:
                with contextlib.suppress(PeerError):
                    await self.ask(other, timeout_s=1.0)
                    return
                await asyncio.sleep(LOOK_EVERY_S)

    async def ask_until_refused(self, other: Peer, deadline_s: float = 30.0) -> None:
        """Until a call finds the other gone."""
        async with asyncio.timeout(deadline_s):
            with contextlib.suppress(Unreachable):
                while True:
                    await self.ask(other)

    async def announce(self) -> None:
        """Its record, for a minute."""
        record = PeerRecord(
            role="stage", name="p", incarnation=1, status="ready", step=0, addresses=self.endpoint.addresses
        )
        await self.endpoint.directory.announce(record, ttl_s=60)

    async def found(self) -> dict[PeerId, PeerRecord]:
        """The records that it sees."""
        return await self.endpoint.directory.lookup(PeerRecord)

    async def finds(self, right: Callable[[dict[PeerId, PeerRecord]], bool], deadline_s: float = 30.0) -> None:
        """Until it sees the right ones."""
        async with asyncio.timeout(deadline_s):
            while not right(await self.found()):  # noqa: ASYNC110 - a directory tells nobody of changes
                await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def opened(
    home: Path, name: str, *known: Peer | str, run: RunId | None = RUN, **config: Any
) -> AsyncIterator[Peer]:
    """One that comes through these peers, or addresses, and has entered a run, if any."""
    told = [each if isinstance(each, str) else each.endpoint.addresses[0] for each in known]
    chosen = EndpointConfig(run_dir=home / name, bootstrap=[parse_address(text) for text in told], **config)
    sink = Sink()
    endpoint = await LibP2PEndpoint.open(chosen, load_or_create(home / f"{name}.key"), SystemClock(), sink)
    try:
        if run is not None:
            await endpoint.enter(run)
        yield Peer(endpoint, sink)
    finally:
        await endpoint.close()


def introduce(*peers: Peer) -> None:
    """Tell each where the others are."""
    for one in peers:
        for other in peers:
            one.endpoint.learn(other.endpoint.peer, other.endpoint.addresses)

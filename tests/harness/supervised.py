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
from swarm.events import DaemonRestarted, Event, EventSink, NullSink
from swarm.ids import PeerId, RunId
from swarm.network.addresses import parse_address
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from tests.harness.expect import LONG_S, LOOK_EVERY_S, eventually
from tests.harness.mortal_peer import RUN
from tests.harness.rigs.network import ECHO, Note, ServiceBench

# Who announces only an address where nobody listens cannot be dialled, also on loopback.
HIDDEN: dict[str, Any] = {"behind_nat": True, "announce": [parse_address("/ip4/127.0.0.1/tcp/1", use="announce")]}


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
        await eventually(lambda: self.sink.count(DaemonRestarted) >= times, what="the restart")

    async def ask(self, other: Peer, timeout_s: float = LONG_S) -> int:
        """One call that is answered with 7."""
        return await self.ask_at(other.endpoint.peer, timeout_s)

    async def ask_at(self, peer: PeerId, timeout_s: float = LONG_S) -> int:
        """As :meth:`ask`, of a peer in another process."""
        return (await self.endpoint.call(peer, ECHO, Note(number=7), timeout_s=timeout_s))[0].number

    async def ask_until_answered(self, other: Peer) -> int:
        """As somebody who depends on the other and is told that it is gone: how often it was."""
        refusals = 0
        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    await self.ask(other, timeout_s=5.0)
                except PeerError:
                    refusals += 1
                    await asyncio.sleep(LOOK_EVERY_S)
                else:
                    return refusals

    async def ask_until_refused(self, other: Peer) -> None:
        """Until a call finds the other gone."""
        async with asyncio.timeout(LONG_S):
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

    async def finds(self, right: Callable[[dict[PeerId, PeerRecord]], bool]) -> None:
        """Until it sees the right ones."""
        async with asyncio.timeout(LONG_S):
            while not right(await self.found()):  # noqa: ASYNC110 - a directory tells nobody of changes
                await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def endpoint_of(
    home: Path,
    name: str,
    *known: LibP2PEndpoint | str,
    run: RunId | None = RUN,
    sink: EventSink | None = None,
    **config: Any,
) -> AsyncIterator[LibP2PEndpoint]:
    """One that comes through these endpoints, or addresses, if any, and has entered a run, if any."""
    told = [each if isinstance(each, str) else each.addresses[0] for each in known]
    chosen = EndpointConfig(run_dir=home / name, **{"bootstrap": [parse_address(text) for text in told], **config})
    endpoint = await LibP2PEndpoint.open(
        chosen, load_or_create(home / f"{name}.key"), SystemClock(), sink or NullSink()
    )
    try:
        if run is not None:
            await endpoint.enter(run)
        yield endpoint
    finally:
        await endpoint.close()


@asynccontextmanager
async def opened(
    home: Path, name: str, *known: Peer | str, run: RunId | None = RUN, **config: Any
) -> AsyncIterator[Peer]:
    """The same with the test methods and its events."""
    told, sink = [each if isinstance(each, str) else each.endpoint for each in known], Sink()
    async with endpoint_of(home, name, *told, run=run, sink=sink, **config) as endpoint:
        yield Peer(endpoint, sink)


def introduce(*peers: Peer) -> None:
    """Tell each where the others are."""
    for one in peers:
        for other in peers:
            one.endpoint.learn(other.endpoint.peer, other.endpoint.addresses)

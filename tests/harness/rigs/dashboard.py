"""A dashboard that is served to a test: what it shows is scripted, and time goes on when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from peers.control.status import MemberReport
from peers.dashboard.access import Access
from peers.dashboard.feed import StateFeed
from peers.dashboard.metrics import exposition
from peers.dashboard.overview import Overview
from peers.dashboard.server import serve
from peers.dashboard.start import open_listener
from swarm.membership.vitals import Vitals
from tests.harness.rigs.clocks import HandClock
from tests.harness.rigs.peers import PEERS, eventful
from tests.harness.sources import ROOT


def vitals(**changes: Any) -> dict[str, Any]:
    """What a member says about itself."""
    fields: dict[str, Any] = {
        "phase": "ready", "waiting_for": "", "part": "stage-0", "step": 6, "queued": 2, "under_way": 3,
        "microbatches": 9, "compute_s": 0.25, "averaging": False, "busy_s": 0.0, "waiting_s": 0.0, "idle_s": 0.0,
        "bytes_sent": 0, "bytes_received": 0, "reachability": "direct", "wall": 0.0,
    }  # fmt: skip
    return Vitals(**(fields | changes)).model_dump()


def seen(**source: str) -> Overview:
    """An overview of the eventful chain, whose steps close every second."""
    overview = Overview({"kind": "observer", "label": "a test", **source})
    for number, line in enumerate(eventful().lines):
        overview.record(line.record, 100.0 + number)
    return overview


def look(said: dict[str, dict[str, Any]], *members: MemberReport, **more: Any) -> dict[str, Any]:
    """What a peer sees, as its control socket gives it."""
    return {"members": [dataclasses.asdict(one) for one in members], "vitals": said, "round_trips": {}, **more}


def member(name: str, state: str = "member", **more: Any) -> MemberReport:
    """One of those that a peer sees."""
    fields: dict[str, Any] = {
        "role": "stage",
        "part": "stage-0",
        "link": "direct",
        "addresses": ("/ip4/10.0.0.1/tcp/1",),
    }
    return MemberReport(name=name, peer=PEERS[name], state=state, **(fields | more))


def eventful_exposition() -> str:
    """The eventful chain as Prometheus reads it, with answers of its members, so that there is every metric."""
    overview = Overview({"kind": "peer", "label": "a test"})
    for number, line in enumerate(eventful().lines):
        overview.record(line.record, float(number))
    for busy_s in (0.0, 3.0):
        overview.look({"members": [], "vitals": {PEERS["otter"]: vitals(busy_s=busy_s)}})
    return exposition(overview.document(9.0), 1).decode()


def board() -> dict[str, Any]:
    """Return the board that Grafana is given."""
    found: dict[str, Any] = json.loads((ROOT / "docker" / "observe" / "grafana-board.json").read_text())
    return found


def board_expressions() -> list[str]:
    """Return what the board's panels ask Prometheus, with its variables in it."""
    return [target["expr"] for panel in board()["panels"] for target in panel["targets"]]


class ScriptedSource:
    """A run whose next record comes with each look; ``extra`` goes into what is seen then."""

    def __init__(self, steps: int = 3) -> None:
        self.lines = eventful().lines
        self.left, self.looks = steps, 0
        self.extra: Mapping[str, Any] = {}

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`peers.dashboard.sources.RunSource`."""
        self.looks += watched
        if self.left and self.lines:
            self.left -= 1
            overview.record(self.lines.pop(0).record, 1000.0 + self.left)
        overview.look(self.extra)


class SteppedClock(HandClock):
    """Time of a feed, which sleeps between two looks."""

    async def look(self) -> None:
        """Let it look once more, and wait until it has."""
        await self._slept()
        await self.advance(1.0)
        await self._slept()

    async def _slept(self) -> None:
        for _ in range(20_000):
            if self._sleepers:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the feed does not sleep")


class ServedDashboard:
    """The dashboard, while it is served."""

    def __init__(
        self, feed: StateFeed, source: ScriptedSource, clock: SteppedClock, port: int, task: asyncio.Task[None]
    ) -> None:
        self.feed, self.source, self.clock, self.port, self.task = feed, source, clock, port, task

    async def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Ask once; header names with ``_`` for ``-``. Returns status, headers and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            asked = {"host": f"127.0.0.1:{self.port}"} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in asked.items() if value)]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            answer = await reader.read()
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *rest = head.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        return int(status.split()[1]), found, body

    async def stream(self, **headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the stream of events, and read the head of the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"GET /api/v1/events HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n{more}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head, head
        return reader, writer

    async def close(self) -> None:
        """End it as a peer does that is told to leave."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def message(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    """Return the next message of a stream, and what kind it is."""
    text = (await reader.readuntil(b"\n\n")).decode()
    kind = text.partition("event: ")[2].partition("\n")[0]
    return kind, json.loads(text.partition("data: ")[2].partition("\n")[0])


@contextlib.asynccontextmanager
async def served(
    *, token: str | None = None, steps: int = 3, narrow: bool = False, **access: Any
) -> AsyncIterator[ServedDashboard]:
    """Serve on a free port of this machine; ``narrow``: little waits on the way to who does not read."""
    listener = open_listener("--listen", "127.0.0.1", 0)
    if narrow:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
    clock, source = SteppedClock(), ScriptedSource(steps)
    overview = Overview({"kind": "peer", "label": "a test"})
    feed = StateFeed(source, overview, clock)
    rules = Access(**{"host": "127.0.0.1", "token": token} | access)
    dashboard = ServedDashboard(
        feed, source, clock, listener.getsockname()[1], asyncio.create_task(serve(feed, rules, listener))
    )
    try:
        yield dashboard
    finally:
        await dashboard.close()

"""One endpoint in a process of its own, on whatever host, moved by a test through its standard input and output.

``python -m tests.harness.far_peer HOME`` reads one JSON object per line and answers each with one line. It ends when
its input ends. :class:`FarPeer` is the test's side of it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import uvloop
from multiaddr import Multiaddr

from swarm.clock import SystemClock
from swarm.ids import PeerId, RunId
from swarm.network.discovery.manifest import ManifestService, fetch_manifest
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.reach.reachability import reachability
from tests.harness.rigs.network import UP, Note, ServiceBench

RUN = "1b" * 32
ANSWER_S = 300.0
_LINE_BYTES = 1 << 20


class PeerAnswered(Exception):
    """The far peer's command raised: ``kind`` is the exception's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class FarPeer:
    """A far peer as its test sees it: :meth:`start`, :meth:`open`, and at the end :meth:`close` or :meth:`kill`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.peer = ""
        self.addresses: list[str] = []

    @classmethod
    async def start(cls, home: Path, at: Callable[[Sequence[str]], Sequence[str]] = tuple) -> FarPeer:
        """A process that is importing what it needs. ``at`` makes a command line into one on another host."""
        command = at([sys.executable, "-m", "tests.harness.far_peer", str(home)])
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LINE_BYTES
            )
        )

    async def open(self, **config: Any) -> None:
        """Open its endpoint. ``config`` is what EndpointConfig takes, its addresses as text."""
        hello = await self.ask("open", **config)
        self.peer, self.addresses = hello["peer"], hello["addresses"]

    async def ask(self, do: str, **given: Any) -> Any:
        """Have it do one thing, and its result. Raises PeerAnswered when that raised there, EOFError when it died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise EOFError("the far peer is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerAnswered(*answer["error"])
        return answer["result"]

    async def kill(self) -> None:
        """SIGKILL; its daemon follows it."""
        self._process.kill()
        await self._process.wait()

    async def close(self) -> None:
        """End it in order. Idempotent."""
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.close()
        async with asyncio.timeout(ANSWER_S):
            await self._process.wait()


class _Child:
    """The far side: one method per command."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.opened: LibP2PEndpoint | None = None

    @property
    def endpoint(self) -> LibP2PEndpoint:
        assert self.opened is not None, "not opened yet"
        return self.opened

    async def do_open(self, **config: Any) -> Any:
        for key in ("listen", "announce", "bootstrap"):
            if key in config:
                config[key] = tuple(map(Multiaddr, config[key]))
        self.clock = SystemClock()
        identity = load_or_create(self._home / "identity.key")
        self.opened = await LibP2PEndpoint.open(
            EndpointConfig(run_dir=self._home / "run", **config), identity, self.clock
        )
        return {"peer": self.endpoint.peer, "addresses": self.endpoint.addresses}

    async def do_serve(self, manifest: str) -> Any:
        self.endpoint.mount(ManifestService(manifest.encode(), {"tokenizer.json": b"{}"}))

    async def do_fetch(self, peer: str) -> Any:
        return (await fetch_manifest(self.endpoint, PeerId(peer)))[0].decode()

    async def do_enter(self) -> Any:
        await self.endpoint.enter(RunId(RUN))
        self.endpoint.mount(ServiceBench())

    async def do_reach(self, contacts: Sequence[str]) -> Any:
        found = await reachability(self.endpoint, [PeerId(peer) for peer in contacts], self.clock)
        return {"how": found.how, "detail": found.detail, "addresses": found.addresses}

    async def do_learn(self, peer: str, addresses: Sequence[str]) -> Any:
        self.endpoint.learn(PeerId(peer), addresses)

    async def do_call(self, peer: str, size: int = 0, timeout_s: float = 120.0) -> Any:
        reply, _ = await self.endpoint.call(
            PeerId(peer), UP, Note(number=size), timeout_s=timeout_s, payload=bytes(size)
        )
        return reply.number

    async def do_links(self) -> Any:
        return dict(await self.endpoint.links())

    async def do_addresses(self) -> Any:
        return self.endpoint.addresses

    async def do_announce(self, name: str) -> Any:
        addresses = self.endpoint.addresses
        record = PeerRecord(role="stage", name=name, incarnation=1, status="ready", step=0, addresses=addresses)
        await self.endpoint.directory.announce(record, ttl_s=60)

    async def do_lookup(self) -> Any:
        return {peer: record.addresses for peer, record in (await self.endpoint.directory.lookup(PeerRecord)).items()}


async def _serve(home: Path) -> None:
    child = _Child(home)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            asked = json.loads(line)
            method: Callable[..., Coroutine[Any, Any, Any]] = getattr(child, f"do_{asked.pop('do')}")
            try:
                answer = {"result": await method(**asked)}
            except Exception as error:  # noqa: BLE001 - told to the test
                answer = {"error": [type(error).__name__, str(error)]}
            print(json.dumps(answer), flush=True)
    finally:
        if child.opened is not None:
            await child.opened.close()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1])))

"""How soon a peer that joins a run holds its state, over a thin link, when one of its donors is killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.runner import ROOT, Result, Size
from tests.harness.namespaces import Net, lan, why_not

DONORS = ("a", "b", "c")
LINK_MBIT = 100
KEYS = (
    "ready_s", "bar_s", "bytes", "refetched_share", "donor_killed", "let_in_s", "start_s", "download_s",
    "download_bar_s", "restarted", "link_mbit_s", "donor_cpu_quiet", "donor_cpu_giving",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How often somebody joins over the thin link, the model whose state it gets, and how often its donors close a
    step."""

    times: int = 1
    layers: int = 4
    dim: int = 512
    step_s: float = 12.0


EXTENTS = {
    Size.SMOKE: Extent(layers=1, dim=256, step_s=1.0),
    Size.DEFAULT: Extent(),
    Size.FULL: Extent(times=3, layers=8),
}
"""An update of the larger models takes 4 s and more over this link: with shorter steps nobody could keep up, as a
member neither."""

_LINE_S = 120.0


@dataclass(slots=True)
class Found:
    """One joining."""

    bytes: int = 0
    state_bytes: int = 0
    refetched: int = 0
    step: int = 0
    start_s: float = 0.0
    ready_s: float = 0.0
    let_in_s: float = 0.0
    download_s: float = 0.0
    killed_at: float = 0.0
    dropped: list[str] = field(default_factory=list)
    gave: int = 0
    starts: int = 0
    quiet_cpu: list[float] = field(default_factory=list)
    busy_cpu: list[float] = field(default_factory=list)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)


async def run(size: Size) -> Result:
    """Seconds until a joiner has caught up over a shaped link, with one of three donors killed at half the state."""
    reason, extent = why_not(), EXTENTS[size]
    found = []
    for _ in range(extent.times):
        found.append(await _once(extent, shaped=reason is None))
        print(found[-1], file=sys.stderr)
    return _result(found, extent, reason)


async def _once(extent: Extent, *, shaped: bool) -> Found:
    with tempfile.TemporaryDirectory(prefix="join-") as scratch, _hosts(shaped=shaped) as place:
        homes = {name: Path(scratch) / name for name in (*DONORS, "j")}
        for home in homes.values():
            home.mkdir(mode=0o700)
        _make_keys([homes[name] for name in DONORS])
        async with contextlib.AsyncExitStack() as stack:

            async def start(name: str) -> _Peer:
                settings = {
                    "home": str(homes[name]), "donors": [str(homes[donor]) for donor in DONORS],
                    "listen": place.listen(name), "layers": extent.layers, "dim": extent.dim,
                }  # fmt: skip
                return await stack.enter_async_context(_peer(place.at(name), settings))

            donors = dict(zip(DONORS, await asyncio.gather(*map(start, DONORS)), strict=True))
            for donor in donors.values():
                await donor.until("ready")
            return await _join(donors, start, extent.step_s)


async def _join(donors: dict[str, _Peer], start: Callable[[str], Any], step_s: float) -> Found:
    found, alive = Found(), dict(donors)
    closing = asyncio.create_task(_steps(alive, found, step_s))
    try:
        await found.quiet.wait()
        began = time.monotonic()
        joiner = await start("j")
        await joiner.say({"join": {donor.me: donor.addresses for donor in donors.values()}})
        while True:
            told = await joiner.hear()
            if "started" in told:
                found.starts, found.start_s = found.starts + 1, time.monotonic() - began
                found.step = told["started"]
            if "received" in told and not found.killed_at and 2 * told["received"] >= told["total"]:
                found.killed_at = told["received"] / told["total"]
                await alive.pop(DONORS[0]).kill()
            if "dropped" in told:
                found.dropped.append(told["code"])
            if "downloaded" in told:
                found.state_bytes = told["downloaded"]
                found.gave, found.download_s = len(told["gave"]), time.monotonic() - began
                found.bytes += found.state_bytes
            if "wire_bytes" in told:
                found.refetched = told["wire_bytes"] - found.state_bytes
            if "followed" in told:
                found.step, found.let_in_s = told["followed"], time.monotonic() - began
                if found.ready_s:
                    return found
                found.bytes += told["update_bytes"]
            if found.bytes and not found.ready_s and found.step >= closing_step(alive):
                found.ready_s = time.monotonic() - began
    finally:
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)


def closing_step(alive: dict[str, _Peer]) -> int:
    """The newest step that all have closed."""
    return min(peer.closed for peer in alive.values())


async def _steps(alive: dict[str, _Peer], found: Found, step_s: float) -> None:
    """Close a step every so often at all donors, and note what it and serving cost them."""
    before: dict[str, float] = {}
    at = time.monotonic()
    while True:
        now = time.monotonic()
        for name, peer in list(alive.items()):
            with contextlib.suppress(EOFError, ConnectionError):  # killed just now
                told = await peer.ask({"close": True})
                peer.closed = told["closed"]
                if name in before:
                    share = (told["cpu_s"] - before[name]) / (now - at)
                    (found.quiet_cpu if not found.starts else found.busy_cpu).append(share)
                before[name] = told["cpu_s"]
        if len(found.quiet_cpu) >= len(alive):
            found.quiet.set()
        at = now
        await asyncio.sleep(max(0.0, step_s - (time.monotonic() - now)))


def _result(found: Sequence[Found], extent: Extent, reason: str | None) -> Result:
    worst = max(found, key=lambda one: one.ready_s - _bar_s(one.bytes))
    rows = [
        (n, one.ready_s, _bar_s(one.bytes), one.start_s, one.download_s, _bar_s(one.state_bytes), one.let_in_s,
         one.state_bytes / 1e6, one.bytes / 1e6, one.refetched / one.state_bytes, one.killed_at, ", ".join(one.dropped))
        for n, one in enumerate(found)
    ]  # fmt: skip
    summary: dict[str, Any] = {
        "ready_s": round(worst.ready_s, 2),
        "bar_s": round(_bar_s(worst.bytes), 2),
        "bytes": worst.bytes,
        "refetched_share": round(worst.refetched / worst.state_bytes, 4),
        "donor_killed": all(one.killed_at > 0 for one in found),
        "let_in_s": round(worst.let_in_s, 2),
        "start_s": round(worst.start_s, 2),
        "download_s": round(worst.download_s, 2),
        "download_bar_s": round(_bar_s(worst.state_bytes), 2),
        "restarted": any(one.starts > 1 for one in found),
        "link_mbit_s": LINK_MBIT,
        "donor_cpu_quiet": round(median(worst.quiet_cpu), 3),
        "donor_cpu_giving": round(max(worst.busy_cpu, default=0.0), 3),
    }
    shaped = f"the joiner's link is {LINK_MBIT} Mbit/s (tbf between network namespaces)"
    return Result(
        columns=(
            "run", "ready_s", "bar_s", "start_s", "download_s", "download_bar_s", "let_in_s", "state_mb", "all_mb",
            "refetched_share", "killed_at", "dropped",
        ),
        rows=rows,
        summary=summary,
        notes=(
            shaped if reason is None else f"NOT shaped, so no bar holds: {reason}",
            "bar_s = 10 s + 1.2 x bytes / bandwidth; bytes: the state and every update that it had to take to catch up",
            "ready_s: from before its process is made until it holds the newest step and asks to be let in; start_s: "
            "until donors keep a state for it (imports, daemon); download_s: until that state is here; let_in_s: until",
            f"the step that would name it has closed; one closes every {extent.step_s:g} s",
            "donor a is killed with -9 when half of the state is verified; refetched: all that came beside the state",
            "donor_cpu_*: processors used by a donor and its daemon (making up a gradient, closing a step, giving)",
        ),
    )  # fmt: skip


def _bar_s(size: int) -> float:
    return 10.0 + 1.2 * size / (LINK_MBIT * 1e6 / 8)


class _Place:
    """Where the peers run: hosts of their own, the joiner's behind a thin link, or this machine."""

    def __init__(self, net: Net | None) -> None:
        self._net = net
        if net is not None:
            index = net.run("j", ["cat", "/sys/class/net/eth0/iflink"]).stdout.strip()
            links = net.run("sw", ["ip", "-o", "link"]).stdout.splitlines()
            port = next(line.split()[1].split("@")[0].rstrip(":") for line in links if line.startswith(f"{index}:"))
            shape = ["root", "tbf", "rate", f"{LINK_MBIT}mbit", "burst", "128kb", "latency", "100ms"]
            net.run("sw", ["tc", "qdisc", "add", "dev", port, *shape])
            net.run("j", ["tc", "qdisc", "add", "dev", "eth0", *shape])

    def at(self, name: str) -> Callable[[Sequence[str]], list[str]]:
        """Makes a command line into one on a host."""
        net = self._net
        return list if net is None else lambda command: net.command(name, command)

    def listen(self, name: str) -> str:
        """Where a peer listens."""
        return f"/ip4/{'127.0.0.1' if self._net is None else self._net.address(name)}/tcp/0"


@contextlib.contextmanager
def _hosts(*, shaped: bool) -> Iterator[_Place]:
    if not shaped:
        yield _Place(None)
        return
    with lan(*DONORS, "j") as net:
        yield _Place(net)


class _Peer:
    """A peer process, spoken to over its standard streams."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.me, self.closed = "", 0
        self.addresses: list[str] = []

    async def say(self, order: dict[str, Any]) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()

    async def hear(self) -> dict[str, Any]:
        """Its next line. Raises EOFError when it is gone."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_LINE_S):
            line = await self._process.stdout.readline()
        if not line:
            raise EOFError("a peer of the benchmark ended before it was done")
        told: dict[str, Any] = json.loads(line)
        return told

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order, and what it says to it."""
        await self.say(order)
        return await self.hear()

    async def until(self, key: str) -> dict[str, Any]:
        """Hear until it says this."""
        while key not in (told := await self.hear()):
            pass
        return told

    async def kill(self) -> None:
        """SIGKILL; its daemon follows it."""
        self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def _peer(at: Callable[[Sequence[str]], list[str]], settings: dict[str, Any]) -> AsyncIterator[_Peer]:
    command = at([sys.executable, "-m", "tests.benchmarks._join_peer", json.dumps(settings)])
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        peer = _Peer(process)
        hello = await peer.until("peer")
        peer.me, peer.addresses = hello["peer"], hello["addresses"]
        yield peer
    finally:
        if process.returncode is None:
            process.kill()  # its daemon follows; what it left lies in the scratch directory
            await process.wait()


def _make_keys(homes: Sequence[Path]) -> None:
    from swarm.network.libp2p.identity import load_or_create

    for home in homes:
        load_or_create(home / "identity.key")

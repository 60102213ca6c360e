"""Shape links between real processes on loopback: proxies in a thread of their own, commanded by other threads.

    with shaped({"default": {"latency_ms": 40}}) as links:
        process = subprocess.Popen([*command, *links.options("host-0")])
        links.belongs("host-0", process.pid)
        links.cut(("host-0",), ("trainer-0",))

A peer listens on the port that :meth:`ShapedLinks.options` chose and announces its proxy's; who calls is found out from
the kernel's table of connections, by process. :class:`NetworkCuts` cuts the links of peers that share no network.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from peers.chaos.faults import CannotInflict
from peers.chaos.means import owner
from swarm.clock import SystemClock
from swarm.sim.links import Cause, Links, LinkShape, Traffic
from swarm.sim.proxy import LinkProxy

LOOPBACK = "127.0.0.1"
WAN = "wan"
"""The network that all regions share."""
APART = "networks"
"""The cause of cuts between peers that have no network in common."""


class ShapedLinks:
    """Proxies and the commands that change them; every method may be called from any thread. Made by :func:`shaped`."""

    def __init__(self, links: Links) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._pids: dict[int, str] = {}
        self._thread.start()
        self.proxy = self._do(self._make(links))

    async def _make(self, links: Links) -> LinkProxy:
        return LinkProxy(Traffic(links), SystemClock(), self.who)

    def options(self, name: str) -> tuple[str, ...]:
        """Command line of a peer that shall be reached through a proxy; the same after a restart."""
        port = free_port()
        proxied = self._do(self.proxy.expose(name, LOOPBACK, port))
        return ("--listen", f"/ip4/{LOOPBACK}/tcp/{port}", "--announce", f"/ip4/{LOOPBACK}/tcp/{proxied}")

    def belongs(self, name: str, pid: int) -> None:
        """A process, and all it starts, is this peer, in place of what was it before."""
        self._pids = {one: other for one, other in self._pids.items() if other != name} | {pid: name}

    def who(self, port: int) -> str:
        """Return the peer whose process has a connection from this port of loopback; "" when none is known."""
        pids = dict(self._pids)
        return pids.get(owner(port, pids), "")

    def cut(self, sources: Iterable[str], targets: Sequence[str], *, both: bool = True, cause: Cause = "") -> None:
        """From now on no byte passes from one group to the other."""
        self._command(lambda traffic: traffic.cut(sources, targets, both=both, cause=cause))

    def heal(
        self, sources: Sequence[str] = (), targets: Sequence[str] = (), *, only: Cause = None, but: Cause = None
    ) -> None:
        """All links are as described, those between two groups where such are named; but for other causes than
        ``only``, or for the cause ``but``."""
        self._command(lambda traffic: traffic.heal(sources, targets, only=only, but=but))

    def slow(self, source: str, target: str, shape: LinkShape, *, cause: Cause = "") -> None:
        """The link has another shape from now on, in both directions."""
        self._command(lambda traffic: traffic.slow(source, target, shape, both=True, cause=cause))

    def corrupt(self, source: str, target: str, pieces: int = 1) -> None:
        """The next pieces of a stream in this direction have a bit flipped."""
        self._command(lambda _: self.proxy.corrupt(source, target, pieces))

    def corrupt_left(self, source: str, target: str) -> int:
        """Return the number of pieces still to be corrupted: nothing has passed that way since."""
        return int(self.proxy.corrupt_left(source, target))

    def passed(self, source: str, target: str) -> int:
        """Bytes that went that way so far."""
        return int(self.proxy.passed.get((source, target), 0))

    def close(self) -> None:
        """End proxies and thread. Idempotent."""
        if self._thread.is_alive():
            self._do(self.proxy.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _command(self, act: Callable[[Traffic], object]) -> None:
        async def do() -> None:
            act(self.proxy.traffic)
            self.proxy.changed()

        self._do(do())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)


@contextlib.contextmanager
def shaped(description: Mapping[str, Any] | None = None) -> Iterator[ShapedLinks]:
    """Links as described (see :mod:`swarm.sim.links`), ended with the block."""
    links = ShapedLinks(Links.parse(description or {}))
    try:
        yield links
    finally:
        links.close()


class NetworkCuts:
    """Peers on networks, and the links that are cut because two have none in common. Without links nothing is cut."""

    def __init__(self, links: ShapedLinks | None) -> None:
        self._links = links
        self._on: dict[str, set[str]] = {}
        self._off: dict[str, set[str]] = {}
        self._cut: set[tuple[str, str]] = set()

    def add(self, name: str, region: str) -> None:
        """A peer that is on its region's network and on the one of all; again: no change."""
        self._on.setdefault(name, {WAN, *([region] if region else [])})
        self._off.setdefault(name, set())
        self._apply()

    def disconnect(self, names: Iterable[str], network: str) -> None:
        """These are on that network no more; on none for ""."""
        for name in names:
            self._off[name] |= self.meant(name, network)
        self._apply()

    def reconnect(self, names: Iterable[str], network: str) -> None:
        """They are again; on all of theirs for ""."""
        for name in names:
            self._off[name] -= self.meant(name, network)
        self._apply()

    def meant(self, name: str, network: str) -> set[str]:
        """Those of this peer's networks that are meant by that name: all of them by "". Raises CannotInflict for one
        that it is not on."""
        if network and network not in self._on[name]:
            raise CannotInflict(f"{name} is on no network {network!r}: {', '.join(sorted(self._on[name]))}")
        return {network} if network else set(self._on[name])

    def _apart(self) -> Iterator[tuple[str, str]]:
        there = {name: self._on[name] - self._off[name] for name in self._on}
        names = sorted(there)
        for number, one in enumerate(names):
            yield from ((one, other) for other in names[number + 1 :] if not there[one] & there[other])

    def _apply(self) -> None:
        wanted = set(self._apart())
        if self._links is not None:
            for one, other in sorted(wanted - self._cut):
                self._links.cut((one,), (other,), cause=APART)
            for one, other in sorted(self._cut - wanted):
                self._links.heal((one,), (other,), only=APART)
        self._cut = wanted


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port

"""Killing the same thing again and again, and looking whether anything adds up."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm.events import DaemonLost, DaemonRestarted
from swarm.network.libp2p.supervisor import RestartLimits
from tests.harness.expect import eventually
from tests.harness.mortal_peer import nursery
from tests.harness.processes import children_of, leftovers, take_snapshot
from tests.harness.supervised import introduce, opened

IN_USE = {"endpoint.lock", "p2pd.sock", "client.sock"}
WARM_UP = 5
MAX_GROWTH = 1.05
# Each death counts alone: what is looked at is the restart, not when there are too many.
_EVERY_TIME = RestartLimits(deaths=2, within_s=1e-6)


@dataclass(frozen=True, slots=True)
class Load:
    """What this process holds now."""

    memory_bytes: int
    descriptors: int
    tasks: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Load:
        """Measured after a garbage collection."""
        gc.collect()
        this = psutil.Process()
        return cls(
            memory_bytes=this.memory_info().rss,
            descriptors=this.num_fds(),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            children=len(children_of(os.getpid())),
        )


async def cycle_daemon(home: Path, *, cycles: int) -> None:
    """Kill one of two peers' daemon so often; both must call each other after each time, and nothing may add up."""
    async with opened(home, "a") as alice, opened(home, "b", alice, restarts=_EVERY_TIME) as bob:
        introduce(alice, bob)
        await bob.announce()
        files = _files(home)
        loads = []
        for done in range(cycles):
            bob.kill_daemon()
            await bob.restarted(done + 1)
            await alice.ask_until_answered(bob)
            assert await bob.ask(alice) == 7
            if done >= WARM_UP:
                loads.append(await _settled())
        assert bob.sink.count(DaemonLost) == bob.sink.count(DaemonRestarted) == cycles, "not every kill fired"
        assert set(await alice.found()) == {bob.endpoint.peer}
        assert _files(home) == files
    _assert_flat(loads, f"{cycles} restarts of a daemon")


def _files(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*"))


async def _settled() -> Load:
    """Once the greetings after a restart are over."""
    await eventually(lambda: not any(task.get_name() == "p2pd restored" for task in asyncio.all_tasks()))
    return Load.now()


async def cycle_peer(home: Path, *, cycles: int) -> None:
    """Kill a whole peer so often, each time once another has called it, and start it again in the same directory;
    nothing of it may be left, nor may anything add up in the other."""
    with nursery(home) as born:
        async with opened(home, "a") as alice:
            loads = []
            before = take_snapshot()
            for done in range(cycles):
                mortal = await asyncio.to_thread(born.start, "b", alice.endpoint.addresses[0])
                alice.endpoint.learn(mortal.peer, mortal.addresses)
                assert await alice.ask_at(mortal.peer) == 7
                assert _names(home / "b") == IN_USE
                mortal.kill()
                gone = [Path(f"/proc/{pid}") for pid in (mortal.pid, mortal.daemon)]
                await eventually(lambda gone=gone: not any(map(_runs, gone)), what="the peer and its daemon ending")  # type: ignore[misc]
                await eventually(lambda: not alice.endpoint._outgoing.alive, what="the broken streams being noticed")
                if done >= WARM_UP:
                    loads.append(Load.now())
            left = await asyncio.to_thread(leftovers, before)
            assert left == [f"socket {home / 'b' / 'client.sock'}"], "a killed peer cannot remove its socket"
            await asyncio.to_thread(born.start, "c")  # beside it: sweeps what the last one left
            assert _names(home / "b") == set()
    _assert_flat(loads, f"{cycles} deaths of a peer")


def _assert_flat(loads: Sequence[Load], what: str) -> None:
    """That nothing adds up: a count moves by one or two while something short is under way, so the least of the last
    three is held against the most of the first half, which a count that grows with every death is above."""
    early, late = loads[: len(loads) // 2], loads[-3:]
    print(f"{what}: {loads[0]} -> {loads[-1]}")
    assert late[-1].memory_bytes <= MAX_GROWTH * max(load.memory_bytes for load in early)
    for count in ("descriptors", "tasks", "threads", "children"):
        assert min(getattr(load, count) for load in late) <= max(getattr(load, count) for load in early), count


def _names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

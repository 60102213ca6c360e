"""A real swarm over libp2p whose host is flooded by a stranger, in turns with a sink outside the run.

The swarm is in this process, with a daemon for each peer; stranger and sink are processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from swarm.events import PeerLost, StepClosed
from tests.benchmarks._doors_frames import Frames, try_frames
from tests.benchmarks.runner import ROOT
from tests.harness.expect import eventually
from tests.harness.libp2p_swarm import LibP2PSwarm

STEPS = 100_000
"""More than there is time for: the run is ended from outside."""
FIRST_STEP_S = 60.0


class Stranger:
    """A process of :mod:`tests.benchmarks._doors_stranger`."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self._process = process
        self.peer, self.addresses = said["peer"], said["addresses"]

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, home: Path, run: str) -> AsyncIterator[Stranger]:
        """It has entered the run's protocols; at the end it ends, with its daemon."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks._doors_stranger", str(home), run,
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not (line := await process.stdout.readline()):
                raise RuntimeError(f"the stranger in {home} ended before it was ready: its words are above")
            yield cls(process, json.loads(line))
        finally:
            process.stdin.close()
            await process.wait()

    async def flood(self, peer: str, addresses: tuple[str, ...], seconds: float) -> dict[str, Any]:
        """Have it flood somebody; what it sent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"to": peer, "addresses": list(addresses), "seconds": seconds}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        if not (line := await self._process.stdout.readline()):
            raise RuntimeError("the stranger died while it flooded: its words are above")
        said: dict[str, Any] = json.loads(line)
        return said


@dataclass(slots=True)
class Floods:
    """Steps a second while the host and while the sink is flooded, by round; what was sent to the host."""

    host: list[float] = field(default_factory=list)
    sink: list[float] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    @property
    def kept(self) -> float:
        """The median over rounds of how many steps are kept."""
        return median(host / sink for host, sink in zip(self.host, self.sink, strict=True))


async def measure(root: Path, *, rounds: int, seconds: float, each: int) -> tuple[Floods, Frames]:
    """Flood a host for so many rounds, each as long for the sink, then try frames on the same swarm."""
    swarm = LibP2PSwarm(root, hosts=2, trainers=1, run={"steps": STEPS})
    log = logging.FileHandler(root / "log.txt")  # as a peer writes it: what a flood costs counts that, too
    logging.getLogger("swarm").addHandler(log)
    await swarm.open()
    training = asyncio.create_task(swarm.run(timeout_s=3600.0))
    try:
        begun = asyncio.create_task(eventually(lambda: _closed(swarm) > 2, deadline_s=FIRST_STEP_S))
        await asyncio.wait([training, begun], return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            begun.cancel()
            training.result()
        await begun
        floods = await _flood(swarm, rounds, seconds)
        if training.done():
            training.result()  # a peer that ended: whatever ended it
        return floods, await try_frames(swarm, each)
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        logging.getLogger("swarm").removeHandler(log)
        log.close()


async def _flood(swarm: LibP2PSwarm, rounds: int, seconds: float) -> Floods:
    found, run, victim = Floods(), str(swarm.manifest.run_id), swarm.peers["host-0"].endpoint
    async with (
        Stranger.started(swarm.root / "stranger", run) as stranger,
        Stranger.started(swarm.root / "sink", run) as sink,
    ):
        for number in range(rounds):
            turns = [(sink.peer, tuple(sink.addresses), found.sink), (victim.peer, victim.addresses, found.host)]
            for peer, addresses, rates in turns if number % 2 == 0 else reversed(turns):
                closed, began = _closed(swarm), time.monotonic()
                said = await stranger.flood(peer, addresses, seconds)
                took = time.monotonic() - began
                rates.append((_closed(swarm) - closed) / took)
                print(f"doors: round {number}: {rates[-1]:.2f} steps/s, {said}", file=sys.stderr, flush=True)
                if rates is found.host:
                    found.bytes, found.seconds = found.bytes + said["bytes"], found.seconds + took
                    found.outcomes.update(said["outcomes"])
    found.lost = len(swarm.events(PeerLost))
    return found


def _closed(swarm: LibP2PSwarm) -> int:
    return len(swarm.peers["bootstrap"].events.of(StepClosed))

"""A real swarm over libp2p whose host is flooded by a stranger, in turns with a sink outside the run.

The swarm is in this process, with a daemon for each peer; stranger and sink are processes of their own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from swarm.events import PeerLost, StepClosed
from tests.benchmarks._worker import Worker
from tests.harness.expect import eventually
from tests.harness.libp2p_swarm import LibP2PSwarm

STEPS = 100_000
"""More than there is time for: the run is ended from outside."""
FIRST_STEP_S = 300.0


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
        return median(host / max(sink, 1e-9) for host, sink in zip(self.host, self.sink, strict=True))


async def measure(root: Path, *, rounds: int, seconds: float) -> Floods:
    """Flood a host for so many rounds, each as long for the sink."""
    swarm = LibP2PSwarm(root, hosts=2, trainers=1, run={"steps": STEPS})
    stranger, sink = [await _started(root, str(swarm.manifest.run_id)) for _ in range(2)]
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
        floods = await _flood(swarm, stranger, sink, (rounds, seconds))
        if training.done():
            training.result()  # a peer that ended: whatever ended it
        return floods
    finally:
        training.cancel()
        await asyncio.gather(training, stranger.stop(), sink.stop(), return_exceptions=True)
        logging.getLogger("swarm").removeHandler(log)
        log.close()


async def _started(root: Path, run: str) -> Worker:
    return await Worker.start("tests.benchmarks._doors_stranger", tempfile.mkdtemp(prefix="", dir=root), run)


async def _flood(swarm: LibP2PSwarm, stranger: Worker, sink: Worker, extent: tuple[int, float]) -> Floods:
    found, victim = Floods(), swarm.peers["host-0"].endpoint
    rounds, seconds = extent
    targets: list[tuple[Mapping[str, Any], list[float]]] = [
        ({"to": sink.hello["peer"], "addresses": sink.hello["addresses"]}, found.sink),
        ({"to": victim.peer, "addresses": [*victim.addresses]}, found.host),
    ]
    for number in range(rounds):
        for target, rates in targets if number % 2 == 0 else reversed(targets):
            closed, began = _closed(swarm), time.monotonic()
            said = await stranger.ask({**target, "seconds": seconds})
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

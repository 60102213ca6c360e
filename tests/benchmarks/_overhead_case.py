"""What a run's defences cost while nobody lies: honest runs with and without them, a step each in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from peers.presets import load_preset
from swarm.events import StepClosed
from swarm.sim.loop import new_loop
from tests.benchmarks._liars_case import swarm_of

TRAINERS = 5
"""Of fewer the test of trainers compares none."""
SECTIONS, PER_STEP = ("model", "batch", "codecs"), "batch.microbatches_per_step"
"""What is taken of a preset."""


class Spent(NamedTuple):
    """On one step, by all peers together."""

    cpu_s: float
    bytes: int


def play(
    root: Path, *, preset: str, steps: int, seed: int, kinds: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Play one run of each kind side by side, one step of each at a time, the other way round each second step.

    Args:
        root: An empty directory.
        preset: Whose model, microbatches and codecs they have; "" for those of the lies.
        steps: How many are counted: the first one, in which peers find each other, is not.
        seed: Of all runs.
        kinds: By name, the keys of the manifest that each run sets beside the others'; the first sets none.

    Returns:
        By kind what a step costs, and by how much more than one of the first kind: medians of the steps, and of the
        processor the least and the most.

    Raises:
        RuntimeError: The runs did not commit the same microbatches.
    """
    taken = load_preset(preset) if preset else {}
    shape = {f"{section}.{key}": value for section in SECTIONS for key, value in taken.get(section, {}).items()}
    if preset:  # as many of each trainer
        shape[PER_STEP] -= shape[PER_STEP] % TRAINERS
    spent: dict[str, list[Spent]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        worlds = {
            name: stack.enter_context(Steps(root / name, {**shape, **keys}, steps + 2, seed))
            for name, keys in kinds.items()
        }
        for step in range(1, steps + 2):
            for name in list(kinds)[:: 1 if step % 2 else -1]:
                spent[name].append(worlds[name].close_step(step))
            if len({frozenset(world.committed(step)) for world in worlds.values()}) > 1:
                raise RuntimeError(f"the runs differ in the microbatches of step {step}")
    bare, *_ = spent.values()
    return {name: _beside(found[1:], bare[1:]) for name, found in spent.items()}


def _beside(found: Sequence[Spent], bare: Sequence[Spent]) -> dict[str, float]:
    pairs = [*zip(found, bare, strict=True)]
    cpu, size = (
        [ours.cpu_s / other.cpu_s - 1 for ours, other in pairs],
        [ours.bytes / other.bytes - 1 for ours, other in pairs],
    )
    return {
        "step_cpu_s": round(median(one.cpu_s for one in found), 3),
        "step_mb": round(median(one.bytes for one in found) / 1e6, 2),
        "overhead_cpu": round(median(cpu), 4),
        "least_cpu": round(min(cpu), 4),
        "most_cpu": round(max(cpu), 4),
        "overhead_bytes": round(median(size), 4),
    }


class Steps:
    """A simulated run that goes on for a step when it is told to, and stands still otherwise."""

    def __init__(self, root: Path, keys: Mapping[str, Any], steps: int, seed: int) -> None:
        root.mkdir()
        self._swarm, _ = swarm_of(root, seed, steps, TRAINERS, keys)
        self._runner = asyncio.Runner(loop_factory=new_loop)
        self._closed = 0

    def __enter__(self) -> Steps:
        self._runner.run(self._begin())
        return self

    def __exit__(self, *raised: object) -> None:
        self._runner.close()

    def close_step(self, step: int) -> Spent:
        """Go on until the founder has closed it."""
        began, sent = time.process_time(), self._sent()
        self._runner.run(self._until(step))
        return Spent(time.process_time() - began, self._sent() - sent)

    def committed(self, step: int) -> list[tuple[Any, ...]]:
        """Return which microbatches are in the step's record."""
        (record,) = (one for one in self._swarm.history() if one["step"] == step)
        return [tuple(one["microbatch"]) for one in record["committed"]]

    async def _begin(self) -> None:
        await self._swarm.open()
        self._swarm.peers["bootstrap"].events.listeners.append(self._hear)
        self._more = asyncio.Event()
        self._running = asyncio.create_task(self._swarm.run())

    async def _until(self, step: int) -> None:
        while self._closed < step:
            self._more.clear()
            await self._more.wait()

    def _hear(self, event: object) -> None:
        if isinstance(event, StepClosed):
            self._closed = event.step
            self._more.set()

    def _sent(self) -> int:
        return sum(peer.endpoint.statistics().total[0] for peer in self._swarm.peers.values())

"""A run of real peers on simulated devices, forked ready-made, and what their events say so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peers.home.run_directory import RunDirectory
from peers.local.run import BOOTSTRAP, LOCAL, RunBroken, peer_names
from peers.settings import exact_settings
from swarm.clock import SystemClock
from swarm.config import Manifest
from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig
from tests.benchmarks._parity_run import Layout, Scale
from tests.benchmarks._recovery_world import ForkedWorld

PATIENCE_S = 90.0


def endless(model: GptConfig, microbatches: int = 24) -> Scale:
    """A run of this model that goes on until it is stopped, with steps of so many microbatches."""
    return Scale(
        model=model,
        batch=BatchConfig(microbatch_size=2, microbatches_per_step=microbatches),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=5, clip_norm=0.5),
        steps=1_000_000,
        characters=200_000,
    )


@dataclass(slots=True)
class Seen:
    """What the peers' events say so far: the highest step under way and closed, who is ready, where the bootstrap is.
    ``away`` are peers that were hit, with a step: they are there again when ready anew, or closing a later one."""

    under_way: int = 0
    closed: int = 0
    ready: set[str] = field(default_factory=set)
    away: dict[str, int] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    address: tuple[str, ...] = ()

    def note(self, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        """One event."""
        if kind == "Accumulated":
            self.under_way = max(self.under_way, fields["step"])
        elif kind == "StepClosed":
            self.closed = max(self.closed, fields["step"])
            if fields["step"] > self.away.get(name, self.closed):
                self.back(name)
        elif kind == "PeerReady":
            self.back(name)
        elif kind == "CutOff":
            self.ready.discard(name)
        elif kind == "PeerStarted":
            self.started.add(name)
            self.address = self.address or tuple(fields["addresses"])  # the bootstrap is the first

    def gone(self, name: str) -> None:
        """It was hit."""
        self.ready.discard(name)
        self.away[name] = self.under_way + 1

    def back(self, name: str) -> None:
        """It takes part."""
        self.ready.add(name)
        self.away.pop(name, None)


class ForkedRun:
    """Begin it, let steps pass, and stop its ``world`` whatever happens. Raises RunBroken when a peer ends that was not
    meant to, or nothing happens any more."""

    def __init__(self, directory: RunDirectory, manifest: Manifest, layout: Layout) -> None:
        self._directory, self._manifest = directory, manifest
        self.seen = Seen()
        self.world = ForkedWorld(directory.root, self.seen.note)
        self.clock = SystemClock()
        self.names = peer_names(manifest)

    def begin(self, steps: int) -> None:
        """Start everybody, and let so many steps close."""
        world, seen = self.world, self.seen
        world.group.open()
        given: dict[str, Any] = {"home": self._directory.home(BOOTSTRAP).absolute(), "name": BOOTSTRAP}
        given["manifest"] = self._directory.manifest.absolute()
        given |= {"ends_seed": self._manifest.run.seed}
        world.start(exact_settings(**given, role="bootstrap", options=LOCAL))
        self.until(lambda: bool(seen.address), "the bootstrap's address")
        for name in self.names[1:]:
            self.start(name)
            self.until(lambda name=name: name in seen.started, f"{name} to start")  # all at once would be a storm
        self.until(lambda: seen.closed >= steps, "the first steps")

    def start(self, name: str) -> None:
        """Start ``stage-STAGE-…`` or ``trainer-NUMBER``."""
        role, number = name.split("-")[:2]
        common: dict[str, Any] = {"home": self._directory.home(name).absolute(), "name": name}
        common |= {"bootstrap": self.seen.address, "run": self._manifest.run_id}
        if role == "stage":
            options = dataclasses.replace(LOCAL, stage=int(number))
        else:
            options = dataclasses.replace(LOCAL, data=self._directory.shard(int(number)).absolute())
        self.world.start(exact_settings(**common, role=role, options=options))

    def pass_steps(self, count: int) -> None:
        """Return when so many more are closed."""
        step = self.seen.closed
        self.until(lambda: self.seen.closed >= step + count, "the next steps")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Look until it is so, for at most PATIENCE_S."""
        end = self.clock.monotonic() + PATIENCE_S
        while not condition():
            if self.clock.monotonic() > end:
                raise RunBroken(f"waited {PATIENCE_S:g} s for {what}")
            self.world.look()

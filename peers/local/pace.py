"""How many steps a run on this machine takes: as many as fit into some minutes, by a measurement of seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from peers.console.words import amount, count
from peers.profiles import value_at
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.device import is_out_of_memory
from swarm.errors import ConfigError

MINUTES = 1.5
MEASURE_S = 3.0
FILLED = 0.9
"""Of the minutes this share is planned with: machines slow down, and the last steps write checkpoints."""
AROUND = 1.2
"""What a microbatch takes of the machine, beside its bare forward and backward: messages, sums, optimizer."""
CLOSING_TOKENS, CLOSING_FLOPS, CLOSING_S = 200, 1e10, 0.05
"""Closing a step takes what so many tokens do, for each replica of a part: optimizer, hashes, averaging, checkpoints.
Beside them its messages take what so many operations do, and a fast machine so many seconds."""
FEWEST_STEPS, ENOUGH_STEPS = 6, 80
"""Fewer teach nothing that can be seen. Batches are made smaller until there are enough, or closing a step takes as
long as its batch, where nobody says how large they are."""
FEWEST_MICROBATCHES, SHORTEST_ROW = 2, 128
_OPTIONS = {"microbatches": "--batch", "rows": "--rows", "context": "--context"}
MOST_READINGS = 8.0
"""A text is read so often at most: held-out loss rises again when it is learned by heart."""
BATCH_KEYS = {
    "microbatches": "batch.microbatches_per_step", "rows": "batch.microbatch_size", "context": "model.context",
}  # fmt: skip
"""The manifest's keys of a :class:`StepShape`."""
WARM_UP = 6
"""The warm-up takes one step of so many at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A step's batch: microbatches, rows in each, and tokens in a row."""

    microbatches: int
    rows: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.rows * self.context

    def smaller(self, said: frozenset[str], fewest: int) -> Iterator[StepShape]:
        """Yield it, and ever smaller ones, of ``fewest`` microbatches at least, that differ in nothing ``said``."""
        batch = self
        yield batch
        for name, least in (("microbatches", fewest), ("rows", 1), ("context", SHORTEST_ROW)):
            while name not in said and (half := getattr(batch, name) // 2) >= least:
                batch = replace(batch, **{name: half})
                yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The steps that were chosen, the batch of each and the seconds that it takes; ``full`` where the text, and not the
    time, says how many."""

    steps: int
    batch: StepShape
    step_s: float
    full: bool

    def described(self, device: str, minutes: float) -> str:
        """Say what was measured, what was chosen, and why."""
        batch = self.batch
        speed = f"about {amount(batch.tokens / self.step_s)} tokens/s on {device}"
        steps = f"{count(self.steps, 'step')} of {count(batch.tokens, 'token')}"
        if self.full:
            return f"{speed}: {steps}, which read the text {MOST_READINGS:g} times; --minutes {minutes:g} had more"
        return f"{speed}: {steps} fit into {minutes:g} minutes (--minutes, or --steps)"

    def changes(self, manifest: Manifest) -> dict[str, Any]:
        """Return what of the manifest is to be otherwise, by dotted key."""
        warmup = min(manifest.optimizer.warmup_steps, self.steps * manifest.averaging.inner_steps // WARM_UP)
        chosen = {
            "run.steps": self.steps,
            "optimizer.warmup_steps": warmup,
        } | {key: getattr(self.batch, name) for name, key in BATCH_KEYS.items()}
        return {key: value for key, value in chosen.items() if value != value_at(manifest.model_dump(), key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What was measured: seconds from one microbatch to the next, and operations of each."""

    microbatch_s: float
    flops: float


def fitting(
    manifest: Manifest, speed: Speed, minutes: float, *, said: frozenset[str], tokens: int, late_s: float = 0.0
) -> Pace:
    """Choose steps for these minutes. Pure.

    Args:
        manifest: The run's, with the batch that it has where nothing is chosen.
        speed: Measured with that batch.
        minutes: All steps together may take so long.
        said: The fields of :class:`StepShape` that a person named.
        tokens: Of the text, about.
        late_s: Seconds of these minutes that a slow start takes.

    Raises:
        ConfigError: There is no time for a handful of steps.
    """
    batch = StepShape(
        microbatches=manifest.batch.microbatches_per_step,
        rows=manifest.batch.microbatch_size,
        context=manifest.model.context,
    )
    token_s = AROUND * speed.microbatch_s / (batch.rows * batch.context)
    inner = manifest.averaging.inner_steps
    start = manifest.run.start_when
    replicas = -(-start.stage_hosts // manifest.split.stages)
    closing_s = CLOSING_TOKENS * replicas * token_s + max(CLOSING_S, CLOSING_FLOPS * speed.microbatch_s / speed.flops)
    fewest = max(FEWEST_MICROBATCHES, start.trainers, replicas)
    for tried in batch.smaller(said, fewest):
        step_s = inner * tried.tokens * token_s + closing_s
        steps = int(FILLED * (60 * minutes - late_s) / step_s)
        mostly_closing = inner * tried.tokens * token_s <= closing_s and steps * inner >= FEWEST_STEPS
        if steps * inner >= ENOUGH_STEPS or mostly_closing:
            break
    if steps * inner < FEWEST_STEPS:
        needed = math.ceil(10 * (FEWEST_STEPS / inner * step_s / FILLED + late_s) / 60) / 10
        smaller = [option for name, option in _OPTIONS.items() if name in said]
        remedy = f"Give it that, or say --steps{' or a smaller ' if smaller else ''}{' or '.join(smaller)}."
        why = f"here a step takes about {step_s:.2g} s, and {FEWEST_STEPS} teach the least that can be seen"
        raise ConfigError("--minutes", minutes, f"{needed:g} or more", remedy, why=why)
    most = max(FEWEST_STEPS, int(MOST_READINGS * tokens / (inner * tried.tokens)))
    return Pace(steps=max(1, min(steps, most)), batch=tried, step_s=step_s, full=most < steps)


def measure(manifest: Manifest, device: str, clock: Clock) -> Speed:
    """Return how fast this machine's peers of the run compute together.

    Imports torch, and takes about MEASURE_S then. Raises ConfigError for a device that is not there, or lacks memory.
    """
    from peers.doctor.compute import DeviceBench

    start = manifest.run.start_when
    peers = start.stage_hosts + start.trainers
    try:
        bench = DeviceBench(manifest, device, 1, clock)
        return Speed(microbatch_s=bench.together(peers, MEASURE_S), flops=bench.microbatch_flops)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        why = f"{peers} peers that compute together find no memory there"
        remedy = "Use fewer --peers and --trainers, smaller --rows, or --device cpu."
        raise ConfigError("--device", device, "one with more memory", remedy, why=why) from None

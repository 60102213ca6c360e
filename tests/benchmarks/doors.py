"""What two attacks on whole swarms come to: a stranger's flood, over libp2p in real time, and a replica's corrupt sums,
in virtual time. Bad leaders, ties, guests' votes, evictions and forged rows are stories of ``tests/swarms``.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._doors_flood import Floods

BARS: dict[str, float] = {"flood_steps_kept": 0.9, "poisoned_sum_loss_ratio": 1.05}
"""At most so much, but of the steps kept at least."""
KEYS = (*BARS, *(f"{name}_bar" for name in BARS), "flood_peers_lost", "flood_mb_s")
LEARNS: dict[str, Any] = {
    "trainers": 2,
    "model": {"layers": 2, "dim": 16, "context": 8},
    "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}
LAST = 3
"""Steps over which losses are averaged, the last of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is played: floods and their seconds; hosts and steps of the runs with a corrupt sum."""

    rounds: int
    flood_s: float
    hosts: int = 6
    steps: int = 10


SCALES = {
    Size.SMOKE: Scale(rounds=1, flood_s=1.0, hosts=4, steps=3),
    Size.DEFAULT: Scale(rounds=7, flood_s=6.0),
    Size.FULL: Scale(rounds=5, flood_s=60.0),
}


def run(size: Size) -> Result:
    """What a stranger's flood costs a swarm, beside a sink outside the run, and a replica's corrupt sums its loss."""
    import torch
    import uvloop

    from tests.benchmarks._doors_flood import measure

    torch.set_num_threads(1)  # several peers compute in one process
    scale, rows = SCALES[size], list[list[Cell]]()
    with tempfile.TemporaryDirectory(prefix="doors-") as root:
        summary = _of_floods(uvloop.run(measure(Path(root), rounds=scale.rounds, seconds=scale.flood_s)), rows)
    with tempfile.TemporaryDirectory(prefix="doors-") as root:
        clean, corrupt = _losses_with_corrupt_sums(Path(root), scale)
    for name, losses in (("clean", clean), ("with it", corrupt)):
        rows.append(["sum of 1e30", f"{name}, first step", "loss", round(losses[0], 4)])
        rows.append(["sum of 1e30", f"{name}, last step", "loss", round(losses[-1], 4)])
    summary["poisoned_sum_loss_ratio"] = round(mean(corrupt[-LAST:]) / mean(clean[-LAST:]), 4)
    summary |= {f"{name}_bar": bar for name, bar in BARS.items()}
    return Result(columns=("attack", "how", "figure", "value"), rows=rows, summary=summary, notes=_notes(scale))


def _of_floods(floods: Floods, rows: list[list[Cell]]) -> dict[str, Any]:
    for number, (host, sink) in enumerate(zip(floods.host, floods.sink, strict=True)):
        rows.append(["flood", f"round {number}, host", "steps a second", round(host, 3)])
        rows.append(["flood", f"round {number}, sink", "steps a second", round(sink, 3)])
    rows += [["flood", f"calls to the host: {name}", "count", count] for name, count in floods.outcomes.items()]
    return {
        "flood_steps_kept": round(floods.kept, 4),
        "flood_peers_lost": floods.lost,
        "flood_mb_s": round(floods.bytes / floods.seconds / 1e6, 3),
    }


def _losses_with_corrupt_sums(root: Path, scale: Scale) -> tuple[list[float], list[float]]:
    """Losses by step without and with a replica of two stages whose sums are all 1e30."""
    import torch

    from peers.simulate.sim_swarm import SimSwarm
    from swarm.sim.loop import run_world
    from tests.harness.bad_leaders import corrupts_sums

    swarms = []
    for name in ("clean", "corrupt"):
        root.joinpath(name).mkdir()
        swarms.append(SimSwarm(root / name, **LEARNS, hosts=scale.hosts, run={"steps": scale.steps}))
    clean, swarm = swarms
    run_world(clean.run())
    with corrupts_sums("host-0", lambda sums: torch.full_like(sums, 1e30)) as corrupt:
        run_world(swarm.run())
    if not list(corrupt):
        raise RuntimeError("the attack was never made: what it replaces is not called any more")
    return _losses(clean), _losses(swarm)


def _losses(swarm: Any) -> list[float]:
    from swarm.events import StepClosed

    return [event.loss for event in swarm.peers["bootstrap"].events.of(StepClosed)]


def _notes(scale: Scale) -> tuple[str, ...]:
    return (
        "flood: a stranger in a process of its own offers 1 MB/s of fuzzed requests of 8 to 64 KiB over libp2p to one "
        f"of two hosts for {scale.flood_s:g} s, and as long to a sink outside the run, {scale.rounds} times in turns; "
        "it comes back as often as it is cut off; flood_mb_s is what it sent; flood_steps_kept: median over rounds of "
        "steps a second, host ÷ sink; the swarm is one process, whose loop and processors all of its peers share",
        f"sum: one of {scale.hosts // 2} replicas of a stage hands in 1e30 for every element in every step; mean loss "
        f"of the last 3 of {scale.steps} steps, beside the same run without it; virtual time",
    )

"""How soon a swarm goes on after a stage host is killed with -9, or stopped: work under way on it, and the next step.

Real processes on loopback, 3 stages × 3 replicas, 2 trainers and a bootstrap, on simulated devices: steps of about two
seconds. One fault at a time, at one of the victim's own contributions: SIGKILL or SIGSTOP of a stage host and its
daemon.

*Reroute time* of a fault: from the fault to the last hop that was sent to another replica in the victim's place. A
fault that met none is no sample, and counted.

*Commit gap* of a fault: from it to the next closed step, less the median step without anybody away; at least 0.

Who was killed is started again, with its identity and home, once a step was closed; who was paused goes on then too, or
after 20 s. A stage is hit again only when all its replicas are ready.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.chaos.faults import Kill, Pause, Restart, Resume
from peers.chaos.invariants.check import Report, check
from peers.chaos.invariants.evidence import gather
from peers.chaos.plan import FaultPlan, On, Strike
from peers.home.run_directory import RunDirectory
from peers.manifest_file import write_manifest
from swarm.models.gpt_config import GptConfig
from tests.benchmarks._forked_run import ForkedRun, endless
from tests.benchmarks._parity_run import TRAINERS, Layout, build_data, make_manifest
from tests.benchmarks._recovery_figures import Recovery, p95, recoveries
from tests.benchmarks.runner import Cell, Result, Size

MODEL = GptConfig(vocab_size=512, dim=32, layers=3, heads=2, context=32)
PAUSE_S = 20.0
BARS_S: Mapping[str, tuple[float, float]] = {"kill": (2.0, 5.0), "pause": (5.0, 10.0)}
"""Reroute and commit gap, at the 95 % quantile."""

KEYS = (
    "kill_reroute_p95_s", "kill_commit_gap_p95_s", "pause_reroute_p95_s", "pause_commit_gap_p95_s",
    "kill_reroute_p95_target_s", "kill_commit_gap_p95_target_s", "pause_reroute_p95_target_s",
    "pause_commit_gap_p95_target_s", "kills", "pauses", "step_s", "lost", "duplicated", "digest_mismatches",
    "other_failures",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A swarm of so many replicas of each of so many stages, its steps, and what is done to it for how long."""

    stages: int = 3
    replicas: int = 3
    microbatches: int = 24
    warm_steps: int = 6
    kills: int
    pauses: int
    budget_s: float

    @property
    def layout(self) -> Layout:
        """See :class:`~tests.benchmarks._parity_run.Layout`."""
        name = f"{self.stages} × {self.replicas}"
        return Layout(name=name, stages=self.stages, replicas=self.replicas, ends="private")

    @property
    def contributions(self) -> int:
        """A replica's in a step: all microbatches over the replicas of its stage."""
        return self.microbatches // self.replicas


EXTENTS = {
    Size.SMOKE: Extent(stages=1, replicas=2, microbatches=4, warm_steps=1, kills=1, pauses=1, budget_s=600.0),
    Size.DEFAULT: Extent(kills=10, pauses=5, budget_s=200.0),
    Size.FULL: Extent(kills=100, pauses=50, budget_s=3600.0),
}


def run(size: Size) -> Result:
    """Seconds until a killed or stopped replica's work goes on elsewhere, and until the next step.

    Not in a thread: the peers live as long as the one they are started from.
    """
    extent = EXTENTS[size]
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        root = Path(scratch) / "run"
        left_out = measure(root, extent)
        return result(root, extent, left_out)


def measure(root: Path, extent: Extent) -> int:
    """Train in ``root`` and do the faults, in a seeded order, as long as the budget lasts; how many were left out."""
    scale = endless(MODEL, extent.microbatches)
    data = build_data(root, scale)
    directory = RunDirectory(root)
    manifest = make_manifest(extent.layout, scale, data, reproducible=False)
    write_manifest(manifest, directory.manifest)
    return Campaign(ForkedRun(directory, manifest, extent.layout), extent, random.Random(0)).run()


class Campaign:
    """One run and the faults done to it."""

    def __init__(self, run: ForkedRun, extent: Extent, rng: random.Random) -> None:
        self._run, self._extent, self._rng = run, extent, rng

    def run(self) -> int:
        """See :func:`measure`. Raises RunBroken when a peer ends that was not killed, or nothing happens any more."""
        extent, run = self._extent, self._run
        kinds = ["kill"] * extent.kills + ["pause"] * extent.pauses
        order = self._rng.sample(kinds, len(kinds))
        until = run.clock.monotonic() + extent.budget_s
        try:
            run.begin(extent.warm_steps)
            for number, kind in enumerate(order):
                if run.clock.monotonic() > until:
                    return len(order) - number
                self._strike(number, kind)
            run.pass_steps(2)
        finally:
            run.world.stop()
        return 0

    def _strike(self, number: int, kind: str) -> None:
        run = self._run
        world, seen = run.world, run.seen
        run.until(lambda: bool(self._whole_stages()), "a stage whose replicas are all ready")
        victim = self._rng.choice(self._rng.choice(self._whole_stages()))
        turn = On("Accumulated", peer=victim, nth=self._rng.randint(1, self._extent.contributions))
        closing = On("StepClosed", where={"step": lambda step: step >= seen.under_way}, after=f"{kind} {number}")
        blow, end = (
            (Kill((victim,)), Restart(victim)) if kind == "kill" else (Pause((victim,), PAUSE_S), Resume((victim,)))
        )
        plan = FaultPlan(
            Strike(f"{kind} {number}", turn, blow), Strike(f"{end.name} {number}", closing, end), world=world
        )
        run.until(lambda: f"{kind} {number}" in plan.fired or bool(plan.errors), "the fault")
        began = run.clock.monotonic()
        seen.gone(victim)
        run.until(lambda: f"{end.name} {number}" in plan.fired or bool(plan.errors), "the next closed step")
        plan.assert_fired()
        took = run.clock.monotonic() - began
        print(f"{number}: {kind} {victim}, step {seen.closed} closed {took:.2f} s later", file=sys.stderr)
        run.pass_steps(2)

    def _whole_stages(self) -> list[list[str]]:
        """Names of the replicas of every stage that has all of them."""
        numbers = range(self._extent.stages)
        stages = [[name for name in self._run.names if name.startswith(f"stage-{number}-")] for number in numbers]
        return [names for names in stages if self._run.seen.ready.issuperset(names)]


def result(root: Path, extent: Extent, left_out: int) -> Result:
    """The table and the figures asked for, from what a run left."""
    evidence = gather([root])
    found, step_s = recoveries(evidence)
    report = check(evidence)
    by_kind = {kind: [one for one in found if one.kind == kind] for kind in BARS_S}
    summary: dict[str, Any] = {}
    for kind, ones in by_kind.items():
        summary[f"{kind}_reroute_p95_s"] = rounded(p95(reroutes(ones)))
        summary[f"{kind}_commit_gap_p95_s"] = rounded(p95([one.commit_gap_s for one in ones]))
    for kind, (reroute_s, gap_s) in BARS_S.items():
        summary |= {f"{kind}_reroute_p95_target_s": reroute_s, f"{kind}_commit_gap_p95_target_s": gap_s}
    summary |= {f"{kind}s": len(ones) for kind, ones in by_kind.items()}
    summary |= {"step_s": round(step_s, 3)} | counted(report)
    columns = (
        "fault", "times", "met_no_work", "hops_moved", "reroute_p50_s", "reroute_p95_s", "reroute_max_s",
        "gap_p50_s", "gap_p95_s", "gap_max_s",
    )  # fmt: skip
    rows = [row(kind, ones) for kind, ones in by_kind.items()]
    return Result(columns=columns, rows=rows, summary=summary, notes=notes(report, extent, left_out))


def row(kind: str, ones: Sequence[Recovery]) -> list[Cell]:
    """For the table."""
    waits, gaps = reroutes(ones), [one.commit_gap_s for one in ones]
    idle, moved = sum(one.moved == 0 for one in ones), sum(one.moved for one in ones)
    return [kind, len(ones), idle, moved, *spread(waits), *spread(gaps)]


def spread(values: Sequence[float]) -> list[Cell]:
    """Median, 95 % quantile and maximum."""
    ordered = sorted(values)
    return [
        rounded(ordered[len(ordered) // 2] if ordered else None),
        rounded(p95(values)),
        rounded(max(values, default=None)),
    ]


def reroutes(ones: Sequence[Recovery]) -> list[float]:
    """The reroute times of faults that met work."""
    return [one.reroute_s for one in ones if one.reroute_s is not None]


def counted(report: Report) -> dict[str, Any]:
    """What the checkers say."""
    names = {"lost": "I2", "duplicated": "I1", "digest_mismatches": "I5"}
    return {name: len(report.of(invariant)) for name, invariant in names.items()} | {
        "other_failures": sorted({str(one)[:200] for one in report.failures if one.invariant not in names.values()})[:5]
    }


def rounded(value: float | None) -> float | None:
    """To milliseconds."""
    return None if value is None or math.isinf(value) else round(value, 3)


def notes(report: Report, extent: Extent, left_out: int) -> list[str]:
    """What a reader must know."""
    told = [
        f"{extent.layout.name} stages and replicas, {TRAINERS} trainers; simulated devices, real processes and bytes",
        f"{report.steps} steps; a fault strikes at a contribution of its victim, two steps after the last one",
        "reroute: per fault the longest time until a hop was sent to another in the victim's place, from the fault or "
        "from when the microbatch set out after it; before 2026-11-29 from when its turn came",
        "gap: from the fault to the next closed step, less step_s, the median step without anybody away",
    ]
    return told + ([f"{left_out} faults were left out: no time"] if left_out else [])

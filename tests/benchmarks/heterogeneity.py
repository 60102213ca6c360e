"""What one slow replica among fast ones costs a step: ten times slower in compute, then in bandwidth."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.runner import Cell, Result, Size

SLOWER, TRAINERS = 10.0, 2
FORWARD_S, BACKWARD_S = 0.05, 0.1
STEP_S = 5.0
MBIT_PER_S = 100.0
MODEL = {"vocab_size": 300, "dim": 16, "layers": 1, "heads": 1, "context": 8}
LEARNT = 3
"""Steps in which the trainers find out who is slow; they are not counted, and shown by themselves."""
BAR = 1.1
KEYS = ("slow_compute_ratio", "slow_bandwidth_ratio", "slow_both_ratio", "ratio_target", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How much is played: ``fast`` replicas beside the slow one, on which all takes ``times`` as long."""

    fast: int = 7
    times: int = 1
    steps: int

    @property
    def forward_s(self) -> float:
        """Of a microbatch, on a fast device."""
        return self.times * FORWARD_S

    @property
    def backward_s(self) -> float:
        """Of a microbatch, on a fast device."""
        return self.times * BACKWARD_S

    @property
    def target(self) -> int:
        """Microbatches of a step: what the fast replicas can do in STEP_S."""
        return round(STEP_S * self.fast / (self.forward_s + self.backward_s))


SETUPS = {Size.SMOKE: Setup(fast=2, times=10, steps=4), Size.DEFAULT: Setup(steps=8), Size.FULL: Setup(steps=30)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``hosts`` replicas of the one stage, of which the last is ``slowness`` times as slow, or has so much thinner a
    link."""

    name: str
    hosts: int
    slowness: float = 1.0
    thinness: float = 1.0


def cases(fast: int) -> tuple[Case, ...]:
    """What is played, the one that the others are set beside first."""
    return (
        Case(name=f"{fast} fast", hosts=fast),
        Case(name=f"{fast} fast, 1 slow in compute", hosts=fast + 1, slowness=SLOWER),
        Case(name=f"{fast} fast, 1 slow in bandwidth", hosts=fast + 1, thinness=SLOWER),
        Case(name=f"{fast} fast, 1 slow in both", hosts=fast + 1, slowness=SLOWER, thinness=SLOWER),
    )


async def run(size: Size) -> Result:
    """Seconds of a step with a slow replica beside seconds without it, on simulated devices and links."""
    import asyncio

    setup = SETUPS[size]
    played: list[Mapping[str, Cell]] = [await asyncio.to_thread(_play, case, setup) for case in cases(setup.fast)]
    alone, beside = float(played[0]["step_s"] or 0), f"beside_{setup.fast}_fast"
    shown = [{**row, beside: round(float(row["step_s"] or 0) / alone, 3)} for row in played]
    _, compute, bandwidth, both = (row[beside] for row in shown)
    summary = {
        "slow_compute_ratio": compute,
        "slow_bandwidth_ratio": bandwidth,
        "slow_both_ratio": both,
        "ratio_target": BAR,
        "steps": setup.steps - LEARNT,
    }
    columns = ("case", "step_s", beside, "slowest_step_s", "first_steps_s", "slow_share", "averaging_s")
    return Result(
        columns=columns,
        rows=[[row[column] for column in columns] for row in shown],
        summary=summary,
        notes=(
            f"step_s: median after the first {LEARNT} steps, which first_steps_s is the mean of; virtual time, "
            f"{setup.target} microbatches of {setup.forward_s + setup.backward_s:.2g} s a step, links of "
            f"{MBIT_PER_S:g} Mbit/s and 5 ms",
            "slow_share: of the microbatches, what the last replica computed; averaging_s: the stage's rounds, median",
        ),
    )


def _play(case: Case, setup: Setup) -> dict[str, Cell]:
    from swarm.sim.loop import run_world

    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        swarm = _swarm(Path(folder), case, setup)
        run_world(_live(swarm, case))
        return {"case": case.name, **_figures(swarm, case)}


def _swarm(root: Path, case: Case, setup: Setup) -> Any:
    from swarm.sim.links import Links
    from tests.harness.simulated import SimSwarm

    links: dict[str, Any] = {"default": {"latency_ms": 5, "mbit_per_s": MBIT_PER_S}}
    if case.thinness > 1:
        thin = MBIT_PER_S / case.thinness
        links["machine"] = [{"peer": f"host-{case.hosts - 1}", "up_mbit_per_s": thin, "down_mbit_per_s": thin}]
    return SimSwarm(
        root,
        hosts=case.hosts,
        trainers=TRAINERS,
        links=Links.parse(links),
        stage_s={"forward": setup.forward_s, "backward": setup.backward_s},
        run={"steps": setup.steps},
        model=MODEL,
        split={"stages": 1},
        batch={"microbatch_size": 1, "microbatches_per_step": setup.target},
    )


async def _live(swarm: Any, case: Case) -> None:
    await swarm.open()
    swarm.devices[f"host-{case.hosts - 1}"].slowness = case.slowness
    await swarm.run(timeout_s=1e5)


def _figures(swarm: Any, case: Case) -> dict[str, Cell]:
    from swarm.events import RoundDone, StepClosed

    seconds = [event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > 0]
    last = swarm.peers[f"host-{case.hosts - 1}"].endpoint.peer
    counted = [
        one["route"][0] == last for record in swarm.history() if record["step"] > LEARNT for one in record["committed"]
    ]
    rounds = [event.seconds for event in swarm.events(RoundDone) if event.part == "stage-0" and event.step > LEARNT]
    return {
        "step_s": round(statistics.median(seconds[LEARNT:]), 3),
        "slowest_step_s": round(max(seconds[LEARNT:]), 3),
        "first_steps_s": round(statistics.fmean(seconds[:LEARNT]), 3),
        "slow_share": round(sum(counted) / len(counted), 4),
        "averaging_s": round(statistics.median(rounds), 3),
    }

"""What one slow replica among fast ones costs a step: ten times slower in compute, then in bandwidth."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.runner import Cell, Result, Size

FAST, SLOWER, TRAINERS = 7, 10.0, 2
FORWARD_S, BACKWARD_S = 0.05, 0.1
STEP_S = 5.0
TARGET = round(STEP_S * FAST / (FORWARD_S + BACKWARD_S))
"""Microbatches of a step: what the fast replicas can do in STEP_S."""
MBIT_PER_S = 100.0
MODEL = {"vocab_size": 300, "dim": 16, "layers": 1, "heads": 1, "context": 8}
LEARNT = 3
"""Steps in which the trainers find out who is slow; they are not counted, and shown by themselves."""
BAR = 1.1
COLUMNS = ("case", "step_s", "beside_7_fast", "slowest_step_s", "first_steps_s", "slow_share", "averaging_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``hosts`` replicas of the one stage, of which the last is ``slowness`` times as slow, or has so much thinner a
    link."""

    name: str
    hosts: int
    slowness: float = 1.0
    thinness: float = 1.0


CASES = (
    Case(name="7 fast", hosts=FAST),
    Case(name="7 fast, 1 slow in compute", hosts=FAST + 1, slowness=SLOWER),
    Case(name="7 fast, 1 slow in bandwidth", hosts=FAST + 1, thinness=SLOWER),
    Case(name="7 fast, 1 slow in both", hosts=FAST + 1, slowness=SLOWER, thinness=SLOWER),
)


async def run(size: Size) -> Result:
    """Seconds of a step with a slow replica beside seconds without it, on simulated devices and links."""
    import asyncio

    steps = 30 if size is Size.FULL else 8
    played: list[Mapping[str, Cell]] = [await asyncio.to_thread(_play, case, steps) for case in CASES]
    alone = float(played[0]["step_s"] or 0)
    by_name = {str(row["case"]): round(float(row["step_s"] or 0) / alone, 3) for row in played}
    summary = {
        "slow_compute_ratio": by_name[CASES[1].name],
        "slow_bandwidth_ratio": by_name[CASES[2].name],
        "slow_both_ratio": by_name[CASES[3].name],
        "ratio_target": BAR,
        "steps": steps - LEARNT,
    }
    shown = [{**row, "beside_7_fast": by_name[str(row["case"])]} for row in played]
    return Result(
        columns=COLUMNS,
        rows=[[row[column] for column in COLUMNS] for row in shown],
        summary=summary,
        notes=(
            f"step_s: median after the first {LEARNT} steps, which first_steps_s is the mean of; virtual time, "
            f"{TARGET} microbatches of {FORWARD_S + BACKWARD_S:.2g} s a step, links of {MBIT_PER_S:g} Mbit/s and 5 ms",
            "slow_share: of the microbatches, what the last replica computed; averaging_s: the stage's rounds, median",
        ),
    )


def _play(case: Case, steps: int) -> dict[str, Cell]:
    from swarm.sim.world import run_world

    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        swarm = _swarm(Path(folder), case, steps)
        run_world(_live(swarm, case))
        return {"case": case.name, **_figures(swarm, case)}


def _swarm(root: Path, case: Case, steps: int) -> Any:
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
        stage_s={"forward": FORWARD_S, "backward": BACKWARD_S},
        run={"steps": steps},
        model=MODEL,
        split={"stages": 1},
        batch={"microbatch_size": 1, "microbatches_per_step": TARGET},
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

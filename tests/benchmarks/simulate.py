"""Whether the three fidelities of ``swarm simulate`` agree on shared cases, and what a step of many peers costs."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.runner import Cell, Result, Size, Table

if TYPE_CHECKING:
    from swarm.sim.simulation import Fidelity, SimulationCase

LEARNT = 3
"""Steps in which trainers find out who is slow; they are not counted."""
STEPS = {Size.SMOKE: 4, Size.DEFAULT: 7, Size.FULL: 13}
MICROBATCHES = {Size.SMOKE: 24, Size.DEFAULT: 240, Size.FULL: 240}
PEERS = {Size.SMOKE: (100, 100), Size.DEFAULT: (2_000, 10_000), Size.FULL: (2_000, 10_000)}
"""Of ``journeys`` and of ``flow``."""
LARGE_STEPS = {Size.SMOKE: (1, 1), Size.DEFAULT: (1, 10), Size.FULL: (3, 30)}
AGREEMENT_TARGET, STEP_TARGET_S = 0.02, 60.0
KEYS = (
    "largest_difference", "largest_difference_target", "journeys_difference", "flow_difference", "step_10000_s",
    "step_10000_s_target", "begin_10000_s", "journeys_2000_step_s", "steps",
)  # fmt: skip

LINK = "memory_gib = 16\ndown_mbit = 200\nup_mbit = 200\nround_trip_ms = 40\n"
TRAINERS = """[[peers]]
name = "trainers"
count = 2
train = 2
flops = 2e11
memory_gib = 16
down_mbit = 1000
up_mbit = 1000
round_trip_ms = 20
"""


def _hosts(name: str, count: int, flops: float) -> str:
    """So many hosts of each of two stages."""
    each = f"count = {count}\nflops = {flops:g}\n{LINK}"
    return "".join(f'[[peers]]\nname = "{name} {stage}"\nstage = {stage}\n{each}' for stage in (0, 1))


CASES = {
    "like replicas": TRAINERS + _hosts("hosts", 3, 4e10),
    "unlike replicas": TRAINERS + _hosts("fast", 2, 4e10) + _hosts("slow", 2, 2e10),
}
CHURN = """[[peers]]
name = "homes"
count = {homes}
train = {trainers}
flops = 2e11
memory_gib = 32
down_mbit = 1000
up_mbit = 500
round_trip_ms = 40
stay_hours = 4
[[peers]]
name = "clouds"
count = {clouds}
flops = 5e11
memory_gib = 32
down_mbit = 1000
up_mbit = 1000
stay_hours = 12
"""


def run(size: Size) -> Result:
    """Seconds of a step by flow, journeys and the full stack on the same cases; wall seconds of a step of 10,000."""
    rows: list[list[Cell]] = [_compared(name, text, size) for name, text in CASES.items()]
    journeys, flow = (
        _large(fidelity, peers, steps)
        for fidelity, peers, steps in zip(("journeys", "flow"), PEERS[size], LARGE_STEPS[size], strict=True)
    )
    by_flow, by_journeys = (max(abs(float(row[at] or 0.0)) for row in rows) for at in (4, 5))
    return Result(
        columns=("case", "full_s", "journeys_s", "flow_s", "flow_difference", "journeys_difference", "full_cpu_s"),
        rows=rows,
        summary={
            "largest_difference": max(by_flow, by_journeys),
            "largest_difference_target": AGREEMENT_TARGET,
            "journeys_difference": by_journeys,
            "flow_difference": by_flow,
            "step_10000_s": flow[3],
            "step_10000_s_target": STEP_TARGET_S,
            "begin_10000_s": flow[2],
            "journeys_2000_step_s": journeys[3],
            "steps": STEPS[size] - LEARNT,
        },
        notes=(
            f"seconds of a step are virtual, the median behind the first {LEARNT}; {MICROBATCHES[size]} microbatches of"
            " 4 rows of the preset small a step, 2 stages, 2 trainers, nobody comes or goes; differences are to full",
            "of many peers: wall seconds of this machine, which others use, too; homes stay 4 h on average, clouds 12,"
            " as on the spot market, and the rule `ours` moves them",
        ),
        tables=(
            Table(
                title="Wall seconds of many peers",
                columns=("fidelity", "peers", "begin_s", "step_s", "virtual_step_s", "taken", "moves"),
                rows=[journeys, flow],
            ),
        ),
    )


def _case(text: str, fidelity: Fidelity, **keys: int | str) -> SimulationCase:
    from peers.simulate.scenario_file import case_of, read_scenario

    lines = [f"{key} = {value!r}" for key, value in {"model": "small", "stages": 2, "rows": 4, **keys}.items()]
    with tempfile.TemporaryDirectory(prefix="simulate-") as folder:
        path = Path(folder) / "scenario.toml"
        path.write_text("\n".join([*lines, text]))
        return case_of(read_scenario(path), path, fidelity, 1)[0]


def _compared(name: str, text: str, size: Size) -> list[Cell]:
    from peers.commands.simulate import PLAYED

    found, began = dict[str, float](), 0.0
    fidelities: tuple[Fidelity, ...] = ("flow", "journeys", "full")
    for fidelity in fidelities:
        case, began = _case(text, fidelity, steps=STEPS[size], microbatches=MICROBATCHES[size]), time.process_time()
        found[fidelity] = statistics.median(step.seconds for step in PLAYED[fidelity](case).steps[LEARNT:])
        print(name, fidelity, found[fidelity], file=sys.stderr, flush=True)
    full = found["full"]
    differences = [round(found[one] / full - 1, 4) for one in ("flow", "journeys")]
    seconds = [round(found[one], 3) for one in ("full", "journeys", "flow")]
    return [name, *seconds, *differences, round(time.process_time() - began, 1)]


def _large(fidelity: Fidelity, peers: int, steps: int) -> list[Cell]:
    """Play many peers; what comes before the first step apart from the steps."""
    from peers.commands.simulate import PLAYED
    from swarm.sim.simulation import StepCosts
    from swarm.sim.turnover import Turnover

    text = CHURN.format(homes=peers * 6 // 10, clouds=peers * 4 // 10, trainers=max(1, peers // 8))
    began = time.perf_counter()
    case = _case(
        text, fidelity, model="medium", stages=8, rows=16, steps=steps, microbatches=4 * peers, rebalance="ours"
    )
    StepCosts(case).forecast(Turnover(case.turnover))
    begun = time.perf_counter()
    found = PLAYED[fidelity](case)
    each = (time.perf_counter() - begun) / max(1, len(found.steps))
    taken = sum(len(removal.places) for removal in case.trace if removal.at_s < found.ended_s)
    virtual_s = statistics.median(step.seconds for step in found.steps)
    begin_s = round(begun - began, 2)
    return [fidelity, peers, begin_s, round(each, 2), round(virtual_s, 2), taken, found.counts["moves"]]

"""What one slow replica adds to seven fast ones, ten times slower in compute, then in bandwidth; real boundaries."""

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
MBIT_PER_S, TRAINER_MBIT_PER_S = 100.0, 10_000.0
BOUNDARY_BYTES = 250_000
"""Of an activation and of its gradient: a microbatch keeps a fast link busy for 0.04 s each way."""
MODEL = {"vocab_size": 300, "dim": 128, "layers": 1, "heads": 1, "context": 8}
"""Large enough that averaging measures links. Its activations stand for larger ones."""
LEARNT = 2
"""Steps in which the trainers find out who is slow; they are not counted, and shown by themselves."""
BAR = 0.97
KEYS = ("slow_compute_share", "slow_bandwidth_share", "slow_both_share", "share_target", "steps")


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


SETUPS = {Size.SMOKE: Setup(fast=2, times=10, steps=4), Size.DEFAULT: Setup(steps=5), Size.FULL: Setup(steps=30)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``hosts`` replicas of the one stage, of which the last is ``slowness`` times as slow, or has so much thinner a
    link."""

    name: str
    hosts: int
    slowness: float = 1.0
    thinness: float = 1.0

    def ideal(self, setup: Setup) -> float:
        """Return what its replicas can do, in fast ones."""
        compute_s = setup.forward_s + setup.backward_s
        rates = [
            min(1 / (slow * compute_s), MBIT_PER_S * 125_000 / (thin * 2 * BOUNDARY_BYTES * setup.times))
            for slow, thin in [(1.0, 1.0)] * (self.hosts - 1) + [(self.slowness, self.thinness)]
        ]
        return sum(rates) / rates[0]


def cases(fast: int) -> tuple[Case, ...]:
    """What is played, the one that the others are set beside first."""
    return (
        Case(name=f"{fast} fast", hosts=fast),
        Case(name=f"{fast} fast, 1 slow in compute", hosts=fast + 1, slowness=SLOWER),
        Case(name=f"{fast} fast, 1 slow in bandwidth", hosts=fast + 1, thinness=SLOWER),
        Case(name=f"{fast} fast, 1 slow in both", hosts=fast + 1, slowness=SLOWER, thinness=SLOWER),
    )


async def run(size: Size) -> Result:
    """Microbatches a second while a step is fed, with a slow replica and without it, over what they could be."""
    import asyncio

    setup = SETUPS[size]
    played: list[Mapping[str, Cell]] = [await asyncio.to_thread(_play, case, setup) for case in cases(setup.fast)]
    alone = float(played[0]["fed_s"] or 0)
    shown = []
    for case, row in zip(cases(setup.fast), played, strict=True):
        faster, could = alone / float(row["fed_s"] or 1), case.ideal(setup) / setup.fast
        shown.append(
            {**row, "faster": round(faster, 4), "could": round(could, 4), "of_ideal": round(faster / could, 4)}
        )
    _, compute, bandwidth, both = (row["of_ideal"] for row in shown)
    summary = {
        "slow_compute_share": compute,
        "slow_bandwidth_share": bandwidth,
        "slow_both_share": both,
        "share_target": BAR,
        "steps": setup.steps - LEARNT,
    }
    columns = ("case", "fed_s", "faster", "could", "of_ideal", "step_s", "first_fed_s", "slow_share", "averaging_s")
    return Result(
        columns=columns,
        rows=[[row[column] for column in columns] for row in shown],
        summary=summary,
        notes=(
            f"fed_s: a step without its averaging, median after the first {LEARNT}, which first_fed_s is the mean of; "
            f"virtual time, {setup.target} microbatches of {setup.forward_s + setup.backward_s:.2g} s a step, "
            f"boundaries of {BOUNDARY_BYTES * setup.times / 1e6:g} MB, links of {MBIT_PER_S:g} Mbit/s and 5 ms",
            "faster: than the fast ones alone; could: by compute and links; slow_share: of the microbatches, what the "
            "last replica computed; averaging_s: the stage's rounds, median",
        ),
    )


def _play(case: Case, setup: Setup) -> dict[str, Cell]:
    from unittest import mock

    from swarm.consensus.records import CloseRecord
    from swarm.ids import PeerId
    from swarm.sim.loop import run_world
    from swarm.step.boundary_codecs import CodecRules

    real, heavier = CodecRules.link_seconds, _weight(setup)

    def heavy(rules: CodecRules, record: CloseRecord) -> dict[PeerId, float]:
        return {peer: seconds * heavier for peer, seconds in real(rules, record).items()}

    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        swarm = _swarm(Path(folder), case, setup)
        with mock.patch.object(CodecRules, "link_seconds", heavy):
            run_world(_live(swarm, case))
        return {"case": case.name, **_figures(swarm, case)}


def _weight(setup: Setup) -> float:
    """For how many bytes one of a real activation stands."""
    return BOUNDARY_BYTES * setup.times / (4 * MODEL["dim"] * MODEL["context"])


def _swarm(root: Path, case: Case, setup: Setup) -> Any:
    from peers.simulate.sim_swarm import SimSwarm
    from swarm.sim.links import Links
    from swarm.sim.wires import PayloadWeights

    def machine(peer: str, mbit: float) -> dict[str, Any]:
        return {"peer": peer, "up_mbit_per_s": mbit, "down_mbit_per_s": mbit}

    links = {
        "default": {"latency_ms": 5},
        "machine": [
            *(machine(f"trainer-{number}", TRAINER_MBIT_PER_S) for number in range(TRAINERS)),
            *(machine(f"host-{number}", MBIT_PER_S) for number in range(case.hosts - 1)),
            machine(f"host-{case.hosts - 1}", MBIT_PER_S / case.thinness),
        ],
    }
    swarm = SimSwarm(
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
    swarm.network.weights = PayloadWeights(activations=_weight(setup))
    return swarm


async def _live(swarm: Any, case: Case) -> None:
    await swarm.open()
    swarm.devices[f"host-{case.hosts - 1}"].slowness = case.slowness
    await swarm.run(timeout_s=1e5)


def _figures(swarm: Any, case: Case) -> dict[str, Cell]:
    from swarm.events import RoundDone, StepClosed

    seconds = {event.step: event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > 0}
    rounds: dict[int, float] = {}
    for event in swarm.events(RoundDone):
        rounds[event.step] = max(event.seconds, rounds.get(event.step, 0.0))
    fed = [took - rounds.get(step, 0.0) for step, took in sorted(seconds.items())]
    last = swarm.peers[f"host-{case.hosts - 1}"].endpoint.peer
    counted = [
        one["route"][0] == last for record in swarm.history() if record["step"] > LEARNT for one in record["committed"]
    ]
    return {
        "fed_s": round(statistics.median(fed[LEARNT:]), 3),
        "step_s": round(statistics.median(list(seconds.values())[LEARNT:]), 3),
        "first_fed_s": round(statistics.fmean(fed[:LEARNT]), 3),
        "slow_share": round(sum(counted) / len(counted), 4),
        "averaging_s": round(statistics.median(took for step, took in rounds.items() if step > LEARNT), 3),
    }

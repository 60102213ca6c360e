"""What ``swarm simulate`` plays, whatever the fidelity, and what comes of it.

A :class:`SimulationCase` is a step's work and the machines that do it, as ``swarm plan`` has them; :class:`StepCosts`
is what these machines take for it by :mod:`swarm.planning`, no matter who is there; a :class:`SimulationResult` is what
the fidelities have in common, so that they can be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from swarm.ids import PartName, shared_by
from swarm.planning.predict import StepForecast, predict, replica_seconds
from swarm.planning.workload import PartLayout, PeerClass, Workload
from swarm.sim.turnover import FlowCase, MachineRemoval, Turnover

Fidelity = Literal["flow", "journeys", "full"]
FIDELITIES: Mapping[Fidelity, int] = {"flow": 10_000, "journeys": 2_000, "full": 64}
"""And how many peers each of them can play."""
MOST_STEPS = 1_000_000
"""Of one that ends by time."""
RETRY_S = 5.0
"""How often it is tried to give a step up that has lost a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCase:
    """What is played.

    Attributes:
        work: A step, whose ``rows`` are those of all its microbatches.
        classes: Of machines.
        trainers: The class of each trainer.
        stages: Layers of each stage.
        rows: Of a microbatch.
        steps: After how many closed steps it ends.
        until_s: After how many seconds it ends, if that is earlier.
        turnover: The places of stage hosts, and what decides who holds what.
        trace: When which place loses its machine.
        kinds: Which share of microbatches is of each choice of variants; one where there are none.
    """

    work: Workload
    classes: tuple[PeerClass, ...]
    trainers: tuple[int, ...]
    stages: tuple[int, ...]
    rows: int
    steps: int
    until_s: float
    turnover: FlowCase
    trace: tuple[MachineRemoval, ...] = ()
    kinds: tuple[float, ...] = (1.0,)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return math.ceil(self.work.rows / self.rows)

    @property
    def peers(self) -> int:
        """Return how many there are at the beginning."""
        return self.turnover.places + len(self.trainers)

    @property
    def seed(self) -> int:
        """Of all that is drawn."""
        return self.turnover.seed

    def over(self, steps: int, now_s: float) -> bool:
        """Return whether it ends after so many steps, or then."""
        return steps >= self.steps or now_s >= self.until_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One closed step: when, how long it took, and with whom the next one begins."""

    step: int
    closed_s: float
    seconds: float
    peers: int
    fewest: int
    rate: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of a case. ``counts`` are of moves, joins and given up steps; ``held`` is how many hosts each part had
    at the end, ``kinds`` which share of microbatches was of each choice of variants; ``more`` is what one fidelity
    alone knows."""

    fidelity: Fidelity
    steps: tuple[SimulatedStep, ...]
    ended_s: float
    counts: Mapping[str, int]
    held: Mapping[PartName, int]
    kinds: tuple[float, ...]
    more: Mapping[str, float] = field(default_factory=dict)


class StepCosts:
    """What a step takes of those there. Cost: a forecast is found once for each distribution of classes."""

    def __init__(self, case: SimulationCase) -> None:
        self._case = case
        self._found: tuple[tuple[tuple[int, ...], ...], StepForecast] | None = None
        counts = Counter(case.trainers)
        self._trainers = tuple(counts[kind] for kind in range(len(case.classes)))

    @property
    def stages(self) -> int:
        """Return how many there are; also the number of what trainers hold."""
        return len(self._case.stages)

    def forecast(self, there: Turnover) -> StepForecast:
        """Return what a step would take if everybody who is there stayed."""
        kinds = there.kinds()
        numbers = range(len(self._case.classes))
        places = tuple(tuple(kinds[part][kind] for kind in numbers) for part in there.parts)
        if self._found is None or self._found[0] != places:
            layout = PartLayout(stages=self._case.stages, places=(*places, self._trainers), rows=self._case.rows)
            work = replace(self._case.work, shared=shared_by(there.parts[0]) > 0)
            self._found = places, predict(work, self._case.classes, layout)
        return self._found[1]

    def stage_rate(self, there: Turnover, part: PartName) -> float:
        """Microbatches a second that a stage computes, its links left out: what it has it computes again."""
        return self.forecast(there).parts[there.parts.index(part)].compute_rate

    def seconds(self, kind: int, at: int) -> float:
        """Of one microbatch, forward and backward, at a machine of a class that holds the part ``at``; the last is what
        trainers hold."""
        case = self._case
        needs = case.work.part(len(case.stages), at, case.stages[at] if at < len(case.stages) else 0)
        return replica_seconds(case.work, needs, case.classes[kind], 0.0, rows=case.rows, again=False)[0]

    def step(self, number: int, began_s: float, now_s: float, there: Turnover) -> SimulatedStep:
        """A step that closes now."""
        return SimulatedStep(
            step=number,
            closed_s=now_s,
            seconds=now_s - began_s,
            peers=there.ready,
            fewest=there.fewest,
            rate=self._case.microbatches / (now_s - began_s),
        )


class HopSizes:
    """Bytes of a microbatch over each boundary: 0 is the one before the first stage. With hosted ends next to nothing
    crosses the first and the last."""

    def __init__(self, case: SimulationCase) -> None:
        work = case.work
        self.stages, self._hosted = len(case.stages), work.hosted
        self._forth, self._back = case.rows * work.activation_bytes, case.rows * work.gradient_bytes

    def forth(self, boundary: int) -> float:
        """Of an activation."""
        return 0.0 if self._hosted and boundary in (0, self.stages) else self._forth

    def back(self, boundary: int) -> float:
        """Of a gradient."""
        return 0.0 if self._hosted and boundary in (0, self.stages) else self._back


def shares(counts: Mapping[int, int], kinds: int) -> tuple[float, ...]:
    """Return which share each of so many kinds has of what was counted."""
    whole = max(1, sum(counts.values()))
    return tuple(counts.get(kind, 0) / whole for kind in range(kinds))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of them lies; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))] if ordered else math.nan

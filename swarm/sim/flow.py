"""A run of many peers, record by record: who holds which stage, and what share of the throughput that leaves.

Nobody computes, and nothing is sent. Who comes, goes and moves is :class:`~swarm.sim.turnover.Turnover`'s affair, with
the product's own deciders. :class:`PacedFlow` plays a whole simulation: what a step takes is what ``swarm plan``
reckons for those that are there.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from swarm.ids import PartName, PeerId
from swarm.sim.simulation import RETRY_S, SimulatedStep, SimulationCase, SimulationResult, StepCosts
from swarm.sim.turnover import Turnover, machine_changes

AT_ONCE_S = 1e-9
"""What is done within this time of a moment is done then."""


@dataclass(slots=True)
class _OpenStep:
    """What is left of the open step: microbatches, and seconds in which none is taken. ``rate`` is now."""

    number: int
    began_s: float
    left: float
    beside_s: float
    rate: float = 0.0
    begun: bool = False

    def ends_s(self, now_s: float) -> float:
        """Return when it could close if nothing changed."""
        if self.left > 0 and self.rate <= 0:
            return math.inf
        return now_s + (self.left / self.rate if self.left > 0 else 0.0) + self.beside_s

    def pass_by(self, span: float) -> None:
        """So many seconds go by."""
        if self.left > 0 and self.rate > 0:
            feeding = min(span, self.left / self.rate)
            self.left = max(0.0, self.left - feeding * self.rate)
            span -= feeding
            if self.left <= AT_ONCE_S * self.rate:
                self.left = 0.0
        if self.left <= 0:
            self.beside_s = max(0.0, self.beside_s - span)


class PacedFlow:
    """Plays a simulation with shares of throughput instead of work. Cost: one forecast of a step for each record and
    each machine that comes or goes, and what the product decides with a record."""

    def __init__(self, case: SimulationCase) -> None:
        self._case, self._costs, self._there = case, StepCosts(case), Turnover(case.turnover)
        self._changes = machine_changes(case.trace)
        self._steps: list[SimulatedStep] = []
        self._now_s = 0.0

    def run(self) -> SimulationResult:
        """Play to the end: so many steps, or so many seconds."""
        case, there = self._case, self._there
        step = self._opened(1)
        while not case.over(len(self._steps), self._now_s):
            change_s = self._changes[0][0] if self._changes else math.inf
            closes_s = step.ends_s(self._now_s)
            if there.lost:
                closes_s = self._now_s + RETRY_S
            at_s = min(closes_s, change_s, there.resumes_s, case.until_s)
            step.pass_by(at_s - self._now_s)
            self._now_s = at_s
            if there.resumes_s <= at_s:
                there.resume(at_s)
                self._repace(step)
            elif change_s <= at_s:
                self._change(step)
            elif closes_s <= at_s:
                step = self._close(step)
        return SimulationResult("flow", tuple(self._steps), self._now_s, there.counts, there.hosts, case.kinds)

    def _opened(self, number: int) -> _OpenStep:
        step = _OpenStep(number, self._now_s, float(self._case.microbatches), 0.0)
        self._repace(step)
        return step

    def _repace(self, step: _OpenStep) -> None:
        """Those there now set the pace."""
        if any(self._there.there[part] <= 0 for part in self._there.parts):
            step.rate = 0.0
            return
        found = self._costs.forecast(self._there)
        step.rate = found.microbatches / found.feeding_s
        if not step.begun:  # every stage has somebody for the first time
            step.begun, step.beside_s = True, found.step_s - found.feeding_s

    def _change(self, step: _OpenStep) -> None:
        """A machine comes or goes. What one that goes had done of the step, the others of its stage do again."""
        _, _, place, removal = heapq.heappop(self._changes)
        there = self._there
        before = self._shares()
        gone = there.comes(place, self._now_s) if removal is None else there.goes(place, removal)
        if gone is None:
            return
        self._repace(step)
        part = PartName(str(there.roster[gone].part))
        rest = self._costs.stage_rate(there, part)
        if rest > 0:
            done = self._case.microbatches - step.left
            step.beside_s += done * before.get(gone, 0.0) / rest

    def _shares(self) -> dict[PeerId, float]:
        """Return what each member that is there computes of its stage's microbatches."""
        shares: dict[PeerId, float] = {}
        for peers in self._there.computing().values():
            speeds = {peer: self._there.machine(peer).speed for peer in peers}
            whole = math.fsum(speeds.values())
            shares |= {peer: speed / whole for peer, speed in speeds.items()}
        return shares

    def _close(self, step: _OpenStep) -> _OpenStep:
        closing = self._there.close(step.number, self._now_s)
        if closing.outcome == "open":
            return step
        if closing.outcome == "closed":
            self._steps.append(self._costs.step(step.number, step.began_s, self._now_s, self._there))
            return self._opened(step.number + 1)
        return self._opened(step.number)

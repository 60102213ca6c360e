"""What a step does to the tallies of experts (:mod:`swarm.models.experts`): it steers by them, and no gradient does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.models.layout import FlatLayout
from swarm.optim.update import ElementRun, StepNumbers, StepPlan, Update, Vectors, single, stay

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Steering:
    """Another optimizer, but for tallies: each element of one that is steered becomes larger by ``rate`` where it
    counted less than the mean of its tally, and smaller where more; one that is told stays (Wang et al., arXiv
    2408.15664, algorithm 1). Which is more is told by exact numbers, so that all machines say the same, and nothing is
    clipped."""

    inner: Update
    rate: float

    @property
    def vectors(self) -> tuple[str, ...]:
        """See :class:`~swarm.optim.update.Update`."""
        return self.inner.vectors

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """See :class:`~swarm.optim.update.Update`."""
        return self.inner.averaged(layout, step)

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device = _CPU
    ) -> StepPlan:
        """See :class:`~swarm.optim.update.Update`."""
        plan, own = self.inner.plan(state, mean, layout, numbers, device), list[ElementRun]()
        for slot in layout.slots:
            stop = slot.offset + slot.elements
            if slot.name in layout.steered:
                moves = _moves(mean[slot.offset : stop].tolist(), single(self.rate))
                sources = (torch.tensor(moves, dtype=torch.float32, device=mean.device),)
                own.append(ElementRun(slot.offset, stop, _steer, sources))
            elif slot.name in layout.told:
                own.append(ElementRun(slot.offset, stop, stay))
        return replace(plan, runs=tuple(_with(plan.runs, own)))


def _moves(counts: Sequence[float], rate: float) -> list[float]:
    """Return what each element moves by. A float32 times how many there are is exact in float64, as is their sum but
    for one rounding, which is the same everywhere."""
    total = math.fsum(counts)
    return [rate * ((total > one * len(counts)) - (total < one * len(counts))) for one in counts]


def _steer(old: Vectors, sources: Vectors, new: Vectors) -> None:
    torch.add(old[0], sources[0], out=new[0])
    stay(old[1:], (), new[1:])


def _with(runs: Sequence[ElementRun], own: Sequence[ElementRun]) -> Iterator[ElementRun]:
    """Yield runs of all elements, in order, with these in the place of what is done to theirs; those are in order,
    too, and each within a run."""
    waiting = list(own)
    for run in runs:
        start = run.start
        while waiting and waiting[0].start < run.stop:
            one = waiting.pop(0)
            if start < one.start:
                yield replace(run, start=start, stop=one.start)
            yield one
            start = one.stop
        if start < run.stop:
            yield replace(run, start=start)

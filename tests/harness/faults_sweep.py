"""Every moment at which a peer may die: what a run without faults wrote, each event in turn.

log = Moments(); world.listen(log.hear); run_world(swarm.run())
for number, moment in enumerate(log.draw(most=200, seed=1)):
    plan = FaultPlan(Strike("kill", moment.on, Kill((moment.on.peer,))), world=MemoryWorld(another_swarm))
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peers.chaos.plan import On

NO_PROTOCOL = frozenset({"Waiting", "SyncProgress", "DeviceUsed", "LinkUsage", "LoopLag", "DashboardServed"})
"""Events that say how things are, not that something was done."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When somebody may die. ``step`` is the one that was open there: 0 before the peer knew that the run had begun."""

    on: On
    step: int


class Moments:
    """All that is told of a run, as moments; a world that repeats itself has them again."""

    def __init__(self) -> None:
        self.seen: list[Moment] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open: Counter[str] = Counter()

    def hear(self, peer: str, kind: str, fields: Mapping[str, Any]) -> None:
        """See :meth:`peers.chaos.plan.World.listen`."""
        if kind in ("RunStarted", "StepClosed"):
            self._open[peer] += 1
        if kind not in NO_PROTOCOL:
            self._counts[peer, kind] += 1
            self.seen.append(Moment(On(kind, peer=peer, nth=self._counts[peer, kind]), self._open[peer]))

    def draw(self, *, most: int, seed: int, kinds: Callable[[str], bool] = lambda kind: True) -> list[Moment]:
        """At most ``most`` of them: all ``kinds`` in equal shares, drawn by the seed, in the order of peers."""
        fitting = [one for one in self.seen if kinds(str(one.on.kind))]
        return sorted(_draw(fitting, most, seed), key=lambda one: (one.on.peer, str(one.on.kind), one.on.nth))


def _draw(moments: Iterable[Moment], most: int, seed: int) -> list[Moment]:
    by_kind: dict[str, list[Moment]] = {}
    for moment in moments:
        by_kind.setdefault(str(moment.on.kind), []).append(moment)
    rng = random.Random(seed)
    drawn: list[Moment] = []
    for left, kind in zip(range(len(by_kind), 0, -1), sorted(by_kind, key=lambda one: len(by_kind[one])), strict=True):
        share = min(len(by_kind[kind]), (most - len(drawn)) // left)  # rare kinds first: the others get their rest
        drawn += rng.sample(by_kind[kind], share)
    return drawn

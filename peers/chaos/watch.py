"""Watch the peers of a play: what they have told so far, folded. From any thread, cheap to ask."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peers.chaos.world import Stamps

LEAVING = ("CutOff", "Draining", "PeerStopped")

Heard = Callable[[float, str, str, Mapping[str, Any]], None]


@dataclass
class RunWatch:
    """``closed`` says when each step was first closed, ``holding`` which part each ready peer holds (a trainer:
    ``ends``), ``happened`` how often each kind of event was heard. ``on_heard`` is told everything afterwards."""

    stamps: Stamps
    on_heard: list[Heard] = field(default_factory=list)
    invite: str = ""
    closed: dict[int, float] = field(default_factory=dict)
    holding: dict[str, str] = field(default_factory=dict)
    ever_ready: set[str] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def step(self) -> int:
        """The newest that is closed; 0 before the first."""
        return max(self.closed, default=0)

    @property
    def first_closed(self) -> float | None:
        """The time of the first closed step, None before."""
        return min(self.closed.values(), default=None)

    def hear(self, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        """An event of a peer, as :meth:`peers.chaos.plan.World.listen` tells them."""
        wall = self.stamps.told_at
        with self._lock:
            self.happened[kind] += 1
            self._fold(name, kind, fields, wall)
        for heard in self.on_heard:
            heard(wall, name, kind, fields)

    def so_far(self) -> Counter[str]:
        """``happened`` as it is now."""
        with self._lock:
            return Counter(self.happened)

    def gone(self, name: str) -> None:
        """A peer was struck so that it is not ready any more."""
        with self._lock:
            self.holding.pop(name, None)
            self.ever_ready.discard(name)

    def ready(self) -> dict[str, str]:
        """Return the ready peers and their parts."""
        with self._lock:
            return dict(self.holding)

    def _fold(self, name: str, kind: str, fields: Mapping[str, Any], wall: float) -> None:
        if kind == "Invited":
            self.invite = str(fields["invite"])
        elif kind == "StepClosed":
            step = int(fields["step"])
            self.closed[step] = min(wall, self.closed.get(step, wall))
        elif kind == "PeerReady":
            self.holding[name] = str(fields.get("part") or "nothing")
            self.ever_ready.add(name)
        elif kind in LEAVING:
            self.holding.pop(name, None)

"""Findings of a checker, the limits that it checks by, and which faults excuse whom for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from peers.chaos.invariants.evidence import Evidence

ENDED_BY: Mapping[str, str] = {
    "pause": "resume",
    "partition": "heal",
    "disconnect": "reconnect",
    "fill_disk": "free_disk",
}
"""Which fault ends which, where that has no seconds."""
MARKS = frozenset((*ENDED_BY.values(), "moment"))
"""Lines of ``faults.jsonl`` that are no faults: they end one, or name a moment."""
SLOW = frozenset(("slow_link", "slow_links", "slow_device", "limit_cpu", "strangers"))
"""Of links, of a device, or of all processors of a peer, or strangers who flood it: no reason to be lost."""
HARMLESS = MARKS | SLOW
"""They excuse nobody."""
PASSING = frozenset(("skew_clock", "corrupt_bytes", "twin"))
"""A connection breaks, or a second process gives up: over as soon as it is done."""
REBORN = frozenset(
    ("kill", "kill_daemon", "restart", "lie", "joiner_storm", "stop", "limit_memory", "upgrade", "start")
)
"""Over once the peer is ready, or its daemon runs again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One place where an invariant does not hold."""

    invariant: str
    text: str
    step: int = -1
    peer: str = ""

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step >= 0 else []
        where += [self.peer] if self.peer else []
        return f"{self.invariant} {', '.join(where)}: {self.text}" if where else f"{self.invariant}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bars, in seconds of the run's clock. ``target`` microbatches make a step, None when it is not known: then all
    steps must have as many. ``waited_until`` says until when more steps were waited for, where somebody did; after
    ``until`` all were told to leave, and who misses whom does not count.
    """

    target: int | None = None
    gap_s: float = 60.0
    waited_until: float | None = None
    until: float = math.inf


@dataclass(slots=True)
class Findings:
    """``looked`` counts what was compared, so that a check that had nothing to look at is seen to have had nothing."""

    invariant: str
    looked: int = 0
    failures: list[Failure] = field(default_factory=list)

    def expect(self, holds: bool, text: str, *, step: int = -1, peer: str = "") -> None:
        """One comparison."""
        self.looked += 1
        if not holds:
            self.failures.append(Failure(self.invariant, text, step, peer))


Checker = Callable[[Evidence, Limits, Findings], None]

"""What both candidates of the benchmark ``allreduce-kill`` average, when a member dies, and how results are judged."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks._worker import say

Vector = NDArray[np.float32]

MEMBERS, ELEMENTS = 4, 1 << 22
"""16 MiB: 64 chunks of ours, 32 parts of hivemind's, so that every member reduces several of either."""

TIMEOUT_S = 8.0
"""A round's, for either candidate: some twenty times what it takes without a fault on a quiet machine."""

SHARED_EVENTS = ("sent", "reduced", "answered")
"""What happens in a round of either candidate: the victim's numbers leave for a reducer, a piece of its own part is
put together, a result leaves for a member."""

SIGNED = "signed"
"""A member has acknowledged the victim's word that it holds the whole. Only ours signs a round off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The member of ``slot`` kills itself with SIGKILL at the event that completes ``share`` of its kind's number."""

    slot: int
    event: str
    share: float

    def count(self, total: int) -> int:
        """Which of ``total`` events that is, from 1."""
        return min(total, max(1, math.ceil(self.share * total)))


def shared_kills(count: int, members: int = MEMBERS) -> list[Kill]:
    """Kinds and victims in turns (all twelve pairs in twelve kills), shares spread evenly over the round."""
    levels = max(1, math.ceil(count / len(SHARED_EVENTS)))
    return [
        Kill(
            slot=(number + number // 12) % members,
            event=SHARED_EVENTS[number % len(SHARED_EVENTS)],
            share=(number // len(SHARED_EVENTS) + 0.5) / levels,
        )
        for number in range(count)
    ]


def signed_kills(count: int, members: int = MEMBERS) -> list[Kill]:
    """After one, two, all three others have the victim's signature, in turns."""
    others = members - 1
    return [Kill(slot=number % members, event=SIGNED, share=(number % others + 1) / others) for number in range(count)]


class Fuse:
    """Counts events of a round and, at the one that is meant, says so and ends this process with SIGKILL.

    ``totals`` says how many events of a kind a whole round has. :meth:`note` may be called from any thread.
    """

    def __init__(self, kill: Kill | None, totals: Mapping[str, int]) -> None:
        self.event = kill.event if kill else ""
        self._total = totals[kill.event] if kill else 0
        self._left = kill.count(self._total) if kill else 0
        self._count = self._left
        self._lock = threading.Lock()

    def note(self, event: str) -> None:
        """One more of that kind is about to be."""
        if event != self.event:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                say({"fired": event, "count": self._count, "of": self._total})
                os.kill(os.getpid(), signal.SIGKILL)


def vector_of(number: int, slot: int, kind: str, elements: int = ELEMENTS) -> Vector:
    """A member's numbers in a round, float32; the same in every process.

    ``whole``: multiples of 12, so that the mean of any two, three or four of them, its difference from any of them and
    the way back are exact in float32: what differs, differs because of the kill. ``normal``: as gradients are.
    """
    rng = np.random.default_rng([number, slot])
    if kind == "normal":
        return rng.standard_normal(elements, dtype=np.float32)
    return rng.integers(-1000, 1001, elements, dtype=np.int16).astype(np.float32) * np.float32(12)


def exact_mean(inputs: Mapping[int, Vector], slots: Iterable[int]) -> Vector:
    """The mean over some members, rounded once."""
    chosen = sorted(slots)
    total = np.zeros(len(inputs[chosen[0]]), dtype=np.float64)
    for slot in chosen:
        total += inputs[slot]
    return (total / len(chosen)).astype(np.float32)


def differing_share(vectors: Sequence[Vector]) -> float:
    """The share of coordinates in which not all members hold the same bits; 0 of fewer than two members."""
    if len(vectors) < 2:
        return 0.0
    first = vectors[0].view(np.uint32)
    differs = np.zeros(first.shape, dtype=bool)
    for other in vectors[1:]:
        differs |= other.view(np.uint32) != first
    return float(differs.mean())


def agreed_by_all(digests: Mapping[int, str]) -> bool:
    """Whether a round's result may be applied: every live member reports the same one. Empty means it holds none."""
    return len(set(digests.values())) == 1 and "" not in digests.values()

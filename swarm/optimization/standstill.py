"""When trainers that are there hold a batch up: a rule over what its leader sees now and then (pure)."""

from __future__ import annotations

from swarm.ids import PeerId
from swarm.waiting import StallDetector

STALLED_S = 60.0
"""How long nothing may come of a batch of which all but some trainers have done their part. More than any hop may take:
these trainers are there, and get nothing done; a link may be cut that only they need."""
SLOWEST = 4
"""So many times as long as all the others needed is waited at least: a slow trainer is no stalled one."""
LOOK_S = 5.0
"""How often it is to be looked."""
AWAY_S = 2 * LOOK_S
"""A leader that has not looked for so long waited for a majority or for a part of the model, or stood still itself."""


class Standstill:
    """One batch, from ``now`` on, in seconds of any steady clock. Time in which its leader did not look does not count:
    nobody could have got anything done. The batch began later, and who held it up before has all the time again."""

    def __init__(self, now: float) -> None:
        self._began = self._looked = now
        self._stall = StallDetector[tuple[int, tuple[PeerId, ...]]](now, (0, ()))

    def look(self, now: float, done: int, waits_for: tuple[PeerId, ...]) -> dict[PeerId, str]:
        """The trainers that hold the batch up, and why; most often nobody. ``done`` microbatches are completed, and the
        rest can only come from ``waits_for``, as :meth:`Ledger.waits_for` says. What is put aside brings no batch on:
        a trainer with which something is wrong may put everything aside."""
        away, self._looked = now - self._looked, now
        if away > AWAY_S:
            self._began = self._began + now - self._stall.moved
            self._stall.excuse(now)
        still = self._stall.look(now, (done, waits_for))
        if not waits_for or still < max(STALLED_S, SLOWEST * (self._stall.moved - self._began)):
            return {}
        return dict.fromkeys(waits_for, f"nothing came of its work for {still:.0f} s")

    def still_s(self, now: float) -> float:
        """For how long the batch has not come on, as far as its leader has looked."""
        return self._stall.still(now)

"""Exclude members that are there from a step: which, why and for how long. Pure.

:class:`ExclusionPolicy` judges members in one term, :class:`BatchStall` trainers that hold a batch up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from swarm.errors import Busy, DeadlineMissed, PeerError, Unreachable
from swarm.ids import PeerId
from swarm.waiting import StallDetector

MAX_FAILURES = 3
"""How often a member that answers pings may fail to answer a question, before it is left out of the step."""


class ExclusionPolicy:
    """Of the members, in one term of a step. Who is late, lacks something or says no may be asked again where nobody
    else is there; who differs from what most others hold may not, unless it is trusted: alone, it would decide."""

    def __init__(self) -> None:
        self._unfit: dict[PeerId, str] = {}
        self._failures: Counter[PeerId] = Counter()
        self._no: set[PeerId] = set()
        self._differing: set[PeerId] = set()
        self._again: set[PeerId] = set()
        self.tied: dict[PeerId, str] = {}
        """Replicas of a part that all differ: they count as lost, so that a copy takes over."""

    @property
    def unfit(self) -> Mapping[PeerId, str]:
        """Those left out, with the reason."""
        return MappingProxyType(self._unfit)

    def failed(self, peer: PeerId, error: PeerError, *, there: bool, last: bool) -> None:
        """It gave no answer. Who is ``there`` and says no, or fails again and again, is unfit; the ``last`` of a part
        may be late as often as others may be busy: without it nothing can be closed."""
        self._failures[peer] += 1
        late = isinstance(error, (Unreachable, Busy, DeadlineMissed))
        may_pass = late and (last or not isinstance(error, DeadlineMissed))
        if there and not (may_pass and self._failures[peer] < MAX_FAILURES):
            self._unfit[peer] = str(error)
            if not late:
                self._no.add(peer)

    def lacks(self, peer: PeerId, why: str) -> None:
        """It does not hold what counts: once or twice, that may be because who was to help it died meanwhile."""
        self._failures[peer] += 1
        if self._failures[peer] >= MAX_FAILURES:
            self._unfit[peer] = why

    def holds_up(self, peers: Mapping[PeerId, str]) -> None:
        """Nothing comes of what they do, or of rounds with them."""
        self._unfit |= peers

    def differ(self, peers: Iterable[PeerId], why: str) -> None:
        """They hold other numbers than most: the step closes without them, or with others who are back."""
        self._differing |= set(peers)
        self._unfit |= dict.fromkeys(peers, why)

    def differing(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Those of them that differ."""
        return sorted(self._differing.intersection(peers))

    def hopeless(self, peers: Iterable[PeerId]) -> bool:
        """Whether each of these said no or differs: to wait for them is of no use."""
        return all(peer in self._no or peer in self._differing for peer in peers)

    def forgivable(self, peers: Iterable[PeerId]) -> dict[PeerId, str]:
        """Those of them that are left out and may be asked again, with the reason: who does not differ."""
        return {
            peer: self._unfit[peer] for peer in sorted(peers) if peer in self._unfit and peer not in self._differing
        }

    def trust(self, peers: Iterable[PeerId]) -> None:
        """They do not count as differing any more, and may be forgiven."""
        self._differing.difference_update(peers)

    def on_trial(self, peer: PeerId) -> bool:
        """Whether it was left out before: that it is asked again does not say that it is of any use."""
        return peer in self._again

    def forgive(self, peers: Iterable[PeerId]) -> None:
        """They are asked again, as if they had never failed; those that differ are not."""
        for peer in self.forgivable(peers):
            del self._unfit[peer]
            self._failures.pop(peer, None)
            self._no.discard(peer)
            self._again.add(peer)


# --- trainers that are there and hold a batch up ---------------------------------------------------------------------
# A rule over what the leader sees now and then.


STALLED_S = 60.0
"""How long nothing may come of a batch of which all but some trainers have done their part. More than any hop may take:
these trainers are there, and get nothing done; a link may be cut that only they need."""
SLOWEST = 4
"""So many times as long as all the others needed is waited at least: a slow trainer is no stalled one."""
LOOK_S = 5.0
"""How often it is to be looked."""
AWAY_S = 2 * LOOK_S
"""A leader that has not looked for so long waited for a majority or for a part of the model, or stood still itself."""


class BatchStall:
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

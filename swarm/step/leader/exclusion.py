"""Exclude members from a step: which, why and for how long. Pure.

:class:`ExclusionPolicy` judges members in one term, :class:`BatchStall` trainers that hold a batch up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from swarm.consensus.roster import Roster, lost_parts, needed, unserved
from swarm.errors import Busy, DeadlineMissed, PeerError, Unreachable
from swarm.ids import PartName, PeerId
from swarm.step.turnout import MAX_TOLD, REASON_CHARS
from swarm.waiting import StallDetector

MAX_FAILURES = 3
"""How often a member that answers pings may fail to answer a question, before it is left out of the step."""
PROVEN_WRONG = "others of its part computed again what it did, and prove it wrong"
ALONE_S = 300.0
"""For so long a replica that differs from what most held decides nothing alone: others may come back."""


class ExclusionPolicy:
    """Of the members of a step, in one term. ``gone`` are in all questions those that do not answer, with the reason.

    Who is late, lacks something or says no may be asked again where nobody else is there; who differs from what most
    others hold only after ALONE_S: alone, it would decide. Who held up the steps before is out from the beginning,
    where others are there and feed without it; so is who was proven ``wrong``, by the accused of each proof, while
    its part has another than all whom that one names: a record has the whole proof, or none. ``served``: see
    :class:`~swarm.step.rules.StepRules`.
    """

    def __init__(
        self, roster: Roster, *, served: bool = False, wrong: Callable[[], Mapping[PeerId, Collection[PeerId]]] = dict
    ) -> None:
        self._roster, self._served, self._wrong = roster, served, wrong
        self._unfit: dict[PeerId, str] = {}
        self._failures: Counter[PeerId] = Counter()
        self._no: set[PeerId] = set()
        self._differing: set[PeerId] = set()
        self._again: set[PeerId] = set()
        self._tied: dict[PeerId, str] = {}
        self._lost_since: dict[str, float] = {}
        for peer, why in sorted(roster.dismissed.items()):
            if not (self.is_last(peer, {}) or self._leaves_one(peer) or self._feeds_others(peer)):
                self._unfit[peer] = why

    # --- who is out, and why -------------------------------------------------------------------------------------

    def lost(self, gone: Mapping[PeerId, str]) -> dict[PeerId, str]:
        """Return who counts as lost: those that are gone, and all replicas of a part that are tied."""
        return {**gone, **self._tied}

    def out(self, gone: Mapping[PeerId, str]) -> dict[PeerId, str]:
        """Return who does not close this step: those that are lost, or left out."""
        out = {**self.lost(gone), **self._unfit}
        for _, wrong in sorted(self._wrong().items()):
            if not needed(self._roster, lost_parts(self._roster, {*out, *wrong})).intersection(wrong):
                out |= dict.fromkeys(wrong, PROVEN_WRONG)
        return out | unserved(self._roster, out) if self._served else out

    def is_last(self, peer: PeerId, gone: Mapping[PeerId, str]) -> bool:
        """Return whether a part would be lost without this member, or, with hosted ends, nobody would feed."""
        return peer in needed(self._roster, lost_parts(self._roster, {*self.out(gone), peer}))

    def _leaves_one(self, peer: PeerId) -> bool:
        """Return whether its part would have one replica left, with which nobody could compare anything: it may be that
        one that had it called slow."""
        part, out = self._roster[peer].part, self._roster.dismissed.keys() | {peer}
        return part is not None and len(set(self._roster.replicas(PartName(part))) - out) == 1

    def _feeds_others(self, peer: PeerId) -> bool:
        """Return whether microbatches of another trainer have no way without this member: where they stay in one
        organisation, it may be the only one of a stage there."""
        return bool({*self._roster.feeding(self._unfit)} - {peer, *self._roster.feeding({*self._unfit, peer})})

    def differing(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return those of them that differ."""
        return sorted(self._differing.intersection(peers))

    def forgivable(self, peers: Iterable[PeerId]) -> dict[PeerId, str]:
        """Return those of them that are left out and may be asked again, with the reason: who does not differ."""
        return {
            peer: self._unfit[peer] for peer in sorted(peers) if peer in self._unfit and peer not in self._differing
        }

    # --- what they did -------------------------------------------------------------------------------------------

    def failed(self, failed: Mapping[PeerId, PeerError], gone: Mapping[PeerId, str]) -> None:
        """They gave no answer. Who is there and says no, or fails again and again, is left out; the last of a part may
        be late as often as others may be busy: without it nothing can be closed."""
        for peer in sorted(failed):  # the same who is out, in whatever order they failed
            self._failures[peer] += 1
            error = failed[peer]
            late = isinstance(error, (Unreachable, Busy, DeadlineMissed))
            may_pass = late and (not isinstance(error, DeadlineMissed) or self.is_last(peer, gone))
            if peer not in gone and not (may_pass and self._failures[peer] < MAX_FAILURES):
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

    def tie(self, peers: Iterable[PeerId], why: str) -> None:
        """These are there, and count as lost from now on, so that a copy takes over."""
        self._tied |= dict.fromkeys(peers, why)

    def untie(self, part: PartName) -> bool:
        """Ask the replicas of a part again that were tied, for nobody can take it over; whether there were any."""
        return bool([peer for peer in self._roster.replicas(part) if self._tied.pop(peer, None) is not None])

    # --- who is asked again --------------------------------------------------------------------------------------

    def forgive_needed(self, now: float, gone: Mapping[PeerId, str]) -> None:
        """Have those asked again, as if they had never failed, that were left out and without whom a part is lost, or
        nobody feeds: what kept them from answering may have passed. One that differs is, too, when ALONE_S have gone by
        and no other is back: its numbers count as those of any replica do that is the only one."""
        lost = lost_parts(self._roster, self.out(gone))
        self._lost_since = {part: self._lost_since.get(part, now) for part in lost}
        long_ago = [part for part, since in self._lost_since.items() if now - since >= ALONE_S]
        self._differing -= needed(self._roster, long_ago) - set(gone)
        for peer in self.forgivable(needed(self._roster, lost)):
            del self._unfit[peer]
            self._failures.pop(peer, None)
            self._no.discard(peer)
            self._again.add(peer)

    def parts_are_held(self, out: Collection[PeerId]) -> None:
        """Every part has a replica that is there: those parts were lost no longer of which one is that was not left out
        before in this term. That another is asked again does not say that it is of any use."""
        self._lost_since = {
            part: since
            for part, since in self._lost_since.items()
            if needed(self._roster, [part]) - set(out) <= self._again
        }


def left_out(roster: Roster, out: Mapping[PeerId, str]) -> dict[str, str]:
    """Return who of the roster is out and why, as far as others are told."""
    told = [(peer, why) for peer, why in sorted(out.items()) if peer in roster]
    return {peer: why[:REASON_CHARS] for peer, why in told[:MAX_TOLD]}


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

"""Who holds another part from the next step on: the plan that every member makes of the record before and of who joins,
leaves or was lost in the step. Pure.

A host moves only to a part of which it keeps a copy, and only if it says so itself (:mod:`swarm.step.member.rescue`).
The leader asks those that it expects to be planned while the others average; which of those that said yes are moved the
plan decides, so that all a leader can do is leave somebody out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from swarm.columns import host_parts, loads
from swarm.consensus.changes import Changes
from swarm.consensus.copies import copy_duties
from swarm.consensus.rebalance import NO_RETURN_RECORDS, Balance, Move, MovePlan, plan
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.ids import PartName, PeerId
from swarm.step.boundary_codecs import FIXED, CodecRules

MAX_RATIO = 8.0
"""How much faster or slower than the middle one a host counts at most."""


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Whether ``on``, and what the manifest says of it: so many ``copies`` of each part, the run's last step, of
    boundaries ``codecs``, which tell what links take, and how many replicas stay ``kept`` where one leaves."""

    on: bool = False
    copies: int = 0
    steps: int = 0
    codecs: CodecRules = FIXED
    kept: int = 1

    def planned(self, before: CloseRecord, changes: Changes) -> Mapping[PeerId, PartName]:
        """Return who is to hold which part by :meth:`plan`."""
        return {move.peer: move.target for move in self.plan(before, changes).moves}

    def plan(self, before: CloseRecord, changes: Changes) -> MovePlan:
        """Plan the moves with the step that follows ``before``, in which ``changes`` are granted; moves among those do
        not matter. Nobody moves with the run's last step. Cost: the copies of every stage, and O(moves · stages ·
        copies)."""
        if not self.on:
            return MovePlan()
        return plan(self._balance(before, changes), self._copied(before.members, before.step + 1))

    def dealt(self, before: CloseRecord, changes: Changes) -> Mapping[str, int]:
        """Return what the record says of when copies of parts were given to other peers, with the step that follows
        ``before``. Moves go where copies lead. Where they lead nowhere, while others, had they copies, would move, the
        part that these would go to has its copies dealt anew: every so many records, until they lead somewhere; so has
        one to which nobody moves that was planned to, with every so many-th record: who keeps a copy may say no."""
        step = before.step + 1
        moves = self.plan(before, changes).moves
        if not self.on or (moves and (step % NO_RETURN_RECORDS or _made(moves, changes))):
            return before.dealt
        balance = self._balance(before, changes)
        may = {peer: balance.stages for peer in balance.held if self._settled(before.members, peer, step)}
        moves = moves or plan(balance, may).moves
        if not moves or step - before.dealt.get(moves[0].target, 0) < NO_RETURN_RECORDS:
            return before.dealt
        return {**before.dealt, moves[0].target: step}

    def _balance(self, before: CloseRecord, changes: Changes) -> Balance:
        roster, step = before.members, before.step + 1
        stages = [part for part in host_parts(roster.parts) if part not in roster.owners]  # with these nobody helps
        held = {peer: part for part in stages for peer in roster.replicas(part)}
        joining = {PeerId(join.member.peer): PartName(join.member.part or "") for join in changes.joins}
        return Balance(
            step=step,
            stages=stages,
            held=held,
            joining={peer: part for peer, part in joining.items() if part in stages},
            going={PeerId(peer) for peer in (*changes.absent, *(leave.peer for leave in changes.leaves))},
            speed=self._speeds(before, held),
            load=loads(stages, before.passed),
            machines=roster.machines,
            kept=self.kept,
            last=step >= self.steps,
        )

    def _copied(self, roster: Roster, step: int) -> Mapping[PeerId, list[PartName]]:
        """By peer the stages to which it may move: those of which it keeps a copy."""
        found: dict[PeerId, list[PartName]] = {}
        for part, holders in copy_duties(roster, self.copies).items():
            for peer in holders:
                if self._settled(roster, peer, step):
                    found.setdefault(peer, []).append(part)
        return found

    @staticmethod
    def _settled(roster: Roster, peer: PeerId, step: int) -> bool:
        """Return whether a peer may move: who came to its part only lately stays, so that nobody moves to and fro."""
        return roster[peer].since == 0 or step - roster[peer].since >= NO_RETURN_RECORDS

    def _speeds(self, before: CloseRecord, held: Mapping[PeerId, PartName]) -> Mapping[PeerId, float]:
        """Microbatches that each host takes while the middle one of those that have told takes one; a microbatch comes
        in and goes on both ways, and the slower of its device and of its link counts. Each says so of itself: none
        counts for more than MAX_RATIO times the middle one, or for less than that part of it."""
        seconds = self._seconds(before, held)
        middle = median_low(seconds.values()) if seconds else 1.0
        return {peer: min(MAX_RATIO, max(1 / MAX_RATIO, middle / each)) for peer, each in seconds.items()}

    def capacities(self, record: CloseRecord) -> tuple[float, ...]:
        """Return the microbatches a second that each stage can take by the record: the sum over those of its replicas
        that have told their pace, 0 where none has."""
        return tuple(
            sum(1 / each for each in self._seconds(record, record.members.replicas(part)).values())
            for part in host_parts(record.members.parts)
        )

    def _seconds(self, record: CloseRecord, hosts: Iterable[PeerId]) -> Mapping[PeerId, float]:
        """Seconds that a microbatch takes with each host that has told its pace."""
        links = self.codecs.link_seconds(record)
        return {peer: max(pace / 1e6, links.get(peer, 0.0)) for peer in hosts if (pace := record.paces.get(peer))}


def _made(moves: Sequence[Move], changes: Changes) -> bool:
    """Return whether any of these is made."""
    return not {move.peer for move in moves}.isdisjoint(PeerId(move.peer) for move in changes.reassigns)


STILL = MoveRules()
"""Nobody moves."""

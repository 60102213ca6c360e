"""Who holds another part from the next step on: the plan that every member makes of the record before and of who joins,
leaves or was lost in the step. Pure.

A host moves only to a part of which it keeps a copy, and only if it says so itself (:mod:`swarm.step.member.rescue`).
The leader asks those that it expects to be planned while the others average; which of those that said yes are moved the
plan decides, so that all a leader can do is leave somebody out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from swarm.columns import host_parts, loads
from swarm.consensus.changes import Changes
from swarm.consensus.copies import copy_duties
from swarm.consensus.rebalance import NO_RETURN_RECORDS, Balance, MovePlan, plan
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.ids import PartName, PeerId
from swarm.step.boundary_codecs import FIXED, CodecRules


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Whether ``on``, and what the manifest says of it: so many ``copies`` of each part, the run's last step, and of
    boundaries ``codecs``, which tell what links take."""

    on: bool = False
    copies: int = 0
    steps: int = 0
    codecs: CodecRules = FIXED

    def planned(self, before: CloseRecord, changes: Changes) -> Mapping[PeerId, PartName]:
        """Return who is to hold which part by :meth:`plan`."""
        return {move.peer: move.target for move in self.plan(before, changes).moves}

    def plan(self, before: CloseRecord, changes: Changes) -> MovePlan:
        """Plan the moves with the step that follows ``before``, in which ``changes`` are granted; moves among those do
        not matter. Nobody moves with the run's last step. Cost: the copies of every stage, and O(moves · stages ·
        copies)."""
        step = before.step + 1
        if not self.on:
            return MovePlan()
        roster = before.members
        stages = host_parts(roster.parts)
        held = {peer: part for part in stages for peer in roster.replicas(part)}
        joining = [join.member for join in changes.joins if join.member.role == "stage"]
        balance = Balance(
            step=step,
            stages=stages,
            held=held,
            joining={PeerId(member.peer): PartName(member.part or "") for member in joining},
            going={PeerId(peer) for peer in (*changes.absent, *(leave.peer for leave in changes.leaves))},
            speed=self._speeds(before, held),
            load=loads(host_parts(before.members.parts), before.committed),
            last=step >= self.steps,
        )
        return plan(balance, self._copied(roster, step))

    def _copied(self, roster: Roster, step: int) -> Mapping[PeerId, list[PartName]]:
        """By peer the stages to which it may move: those of which it keeps a copy. Who came to its own only lately
        stays, so that nobody moves to and fro."""
        found: dict[PeerId, list[PartName]] = {}
        for part, holders in copy_duties(roster, self.copies).items():
            for peer in holders:
                if roster[peer].since == 0 or step - roster[peer].since >= NO_RETURN_RECORDS:
                    found.setdefault(peer, []).append(part)
        return found

    def _speeds(self, before: CloseRecord, held: Mapping[PeerId, PartName]) -> Mapping[PeerId, float]:
        """Microbatches that each host takes while the middle one of those that have told takes one; a microbatch comes
        in and goes on both ways, and the slower of its device and of its link counts."""
        seconds = self._seconds(before, held)
        middle = median(seconds.values()) if seconds else 1.0
        return {peer: middle / each for peer, each in seconds.items()}

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


STILL = MoveRules()
"""Nobody moves."""

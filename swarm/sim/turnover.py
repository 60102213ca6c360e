"""Who is there in a run of many peers: machines that come and go, and what each record makes of it.

What decides is the product's own: :func:`~swarm.consensus.placement.choose_place` for those who join,
:class:`~swarm.consensus.changes.ChangeRules` for each record's roster, :func:`~swarm.consensus.copies.copy_duties`, and
:func:`~swarm.consensus.rebalance.plan`. Nobody computes here: :mod:`swarm.sim.flow` and :mod:`swarm.sim.journeys` do.

Read :class:`Turnover` first.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from swarm.columns import host_parts, stage_parts
from swarm.consensus.changes import Admission, ChangeRules, Changes, Departure, OpenStepFacts, Reassign, RosterRules
from swarm.consensus.copies import copy_duties
from swarm.consensus.placement import Candidate, Places, Wish, assign_stages, choose_place
from swarm.consensus.rebalance import NOTHING_MOVED, Balance, Move, RecentMoves, RuleName, plan
from swarm.consensus.roster import Member, Roster, lost_parts
from swarm.ids import PartName, PeerId, RunId

RUN, HASH, SIGNATURE = RunId("0" * 64), "0" * 64, bytes(64)
"""Stand for what nobody checks here."""
QUEUED_MOST = 3.0
"""Microbatches that wait at a peer of the slowest stage."""


@dataclass(frozen=True, slots=True)
class SimMachine:
    """What is at one place, no matter who lives there: the number of its class, microbatches a second, how long it
    downloads a stage when it joins (None: as the case has it), and the stage it asks for, if it does."""

    kind: int = 0
    speed: float = 1.0
    download_s: float | None = None
    stage: int | None = None


class MachineRemoval(Protocol):
    """Machines that are taken at ``at_s``: of which places, and when each place has another one."""

    @property
    def at_s(self) -> float:
        """Seconds since the run began."""

    @property
    def places(self) -> tuple[int, ...]:
        """The places, from 0 on."""

    @property
    def back_s(self) -> tuple[float, ...]:
        """By place, when it has another machine."""

    @property
    def noticed(self) -> bool:
        """Return whether the machines are told before."""


ALIKE = SimMachine()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCase:
    """What is played. Times are seconds.

    Attributes:
        places: Machines at the beginning.
        stages: Stages of the model.
        parts: What hosts hold at first; empty: one part a stage.
        load: How many of all microbatches pass each part, 1 of those that are not named.
        delink_at: Step with whose record stages part that share their layers; 0: never.
        until_s: How long the run takes.
        step_s: How long a step takes.
        download_s: How long a joiner downloads its stage, and a peer that SWARM's rule moves.
        copy_s: How long a new copy downloads.
        stall_s: How long a mover stands still that keeps a copy.
        copies: Copies of each stage.
        rule: Who moves.
        every_s: How often moves are decided, at a record; 0: with each.
        arrivals: Whether joiners count those on their way.
        notices: Whether machines that are told before stay to the end of the step, and are known to leave.
        seed: Of peers' names and of the noise in queues.
        trainers: Peers that train, who stay.
        machines: By place; empty: all alike.
        copies_follow: Whether copies follow the roster no matter who moves; else they do under ``ours``, which needs
        them.
    """

    places: int
    stages: int
    until_s: float
    step_s: float = 30.0
    download_s: float = 60.0
    copy_s: float = 120.0
    stall_s: float = 3.0
    copies: int = 2
    rule: RuleName = "none"
    every_s: float = 0.0
    arrivals: bool = True
    notices: bool = False
    seed: int = 0
    trainers: int = 1
    machines: Sequence[SimMachine] = ()
    copies_follow: bool = False
    parts: tuple[PartName, ...] = ()
    load: Mapping[PartName, float] = field(default_factory=dict)
    delink_at: int = 0


@dataclass(slots=True)
class Arriving:
    """A peer on its way: to this stage, whose state it has at ``ready_s``. ``moving``: it was a member before."""

    part: PartName
    ready_s: float
    moving: bool = False


Change = tuple[float, int, int, MachineRemoval | None]
"""When, in which order of one moment, at which place, and how: None where another machine comes."""


def machine_changes(trace: Sequence[MachineRemoval]) -> list[Change]:
    """Return when each place loses its machine, and has another, in order; it is a heap, too."""
    events: list[Change] = []
    for removal in trace:
        for place, back_s in zip(removal.places, removal.back_s, strict=True):
            events += [(removal.at_s, 0, place, removal), (back_s, 1, place, None)]
    return sorted(events, key=lambda event: event[:3])


@dataclass(frozen=True, slots=True)
class Closing:
    """What came of closing a step, and who moves with its record."""

    outcome: Literal["closed", "given up", "open"]
    moves: tuple[Move, ...] = ()


@dataclass(slots=True)
class Turnover:
    """The roster of a ``case``, record by record, and who of it is there."""

    case: FlowCase
    roster: Roster = field(init=False)
    there: Counter[PartName] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    place_of: dict[PeerId, int] = field(default_factory=dict)
    _rng: random.Random = field(init=False)
    _rules: ChangeRules = field(init=False)
    parts: tuple[PartName, ...] = field(init=False)
    _recent: RecentMoves = NOTHING_MOVED
    _closed_s: float = 0.0
    _at: dict[int, PeerId] = field(default_factory=dict)
    _gone: set[PeerId] = field(default_factory=set)
    _noticed: set[PeerId] = field(default_factory=set)
    _arriving: dict[PeerId, Arriving] = field(default_factory=dict)
    _stalled: dict[PeerId, float] = field(default_factory=dict)
    _copied: dict[tuple[PeerId, PartName], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case
        self.parts = case.parts or stage_parts(case.stages)
        rules = RosterRules(RUN, 20_000, delink_at=case.delink_at)
        self._rules = ChangeRules(rules, lambda peer, data, signature: True)
        self._rng = random.Random(f"flow {case.seed}")
        founders = [self._named(place) for place in range(case.places)]
        candidates = [
            Candidate(peer=peer, role="stage", name=peer, stage=self.machine(peer).stage, addresses=())
            for peer in founders
        ]
        names = ["T", *(f"T{number}" for number in range(1, case.trainers))]
        trainers = [Member(peer=name, role="trainer", name=name, part=None, addresses=()) for name in names]
        self.roster = Roster([*assign_stages(candidates, self.parts)[0].members, *trainers])
        self._copied = {
            (peer, part): 0.0 for part, peers in copy_duties(self.roster, case.copies).items() for peer in peers
        }
        self.there.update(PartName(member.part) for member in self.roster.members if member.part)

    # --- machines ----------------------------------------------------------------------------------------------------

    def _named(self, place: int) -> PeerId:
        peer = PeerId(f"s{self.case.seed}p{self.counts['named']}")
        self.counts["named"] += 1
        self._at[place] = peer
        self.place_of[peer] = place
        return peer

    def machine(self, peer: PeerId) -> SimMachine:
        """Return what a stage host runs on."""
        return self.case.machines[self.place_of[peer]] if self.case.machines else ALIKE

    def comes(self, place: int, at_s: float) -> PeerId | None:
        """Another machine: its peer looks at the roster, and into the directory, and chooses. Returns the member that
        was there till now: it had notice, and would have stayed to the end of the step."""
        old = self._at.get(place)
        if old is not None and old in self._noticed:
            self._dies(old)
        else:
            old = None
        peer = self._named(place)
        self._arriving[peer] = Arriving(self._place(peer), at_s + self._download_s(peer))
        return old if old is not None and old in self.roster else None

    def _place(self, peer: PeerId) -> PartName:
        """Return the part that a host chooses which is on its way."""
        places = Places(
            parts=self.parts,
            lost=lost_parts(self.roster, self._gone),
            leaving=[one for one in self._noticed if one in self.roster],
            arriving={one: way.part for one, way in self._arriving.items()} if self.case.arrivals else {},
        )
        part, _ = choose_place(self.roster, peer, "stage", Wish(self.machine(peer).stage), places)
        assert part is not None  # noqa: S101 - a stage host always gets one
        return part

    def _download_s(self, peer: PeerId) -> float:
        own = self.machine(peer).download_s
        return self.case.download_s if own is None else own

    def goes(self, place: int, removal: MachineRemoval) -> PeerId | None:
        """A machine is taken. Returns the member that is not there any more, None where nobody's place was emptied."""
        peer = self._at.get(place)
        if peer is None or peer in self._gone:
            return None
        if self.case.notices and removal.noticed and peer in self.roster:
            self._noticed.add(peer)
            return None
        return self._dies(peer)

    def _dies(self, peer: PeerId) -> PeerId | None:
        self._noticed.discard(peer)
        if self._arriving.pop(peer, None) is not None or peer not in self.roster or peer in self._gone:
            return None
        self._gone.add(peer)
        if self._stalled.pop(peer, None) is None:
            self.there[PartName(str(self.roster[peer].part))] -= 1
        return peer

    @property
    def ready(self) -> int:
        """Peers that a perfect placement would compute with: members that live, and those that were members."""
        moving = sum(way.moving for way in self._arriving.values())
        return len(self.roster) - self.case.trainers - len(self._gone) + moving

    @property
    def hosts(self) -> Mapping[PartName, int]:
        """Return how many members each part has that live, those that stand still among them. O(members)."""
        held = Counter(one.part for one in self.roster.members if one.part is not None and one.peer not in self._gone)
        return {part: held[part] for part in self.parts}

    @property
    def fewest(self) -> int:
        """Members that are there at the stage that has fewest."""
        return min(self.there[part] for part in self.parts)

    def kinds(self) -> Mapping[PartName, Counter[int]]:
        """By stage how many of each class of machines are there. O(members)."""
        return {part: Counter(self.machine(peer).kind for peer in peers) for part, peers in self.computing().items()}

    def computing(self) -> dict[PartName, list[PeerId]]:
        """The members that are there, by stage. O(members)."""
        found: dict[PartName, list[PeerId]] = {part: [] for part in self.parts}
        for member in self.roster.members:
            if member.part is not None and member.peer not in self._gone and member.peer not in self._stalled:
                found[PartName(member.part)].append(PeerId(member.peer))
        return found

    @property
    def gone(self) -> Collection[PeerId]:
        """Members that died, and of which no record says so yet."""
        return self._gone

    def stalls_s(self, peer: PeerId, now_s: float) -> float:
        """For how long a member still stands still; 0 for others."""
        return max(0.0, self._stalled.get(peer, now_s) - now_s)

    @property
    def lost(self) -> tuple[PartName, ...]:
        """The stages all of whose members are gone."""
        return tuple(PartName(part) for part in lost_parts(self.roster, self._gone))

    @property
    def resumes_s(self) -> float:
        """Return when the next mover computes again; infinity where none stands still."""
        return min(self._stalled.values(), default=math.inf)

    def resume(self, at_s: float) -> None:
        """Movers compute again."""
        for peer in [peer for peer, until_s in self._stalled.items() if until_s <= at_s]:
            del self._stalled[peer]
            self.there[PartName(str(self.roster[peer].part))] += 1

    # --- records -----------------------------------------------------------------------------------------------------

    def close(self, step: int, at_s: float) -> Closing:
        """Close a step: its record's roster, and who moves. A step that has lost a stage is given up once a copy or a
        joiner can take it, and stays open before."""
        before = self.roster
        closing = self._close(step, at_s)
        self._recent = self._recent.after(step, before, self.roster)
        self.counts["moves"] += len(closing.moves)
        return closing

    def _close(self, step: int, at_s: float) -> Closing:
        now = OpenStepFacts(step, self.roster, HASH)
        joins = tuple(self._admission(step, peer) for peer, way in self._arriving.items() if way.ready_s <= at_s)
        leaves = tuple(Departure(step=step, peer=peer, signature=SIGNATURE) for peer in sorted(self._noticed))
        granted = self._rules.gather(self.roster, joins, leaves, self._gone)
        if lost := lost_parts(self.roster, self._gone):
            taken = self._rescues(step, at_s, [PartName(part) for part in lost])
            held = {join.member.part for join in granted.joins} | {move.part for move in taken}
            if not held.issuperset(lost):
                return Closing("open")
            self.counts["given up"] += 1
            changes = Changes(joins=granted.joins, reassigns=taken, absent=granted.absent)
            self._settle(self._rules.give_up(now, changes), changes, at_s)
            return Closing("given up")
        moves = self._moves(step, at_s, granted)
        if self.case.rule == "swarm":
            away = [Departure(step=step, peer=move.peer, signature=SIGNATURE) for move in moves]
            granted = self._rules.gather(self.roster, joins, (*leaves, *away), self._gone)
            reassigns: tuple[Reassign, ...] = ()
        else:
            reassigns = tuple(Reassign(step=step, peer=m.peer, part=m.target, signature=SIGNATURE) for m in moves)
        changes = Changes(joins=granted.joins, leaves=granted.leaves, reassigns=reassigns, absent=granted.absent)
        if self._rules.too_few(now, changes):
            return Closing("open")
        self._settle(self._rules.apply(now, changes), changes, at_s)
        if self.case.rule == "swarm":
            for move in moves:
                ready_s = at_s + self._download_s(move.peer)
                self._arriving[move.peer] = Arriving(move.target, ready_s, moving=True)
        return Closing("closed", moves)

    def _admission(self, step: int, peer: PeerId) -> Admission:
        part = self._arriving[peer].part
        member = Member(peer=peer, role="stage", name=peer, part=part, addresses=())
        return Admission(step=step, member=member, signature=SIGNATURE)

    def _moves(self, step: int, at_s: float, granted: Changes) -> tuple[Move, ...]:
        """Return who moves with a record that lets these in and out."""
        case = self.case
        before_s, self._closed_s = self._closed_s, at_s
        if case.rule == "none" or (case.every_s and at_s // case.every_s == before_s // case.every_s):
            return ()
        held = {PeerId(m.peer): PartName(m.part) for m in self.roster.members if m.part is not None}
        copies: dict[PeerId, list[PartName]] = {}
        for (peer, part), ready_s in self._copied.items():
            if ready_s <= at_s:
                copies.setdefault(peer, []).append(part)
        balance = Balance(
            step=step,
            stages=self.parts,
            held=held,
            joining={PeerId(join.member.peer): PartName(str(join.member.part)) for join in granted.joins},
            going={*map(PeerId, granted.absent), *(PeerId(leave.peer) for leave in granted.leaves)},
            queues=self._queues() if case.rule == "swarm" else {},
            recent=self._recent,
            speed={peer: self.machine(peer).speed for peer in held} if case.machines else {},
            load=case.load,
        )
        return plan(balance, copies, case.rule).moves

    def _queues(self) -> dict[PeerId, float]:
        """Return what waits at each peer: nearly nothing where a stage has more peers than the slowest, as it would
        with random arrivals, and a count that differs from look to look."""
        serves = {part: self.there[part] / self.case.load.get(part, 1.0) for part in self.parts}
        slowest, found = min(serves.values()), {}
        for member in self.roster.members:
            if member.part is not None and member.peer not in self._gone:
                load = slowest / (serves[PartName(member.part)] or 1.0)
                mean = QUEUED_MOST if load >= 1 else min(QUEUED_MOST, 0.5 * load * load / (1 - load))
                found[PeerId(member.peer)] = max(0.0, self._rng.gauss(mean, math.sqrt(mean)))
        return found

    def _rescues(self, step: int, at_s: float, lost: Sequence[PartName]) -> tuple[Reassign, ...]:
        """For each lost stage somebody that has a copy and whose own stage can spare it."""
        spared, found = Counter(self.there), list[Reassign]()
        for part in lost:
            holders = sorted(peer for (peer, of), ready_s in self._copied.items() if of == part and ready_s <= at_s)
            for peer in holders:
                own = PartName(str(self.roster[peer].part)) if peer in self.roster else part
                if peer not in self._gone and spared[own] > 1 and all(peer != move.peer for move in found):
                    spared[own] -= 1
                    found.append(Reassign(step=step, peer=peer, part=part, signature=SIGNATURE))
                    break
        return tuple(found)

    def _settle(self, roster: Roster, changes: Changes, at_s: float) -> None:
        """The record is decided: who joined or moved holds its stage, and copies follow the roster. Where stages part,
        each host has had the layers of all of them: nothing is downloaded."""
        parted, self.roster = host_parts(roster.parts) != self.parts, roster
        self.parts = host_parts(roster.parts)
        for join in changes.joins:
            self.there[PartName(str(join.member.part))] += 1
            self.counts["joins"] += not self._arriving.pop(PeerId(join.member.peer)).moving
        self._gone -= set(changes.absent)
        self._noticed -= {PeerId(leave.peer) for leave in changes.leaves}
        self._stalled |= {PeerId(move.peer): at_s + self.case.stall_s for move in changes.reassigns}
        self._stalled = {peer: until_s for peer, until_s in self._stalled.items() if peer in roster}
        stand_still = Counter(roster[peer].part for peer in self._stalled)
        members = Counter(member.part for member in roster.members if member.peer not in self._gone)
        self.there = Counter({part: members[part] - stand_still[part] for part in self.parts})
        for peer, way in self._arriving.items():
            way.part = way.part if way.part in self.parts else self._place(peer)
        if (self.case.rule == "ours" or self.case.copies_follow) and (changes != Changes() or parted):
            duties = copy_duties(roster, self.case.copies)
            ready_s = at_s + (0.0 if parted else self.case.copy_s)
            self._copied = {
                (peer, part): self._copied.get((peer, part), ready_s) for part in duties for peer in duties[part]
            }

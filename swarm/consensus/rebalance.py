"""Move stage hosts to the stages that compute least, when a step closes: the same decision at every peer. Pure.

A step is as fast as its slowest stage. :func:`plan` finds who should hold another stage from the next step on, by one
of three rules: ``none``; ``swarm``, SWARM's published one (Ryabinin et al. 2023, arXiv 2301.11913, appendix), in which
a peer leaves the stage with the shortest queues for the one with the longest, and downloads it; and ``ours``, in which
only those move that keep a copy of their new stage, so that nothing has to be downloaded first. The simulator
plays all three (``swarm/sim/flow.py``); members move by ``ours`` (``swarm/step/moves.py``).

Read :func:`plan` and :func:`level` first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarm.consensus.roster import Roster
from swarm.ids import PartName, PeerId

MAX_MOVES = 16
"""With one record: each mover stands still for seconds."""
MAX_PATH = 3
"""Moves in a chain: 1 reaches few stages, since each has copies at few peers; more than 3 gain nothing."""
RISE = 1.04
"""What every stage of a chain has afterwards is at least so many times what the lowest had: with less peers of unequal
speed move to and fro, with more the lowest stays low."""
NO_RETURN_RECORDS = 10
"""For so many records a mover does not go back."""

RuleName = Literal["none", "swarm", "ours"]


@dataclass(frozen=True, slots=True)
class Move:
    """A peer holds ``target`` instead of ``origin`` from the next step on."""

    peer: PeerId
    origin: PartName
    target: PartName


@dataclass(frozen=True, slots=True)
class RecentMoves:
    """Who moved lately, and which stages lost somebody: by peer the stages that it left, each with the step, and by
    stage the last step in which somebody was lost there, or left. A fold over records: see :meth:`after`."""

    left: Mapping[PeerId, tuple[tuple[PartName, int], ...]] = field(default_factory=dict)
    lost: Mapping[PartName, int] = field(default_factory=dict)

    def bars(self, peer: PeerId, part: PartName, step: int) -> bool:
        """Return whether a peer left this stage less than :data:`NO_RETURN_RECORDS` records before ``step``, and nobody
        was lost there since."""
        return any(
            part == old and step - at < NO_RETURN_RECORDS and self.lost.get(part, -1) <= at
            for old, at in self.left.get(peer, ())
        )

    def after(self, step: int, before: Roster, now: Roster) -> RecentMoves:
        """Return what is remembered when the record of ``step`` has made the roster ``before`` into ``now``."""
        lost, left = dict(self.lost), {}
        for member in before.members:
            peer, part = PeerId(member.peer), member.part
            old = tuple(entry for entry in self.left.get(peer, ()) if step - entry[1] < NO_RETURN_RECORDS)
            if part is not None and peer not in now:
                lost[PartName(part)] = step
                continue
            if part is not None and now[peer].part != part:
                old = (*old, (PartName(part), step))
            if old:
                left[peer] = old
        return RecentMoves(left, lost)


NOTHING_MOVED = RecentMoves()


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What every peer knows when a step closes: the record before, and the changes that are proposed.

    Attributes:
        step: The step that closes.
        stages: All stages of the run.
        held: The members that host a stage, each with its stage.
        joining: Those that are let in with this record.
        going: The members that are absent, or leave with it.
        speed: Microbatches a second of each peer; 1 of those that are not named.
        load: Which share of all microbatches passes a stage, or a variant of one; 1 of those that are not named.
        queues: Work that waits at each peer, for the rule ``swarm`` alone.
        machines: Who stands for the machine of each peer; itself of those that are not named.
        kept: How many replicas stay where one leaves, on as many machines, or on as many as there were.
        recent: Who moved before.
        last: Whether the run ends with the next step.
    """

    step: int
    stages: Sequence[PartName]
    held: Mapping[PeerId, PartName]
    joining: Mapping[PeerId, PartName] = field(default_factory=dict)
    going: Collection[PeerId] = ()
    speed: Mapping[PeerId, float] = field(default_factory=dict)
    load: Mapping[PartName, float] = field(default_factory=dict)
    queues: Mapping[PeerId, float] = field(default_factory=dict)
    machines: Mapping[PeerId, PeerId] = field(default_factory=dict)
    kept: int = 1
    recent: RecentMoves = NOTHING_MOVED
    last: bool = False

    def staying(self) -> Iterator[tuple[PeerId, PartName]]:
        """The members that neither leave nor are absent, in the order of peers."""
        return ((peer, part) for peer, part in sorted(self.held.items()) if peer not in self.going)

    def capacities(self) -> dict[PartName, float]:
        """Return what each stage computes from the next step on when nobody moves: what its peers add to it."""
        found = dict.fromkeys(self.stages, 0.0)
        for peer, part in (*self.staying(), *sorted(self.joining.items())):
            found[part] += self.adds(peer, part)
        return found

    def adds(self, peer: PeerId, part: PartName) -> float:
        """Return how many of all microbatches a second are served where this peer computes those that pass a stage."""
        return self.speed.get(peer, 1.0) / self.load.get(part, 1.0)


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Who moves with a record, and why."""

    moves: tuple[Move, ...] = ()
    reasons: tuple[str, ...] = ()


Copied = Mapping[PeerId, Collection[PartName]]
"""The stages of which each peer keeps a valid copy."""


def plan(balance: Balance, copies: Copied, rule: RuleName = "ours") -> MovePlan:
    """Decide who moves with the record of a step.

    Whatever the rule: in each stage that somebody leaves one replica stays that neither moves, leaves nor is absent;
    nobody moves with the last step; and the same arguments give the same plan everywhere.
    """
    if balance.last:
        return MovePlan(reasons=("nobody moves with the last step",))
    return RULES[rule](balance, copies)


def _stay(balance: Balance, copies: Copied) -> MovePlan:
    return MovePlan(reasons=("nobody moves in this run",))


def follow_queues(balance: Balance, copies: Copied) -> MovePlan:
    """SWARM's rule: one peer, the one with the shortest queue, goes from the stage with the least work waiting to the
    one with the most."""
    waiting = dict.fromkeys(balance.stages, 0.0)
    members: dict[PartName, list[PeerId]] = {part: [] for part in balance.stages}
    for peer, part in balance.staying():
        waiting[part] += balance.queues.get(peer, 0.0)
        members[part].append(peer)
    if not waiting:
        return MovePlan(reasons=("the run has no stages",))
    idle, busy = min(waiting, key=lambda part: (waiting[part], part)), max(waiting, key=lambda p: (waiting[p], p))
    if waiting[idle] >= waiting[busy]:
        return MovePlan(reasons=("as much work waits at every stage",))
    if len(members[idle]) < 2:
        return MovePlan(reasons=(f"{idle} has nobody to spare",))
    peer = min(members[idle], key=lambda one: (balance.queues.get(one, 0.0), one))
    why = f"{peer} from {idle} to {busy}: the least work waits there ({waiting[idle]:g}), here the most"
    return MovePlan((Move(peer, idle, busy),), (f"{why} ({waiting[busy]:g})",))


def level(balance: Balance, copies: Copied) -> MovePlan:
    """Our rule: raise the lowest stage by a chain of moves over copies, as long as there is one (leximin).

    Where nobody at a strong stage keeps a copy of the lowest, one of a third stage may, and another one takes its
    place. A stage of a chain has at least :data:`RISE` times the lowest's capacity afterwards. Each stage gives up one
    peer and gets one at most, there are :data:`MAX_MOVES` moves at most, and no mover goes back
    (:data:`NO_RETURN_RECORDS`). What peers say of their speed nobody can prove: whoever lies, a stage that somebody
    leaves keeps as many replicas as are to be ``kept``.
    Cost: O(moves · stages · copies).
    """
    search = _Search(balance, copies)
    moves: list[Move] = []
    reasons: list[str] = []
    while path := search.chain(MAX_MOVES - len(moves)):
        low, high = path[-1].target, path[0].origin
        way = ", ".join(f"{move.peer} from {move.origin} to {move.target}" for move in path)
        reasons.append(f"{low} computes {search.caps[low]:g}, {high} {search.caps[high]:g}: {way}")
        search.take(path)
        moves += path
    if not moves:
        reasons.append("no copies lead from a stage that can spare a peer to one that needs it")
    return MovePlan(tuple(moves), tuple(reasons))


class _Search:
    """The chains that are left while moves are chosen. ``caps`` are capacities with what was chosen so far."""

    def __init__(self, balance: Balance, copies: Copied) -> None:
        self.caps = balance.capacities()
        self._adds = balance.adds
        self._stay: dict[PartName, set[PeerId]] = {part: set() for part in balance.stages}
        self._machines, self._kept = balance.machines, balance.kept
        self._into: dict[PartName, dict[PartName, list[PeerId]]] = {part: {} for part in balance.stages}
        self._given: set[PartName] = set()
        self._got: set[PartName] = set()
        for peer, own in balance.staying():
            self._stay[own].add(peer)
            for part in sorted(copies.get(peer, ())):
                if part in self._into and part != own and not balance.recent.bars(peer, part, balance.step):
                    self._into[part].setdefault(own, []).append(peer)

    def chain(self, most: int) -> list[Move] | None:
        """A chain of ``most`` moves at most that raises the lowest stage that can be raised."""
        highest = max(self.caps.values(), default=0.0)
        for low in sorted(self.caps, key=lambda part: (self.caps[part], part)):
            if highest < RISE * self.caps[low]:
                return None  # nor for any that is higher
            if low not in self._got and (found := self._shortest(low, min(most, MAX_PATH))):
                return found
        return None

    def take(self, path: Sequence[Move]) -> None:
        """The moves of a chain are chosen."""
        for move in path:
            self.caps[move.origin] -= self._adds(move.peer, move.origin)
            self.caps[move.target] += self._adds(move.peer, move.target)
            self._stay[move.origin].discard(move.peer)
            self._given.add(move.origin)
            self._got.add(move.target)

    def _shortest(self, low: PartName, most: int) -> list[Move] | None:
        """The shortest chain to ``low``, of several the one from the strongest stage: backwards, breadth first."""
        seen, ends = {low}, [(low, list[Move]())]
        for _ in range(most):
            longer = []
            for part, path in ends:
                for origin in self._into[part]:
                    move = None if origin in seen else self._move(origin, part, path, low)
                    if move is not None:
                        longer.append((origin, [move, *path]))
            sources = [(origin, path) for origin, path in longer if self._spares(path[0], low)]
            if sources:
                return min(sources, key=lambda one: (-self.caps[one[0]], one[0], one[1][0].peer))[1]
            ends = []
            for origin, path in longer:
                if origin not in seen and origin not in self._got:
                    seen.add(origin)
                    ends.append((origin, path))
        return None

    def _move(self, origin: PartName, target: PartName, path: Sequence[Move], low: PartName) -> Move | None:
        """The move of a peer of ``origin`` before a ``path`` from ``target`` on, that leaves enough there; of several
        the one that evens the two ends out best."""
        if origin in self._given:
            return None
        gone = self._adds(path[0].peer, target) if path else 0.0
        gap = (self.caps[origin] - self.caps[low]) / 2
        enough = [
            peer
            for peer in self._into[target][origin]
            if self._can_spare(origin, peer) and self._rises(self.caps[target] - gone + self._adds(peer, target), low)
        ]
        peer = min(enough, key=lambda one: (abs(self._adds(one, origin) - gap), one), default=None)
        return None if peer is None else Move(peer, origin, target)

    def _can_spare(self, origin: PartName, peer: PeerId) -> bool:
        left = self._stay[origin] - {peer}
        before, after = (len({self._machines.get(one, one) for one in each}) for each in (self._stay[origin], left))
        return len(left) >= self._kept and after >= min(self._kept, before)

    def _spares(self, first: Move, low: PartName) -> bool:
        return self._rises(self.caps[first.origin] - self._adds(first.peer, first.origin), low)

    def _rises(self, capacity: float, low: PartName) -> bool:
        return capacity > self.caps[low] and capacity >= RISE * self.caps[low]


RULES: Mapping[RuleName, Callable[[Balance, Copied], MovePlan]] = {
    "none": _stay,
    "swarm": follow_queues,
    "ours": level,
}

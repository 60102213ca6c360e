"""Assign copies of each part to peers that do not train it, so that a part whose replicas all die is not lost. Pure.

Private ends are never copied to a stage host: with them it could read what trainers send it. What an organisation keeps
to itself (:attr:`~swarm.consensus.roster.Roster.owners`) is copied by nobody.

:class:`Updates` keeps what those that follow a part still need.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from swarm.consensus.roster import Member, Roster
from swarm.ids import ENDS, PartName, PeerId

if TYPE_CHECKING:
    import torch

MAX_COPIES = 4
"""Of one part. Each has a peer follow the part's replicas, which help eight peers at once (``observing``)."""


def copy_holders(roster: Roster, part: PartName, copies: int) -> tuple[PeerId, ...]:
    """Up to ``copies`` peers that hold another part or none: as many as there are, of private ends only such as host no
    stage. Whose own part can spare it comes first, since it could be moved to this one; a part that nobody in the
    roster holds has no copies. No peer keeps one that was started alongside one that holds the part or another copy;
    and none on the machine of one that holds it, by its mark, where there is another for it.

    The same everywhere. When one peer leaves or joins, few others change (rendezvous hashing). Cost: one hash for each
    peer and part, once a roster.
    """
    return copy_duties(roster, copies).get(part, ())


def copies_of(roster: Roster, peer: PeerId, copies: int) -> tuple[PartName, ...]:
    """The parts of which a peer keeps a copy: never its own, and none for a peer that is not in the roster. Nobody
    gets another one while somebody with fewer could keep it."""
    return tuple(part for part, holders in copy_duties(roster, copies).items() if peer in holders)


def fewer_copies(roster: Roster, copies: int) -> Mapping[PartName, int]:
    """Of how many peers each part has copies that has fewer than ``copies``, for want of peers that may keep one."""
    return {part: len(holders) for part, holders in copy_duties(roster, copies).items() if len(holders) < copies}


def on_one_machine(roster: Roster, copies: int) -> tuple[PartName, ...]:
    """The parts of which all replicas and copies are on one machine, by its mark, where the roster has others: its end
    loses them."""
    if len({member.machine for member in roster.members}) < 2:
        return ()
    holders = {part: {*roster.replicas(part), *copy_holders(roster, part, copies)} for part in roster.parts}
    marks = {part: {roster[peer].machine for peer in peers} for part, peers in holders.items()}
    return tuple(part for part, found in marks.items() if len(found) == 1 and "" not in found)


def to_spare(roster: Roster, gone: Collection[str], part: str) -> tuple[PeerId, ...]:
    """Return the stage hosts of which one may be asked to move to a lost part that it has no copy of: those whose own
    part keeps a replica, the most first. Pure."""
    left = Counter(member.part for member in roster.members if member.peer not in gone)
    there = [member for member in roster.members if member.role == "stage" and member.peer not in gone]
    able = [member for member in there if part != ENDS and left[member.part] > 1]
    return tuple(PeerId(member.peer) for member in sorted(able, key=lambda one: (-left[one.part], one.peer)))


COPY_BYTES_S = 16 << 20
"""A quarter of what one donor hands out at most (``swarm.state.transfer``)."""


def copy_rate(total_bytes: int, step_s: float | None) -> float:
    """Return the bytes a second at which a copy's state may come: few, so that the run does not suffer, but as many as
    it takes to be there when half of the steps have closed whose updates its donors keep. A copy that comes later is
    never there. ``step_s`` is how long a step takes, None when no step was closed yet."""
    return COPY_BYTES_S if not step_s else max(COPY_BYTES_S, 2 * total_bytes / (KEPT_UPDATES * step_s))


PEERS_KNOWN = 1 << 11
"""Of so many peers the order of parts is remembered: nearly all are in the next roster, too."""


_duties: WeakKeyDictionary[Roster, dict[int, Mapping[PartName, tuple[PeerId, ...]]]] = WeakKeyDictionary()
"""Those that were found, for as long as somebody has the roster."""


def copy_duties(roster: Roster, copies: int) -> Mapping[PartName, tuple[PeerId, ...]]:
    """Return the peers that keep a copy of each part: every peer gets one duty before any gets a second; within a round
    the pairs of peer and part are served in an order of their own, so that who is gone changes only what it had, and
    what follows from it. Found once for a roster. See :func:`copy_holders`."""
    known = _duties.setdefault(roster, {})
    if copies not in known:
        known[copies] = _found_duties(roster, copies)
    return known[copies]


def _found_duties(roster: Roster, copies: int) -> Mapping[PartName, tuple[PeerId, ...]]:
    machines, parts = roster.machines, tuple(part for part in roster.parts if part not in roster.owners)
    places = {(PartName(member.part), machines[PeerId(member.peer)]) for member in roster.members if member.part}
    at: dict[PartName, set[PeerId]] = {part: set() for part in roster.parts}
    for part, machine in places:
        at[part].add(machine)
    held = {part: len(there) for part, there in at.items()}
    wanted = {part: min(copies, len(_keepers(roster, part) - at[part])) for part in parts}
    marks = {(member.part, member.machine) for member in roster.members if member.part and member.machine}
    dealt = tuple((part, roster.dealt.get(part, 0)) for part in parts)
    rest = heapq.merge(*(_pairs(member, dealt, held, marks) for member in roster.members))
    pairs: list[_Pair] = []  # as far as they were needed: of many peers a few percent
    holders: dict[PartName, list[PeerId]] = {part: [] for part in parts}
    load: Counter[PeerId] = Counter()
    missing, most = sum(wanted.values()), 0
    while missing:
        most, seen = most + 1, 0
        while missing:
            if seen == len(pairs) and (more := next(rest, None)) is not None:
                pairs.append(more)
            if seen == len(pairs):
                break
            *_, peer, part = pairs[seen]
            seen, machine = seen + 1, machines[peer]
            if load[peer] >= most or len(holders[part]) >= wanted[part] or (part, machine) in places:
                continue
            if machine not in {machines[holder] for holder in holders[part]}:
                holders[part].append(peer)
                load[peer] += 1
                missing -= 1
    return {part: tuple(peers) for part, peers in holders.items()}


_Pair = tuple[bool, bool, bytes, PeerId, PartName]
_Dealt = tuple[tuple[PartName, int], ...]
"""All parts, each with the step with which its copies were given to others last, or 0."""


def _pairs(
    member: Member, dealt: _Dealt, held: Mapping[PartName, int], marks: Collection[tuple[str | None, str]]
) -> Iterator[_Pair]:
    """What a member may keep, in its order: each part, those last that its machine holds, by its mark in ``marks``, and
    after those of all others where its own part needs it."""
    needed, peer = _stays_needed(held, member.part), PeerId(member.peer)
    drawn = [(draw, part) for draw, part in _drawn(peer, dealt) if _may_keep(member, part)]
    for near in (False, True):
        for draw, part in drawn:
            if ((part, member.machine) in marks) == near:
                yield near, needed, draw, peer, part


@lru_cache(maxsize=PEERS_KNOWN)
def _drawn(peer: PeerId, dealt: _Dealt) -> tuple[tuple[bytes, PartName], ...]:
    """The parts in a peer's own order (rendezvous hashing)."""
    named = ((part, f"{peer}|{part}|{step}" if step else f"{peer}|{part}") for part, step in dealt)
    return tuple(sorted((hashlib.sha256(name.encode()).digest(), part) for part, name in named))


def _keepers(roster: Roster, part: PartName) -> set[PeerId]:
    """The machines of peers that may keep a copy of a part, if they do not hold it."""
    if part != ENDS:
        return set(roster.machines.values())
    return {roster.machines[PeerId(member.peer)] for member in roster.members if _may_keep(member, part)}


def _may_keep(member: Member, part: PartName) -> bool:
    """Return whether a peer may keep a copy of a part: of private ends none that hosts a stage, or is there to."""
    return member.part != part and not (part == ENDS and member.role == "stage")


def _stays_needed(held: Mapping[PartName, int], own: str | None) -> bool:
    """Return whether a part would be lost if this peer left its own."""
    return own is not None and held[PartName(own)] < 2


# --- updates that are kept for the followers of a part, and how far each of them has come ----------------------------


KEPT_UPDATES = 8
"""Steps that an observer may fall behind before it has to download a newer state. Each keeps 4 bytes a parameter of
the part in memory, and only while somebody needs it."""


class Updates:
    """By part: the newest step whose update came, and the mean gradients of the last few that are still needed."""

    def __init__(self) -> None:
        self._kept: dict[PartName, deque[tuple[int, torch.Tensor]]] = {}
        self._reached: dict[PartName, int] = {}

    def reached(self, part: PartName) -> int | None:
        """The newest step of a part, None for one that is not held here."""
        return self._reached.get(part)

    def add(self, part: PartName, step: int, mean: torch.Tensor | None) -> None:
        """The part is at this step; ``mean``, float32 on CPU, led there, or is not needed or not known."""
        self._reached[part] = step
        if mean is not None:
            self._kept.setdefault(part, deque(maxlen=KEPT_UPDATES)).append((step, mean))

    def at(self, part: PartName, step: int) -> torch.Tensor | None:
        """The update of a step; None when it is not kept."""
        return next((mean for kept, mean in self._kept.get(part, ()) if kept == step), None)

    def means(self) -> list[torch.Tensor]:
        """All updates that are kept."""
        return [mean for kept in self._kept.values() for _, mean in kept]

    def steps(self, part: PartName) -> list[int]:
        """Steps whose update is kept."""
        return [step for step, _ in self._kept.get(part, ())]

    def trim(self, part: PartName, had: int | None) -> None:
        """All who follow the part have had the updates to step ``had``; None: nobody follows it."""
        kept = self._kept.get(part)
        while kept and (had is None or kept[0][0] <= had):
            kept.popleft()

    def clear(self) -> None:
        """Keep none of any part; how far each has come stays known."""
        self._kept.clear()

    def forget(self, part: PartName) -> None:
        """It is not held here any more."""
        self._reached.pop(part, None)
        self._kept.pop(part, None)

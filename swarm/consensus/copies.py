"""Assign copies of each part to peers that do not train it, so that a part whose replicas all die is not lost. Pure.

Private ends are never copied to a stage host: with them it could read what trainers send it.

:class:`Updates` keeps what those that follow a part still need.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping

import torch

from swarm.consensus.roster import Member, Roster
from swarm.ids import ENDS, PartName, PeerId

MAX_COPIES = 4
"""Of one part. Each has a peer follow the part's replicas, which help eight peers at once (``observing``)."""


def copy_holders(roster: Roster, part: PartName, copies: int) -> tuple[PeerId, ...]:
    """Up to ``copies`` peers that hold another part or none: as many as there are, of private ends only such as host no
    stage. Whose own part can spare it comes first, since it could be moved to this one; a part that nobody in the
    roster holds has no copies. No machine keeps one of a part that is held there, or two of one.

    The same everywhere. When one peer leaves or joins, few others change (rendezvous hashing). Cost: one hash for each
    peer and part.
    """
    return _duties(roster, copies).get(part, ())


def copies_of(roster: Roster, peer: PeerId, copies: int) -> tuple[PartName, ...]:
    """The parts of which a peer keeps a copy: never its own, and none for a peer that is not in the roster. Nobody
    gets another one while somebody with fewer could keep it."""
    return tuple(part for part, holders in _duties(roster, copies).items() if peer in holders)


def fewer_copies(roster: Roster, copies: int) -> Mapping[PartName, int]:
    """Of how many peers each part has copies that has fewer than ``copies``, for want of peers that may keep one."""
    return {part: len(holders) for part, holders in _duties(roster, copies).items() if len(holders) < copies}


COPY_BYTES_S = 16 << 20
"""A quarter of what one donor hands out at most (``swarm.state.donation``)."""


def copy_rate(total_bytes: int, step_s: float | None) -> float:
    """Return the bytes a second at which a copy's state may come: few, so that the run does not suffer, but as many as
    it takes to be there when half of the steps have closed whose updates its donors keep. A copy that comes later is
    never there. ``step_s`` is how long a step takes, None when no step was closed yet."""
    return COPY_BYTES_S if not step_s else max(COPY_BYTES_S, 2 * total_bytes / (KEPT_UPDATES * step_s))


def _duties(roster: Roster, copies: int) -> Mapping[PartName, tuple[PeerId, ...]]:
    """Assign duties: every peer gets one before any gets a second; within a round the pairs of peer and part are served
    in an order of their own, so that who is gone changes only what it had, and what follows from it."""
    machines = roster.machines
    places = {(member.part, machines[PeerId(member.peer)]) for member in roster.members}
    held = Counter(part for part, _ in places)
    pairs = sorted(
        (_stays_needed(held, member.part), _draw(member.peer, part), PeerId(member.peer), part)
        for part in roster.parts
        for member in roster.members
        if _may_keep(member, part) and (part, machines[PeerId(member.peer)]) not in places
    )
    able = Counter(part for part, _ in {(part, machines[peer]) for *_, peer, part in pairs})
    wanted = {part: min(copies, able[part]) for part in roster.parts}
    holders: dict[PartName, list[PeerId]] = {part: [] for part in roster.parts}
    load: Counter[PeerId] = Counter()
    most = 0
    while any(len(holders[part]) < wanted[part] for part in holders):
        most += 1
        for _, _, peer, part in pairs:
            there = {machines[holder] for holder in holders[part]}
            if load[peer] < most and len(holders[part]) < wanted[part] and machines[peer] not in there:
                holders[part].append(peer)
                load[peer] += 1
    return {part: tuple(peers) for part, peers in holders.items()}


def _may_keep(member: Member, part: PartName) -> bool:
    """Whether a peer may keep a copy of a part: of private ends none that hosts a stage, or is there to."""
    return member.part != part and not (part == ENDS and member.role == "stage")


def _stays_needed(held: Mapping[str | None, int], own: str | None) -> bool:
    """Return whether a part would be lost if this peer left its own."""
    return own is not None and held[own] < 2


def _draw(peer: str, part: str) -> bytes:
    return hashlib.sha256(f"{peer}|{part}".encode()).digest()


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

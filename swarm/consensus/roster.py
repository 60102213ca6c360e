"""The roster agreed in the last close record: who takes part, with what; who can serve; who leads. Pure.

Read :class:`Roster` first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, SerializerFunctionWrapHandler, StringConstraints, model_serializer

from swarm.columns import MAX_VARIANTS, columns, held_columns, takes
from swarm.consensus.admissions import Admissions
from swarm.consensus.slowness import Barred, Slow, dismissed
from swarm.errors import Advice, Ending, RunEnded
from swarm.ids import ENDS, PartName, PeerId, distinct_names, variant_of
from swarm.schema import ID_TAIL, BesideField, MachineField, Message, NameField, PartField, PeerIdField, RegionField
from swarm.security.borders import OPEN, Borders

Role = Literal["bootstrap", "stage", "trainer"]


class Member(Message):
    """One peer of the roster. ``part`` is what it holds: its stage, the private ends, or nothing. ``incarnation`` is
    the life of it that takes part, another one for every process: see :mod:`swarm.consensus.ballot`. ``region`` is
    where it says that it is; ``outgoing``: it calls others, and where averaging has the choice nobody calls it.
    ``beside`` are the peers with which it was started on one machine, as it says: see :func:`machines_of`.
    ``machine`` is its machine's own mark in this run: those with one mark die together, as they say.
    ``worked`` is written for who holds no part: about when work of it was committed last, 0 for long ago or never;
    ``since`` for who joined, or got another part: the first step in which it takes part so; ``mute`` for whom its
    credential gives no vote (:mod:`swarm.consensus.admissions`). ``choice`` is that of a trainer's microbatches, where
    they find their variants by its domain."""

    peer: PeerIdField
    role: Role
    name: NameField
    part: PartField | None
    addresses: Annotated[tuple[Annotated[str, StringConstraints(max_length=300)], ...], Field(max_length=8)]
    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    region: RegionField = ""
    outgoing: bool = False
    beside: BesideField = ()
    machine: MachineField = ""
    worked: Annotated[int, Field(ge=0, lt=2**53)] = 0
    since: Annotated[int, Field(ge=0, lt=2**53)] = 0
    mute: bool = False
    choice: Annotated[int, Field(ge=0, lt=MAX_VARIANTS)] = 0

    @model_serializer(mode="wrap")
    def _as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave unset fields out, so that records made before a field existed keep their hash."""
        plain: dict[str, Any] = dump(self)
        later = ("region", "outgoing", "beside", "machine", "worked", "since", "mute", "choice")
        return {key: value for key, value in plain.items() if value or key not in later}

    @property
    def entitled(self) -> bool:
        """True if it may vote: it holds a part, or has worked lately. Who does neither costs nothing to start, and
        could be started often enough to be a majority."""
        return not self.mute and (self.part is not None or self.worked > 0)


class Roster:
    """All live peers, sorted by peer id, so that every peer computes the same from it. Never changes: what is found
    from it is found once. ``admissions`` says who may join them, where the record that names them does; ``slow`` what
    it says of members that hold steps up, ``barred`` of peers that were proven wrong
    (:mod:`swarm.consensus.faults`); ``unfed`` are the trainers of whom the step takes nothing while others are there,
    with the step from which they may feed again; ``dealt`` is since which step others keep copies of a part."""

    def __init__(
        self,
        members: Iterable[Member],
        admissions: Admissions | None = None,
        slow: Mapping[str, Slow] = MappingProxyType({}),
        barred: Mapping[str, Barred] = MappingProxyType({}),
        unfed: Mapping[PeerId, int] = MappingProxyType({}),
        dealt: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.admissions, self.slow, self.barred, self.unfed, self.dealt = admissions, slow, barred, unfed, dealt
        self.members = tuple(sorted(members, key=lambda member: member.peer))
        self._by_peer: Mapping[str, Member] = {member.peer: member for member in self.members}
        self._order: tuple[int, tuple[PeerId, ...]] = (-1, ())
        self._ways: dict[int | None, tuple[tuple[PeerId, ...], ...]] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, peer: str) -> bool:
        return peer in self._by_peer

    def __getitem__(self, peer: str) -> Member:
        return self._by_peer[peer]

    @cached_property
    def peers(self) -> tuple[PeerId, ...]:
        """All members, in the roster's order."""
        return tuple(PeerId(member.peer) for member in self.members)

    @cached_property
    def dismissed(self) -> Mapping[PeerId, str]:
        """Return the members without which the step may be closed, for they held up those before it, with the
        reason: see :mod:`swarm.consensus.slowness`."""
        return dismissed(self.slow, self.peers)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Return what people are shown of each member: see :func:`~swarm.ids.distinct_names`."""
        return distinct_names({member.peer: member.name for member in self.members})

    @cached_property
    def entitled(self) -> tuple[PeerId, ...]:
        """The members that may vote, in the roster's order: of a machine the first, since they die together.

        Where that one's process dies alone, its machine has no vote until the next record. Another one next to it must
        not stand in: that it is dead is no fact of the roster, peers would count by different voters, and a machine
        whose first peer is only cut off would vote twice.
        """
        found: dict[PeerId, PeerId] = {}
        for member in self.members:
            if member.entitled:
                found.setdefault(self.machines[PeerId(member.peer)], PeerId(member.peer))
        return tuple(found.values())

    @cached_property
    def machines(self) -> Mapping[PeerId, PeerId]:
        """By peer which one stands for its machine: itself, unless it was started alongside others."""
        return machines_of({PeerId(member.peer): member.beside for member in self.members})

    @cached_property
    def borders(self) -> Borders:
        """Return between which members microbatches may pass."""
        said = self.admissions
        return OPEN if said is None or not said.own_routes else Borders(said.organisations)

    @property
    def owners(self) -> Mapping[str, str]:
        """Return the organisation of each part that one keeps to itself: its peers alone hold it."""
        return {} if self.admissions is None else self.admissions.owners

    @property
    def paused(self) -> tuple[PartName, ...]:
        """Return those of them that nobody holds now. The run goes on without; their owner has their state."""
        return tuple(PartName(part) for part in self.owners if part not in self._by_part)

    @property
    def all_parts(self) -> tuple[PartName, ...]:
        """Return every part that somebody holds, and those that are paused."""
        return (*self.parts, *self.paused)

    def whole(self, peer: str, out: Container[str] = ()) -> bool:
        """Return whether the microbatches of this trainer have a way without those that are ``out``: always, where they
        may pass anybody, for then a part that nobody holds is lost to all."""
        if self.owners:
            return all(self.columns(out, choice=self[peer].choice))
        return not self.borders.drawn or self.borders.home(peer) in self._whole_homes(out)

    def _whole_homes(self, out: Container[str]) -> set[str]:
        """Return the organisations that have every stage. O(members)."""
        held: dict[str, set[PartName]] = {}
        for member in self.members:
            if member.role == "stage" and member.part is not None and member.peer not in out:
                held.setdefault(self.borders.home(member.peer), set()).add(PartName(member.part))
        return {home for home, parts in held.items() if home and len(held_columns(parts)) == len(self._way(None))}

    def feeding(self, out: Container[str] = ()) -> tuple[PeerId, ...]:
        """Return the trainers whose microbatches count without those that are ``out``: who is there, and has a way."""
        there = tuple(peer for peer in self.trainers if peer not in out)
        if self.owners:
            return tuple(peer for peer in there if self.whole(peer, out))
        if not self.borders.drawn:
            return there
        homes = self._whole_homes(out)
        return tuple(peer for peer in there if self.borders.home(peer) in homes)

    def fed(self, trainers: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Return those of these trainers that have a quota: without those of whom nothing is taken, unless no others
        are there."""
        return tuple(peer for peer in trainers if peer not in self.unfed) or tuple(trainers)

    @property
    def lives(self) -> Mapping[PeerId, int]:
        """The incarnation of each member that takes part."""
        return {PeerId(member.peer): member.incarnation for member in self.members}

    @property
    def since(self) -> Mapping[PeerId, int]:
        """Of the members that joined, the first step in which each takes part."""
        return {PeerId(member.peer): member.since for member in self.members if member.since}

    def computes(self, peer: str, version: int) -> bool:
        """Return whether a member has the parameters after that step: who joined has those of the record before."""
        return peer in self and self[peer].since <= version + 1

    @cached_property
    def trainers(self) -> tuple[PeerId, ...]:
        """All trainers, in the roster's order."""
        return tuple(PeerId(member.peer) for member in self.members if member.role == "trainer")

    @property
    def parts(self) -> tuple[PartName, ...]:
        """Every part that somebody holds, sorted: ``ends`` first."""
        return tuple(self._by_part)

    @cached_property
    def _by_part(self) -> Mapping[PartName, tuple[PeerId, ...]]:
        held: dict[PartName, list[PeerId]] = {}
        for member in self.members:
            if member.part is not None:
                held.setdefault(PartName(member.part), []).append(PeerId(member.peer))
        return {part: tuple(held[part]) for part in sorted(held)}

    def parts_beside(self, peer: PeerId, beside: Collection[str]) -> tuple[PartName, ...]:
        """Return the parts that are held on the machine of a peer, itself left out, that says who is ``beside`` it and
        may not be here yet."""
        others = [m for m in self.members if m.peer != peer and tail(m.peer) in beside and tail(peer) in m.beside]
        return tuple(PartName(member.part) for member in others if member.part is not None)

    def replicas(self, part: PartName) -> tuple[PeerId, ...]:
        """Return the holders of a part, in rank order."""
        return self._by_part.get(part, ())

    def spread(self, part: PartName) -> int:
        """Return on how many machines a part is held: so many deaths lose it."""
        return len({self.machines[peer] for peer in self.replicas(part)})

    @cached_property
    def hosts(self) -> tuple[PeerId, ...]:
        """The replicas of all stages, part by part."""
        return tuple(peer for part in self.parts if part != ENDS for peer in self.replicas(part))

    def _way(self, choice: int | None) -> tuple[tuple[PeerId, ...], ...]:
        """Return who may stand in each column; with a choice, of stages with variants. Each found once."""
        if choice not in self._ways:
            parts = columns((*self.parts, *self.paused))  # a column of which nobody holds a part is one all the same
            taken = [[part for part in each if choice is None or takes(part, choice)] for each in parts]
            self._ways[choice] = tuple(tuple(peer for part in each for peer in self.replicas(part)) for each in taken)
        return self._ways[choice]

    def holds(self, peer: str, choice: int) -> bool:
        """Return whether microbatches with this choice pass what a member holds."""
        part = self.part_of(peer)
        return part is not None and takes(part, choice)

    @cached_property
    def variants(self) -> Mapping[PeerId, tuple[int, int]]:
        """Return which variant of its stage, of how many, each host holds of those that have several."""
        held = ((PeerId(member.peer), variant_of(PartName(member.part))) for member in self.members if member.part)
        return {peer: each for peer, each in held if each != (0, 1)}

    def columns(
        self, out: Container[str] = (), near: str | None = None, choice: int | None = None
    ) -> tuple[tuple[PeerId, ...], ...]:
        """Return who may stand in each column of a route, without those that are ``out``; of a trainer's, who is
        ``near`` it; of one with this ``choice`` of variants. Of all it costs nothing: each microbatch is compared with
        it."""
        there = self._way(choice if self.variants else None)
        if near is None and out == ():
            return there
        borders = self.borders if near is not None else OPEN
        return tuple(
            tuple(peer for peer in replicas if peer not in out and borders.near(near or "", peer)) for replicas in there
        )

    def part_of(self, peer: str) -> PartName | None:
        """Return what a member holds; None where it holds nothing, or is none."""
        part = self[peer].part if peer in self else None
        return None if part is None else PartName(part)

    def succession(self, step: int) -> tuple[PeerId, ...]:
        """The order in which peers lead a step: its leader first, then who takes over.

        A hash of (step, peer) spreads the duty evenly and needs no election. The last one asked for is remembered: a
        member looks with each question whether the leader asks.
        """
        if self._order[0] != step:
            leading = [peer for peer in self.peers if not self[peer].mute] or self.peers  # or nobody could
            drawn = sorted(leading, key=lambda peer: hashlib.sha256(f"{step}|{peer}".encode()).digest())
            self._order = step, tuple(drawn)
        return self._order[1]


TRAINERS = "trainers"
"""What is lost where the ends are hosted, when nobody is left to feed."""
ROUTES = "routes"
"""What is lost where microbatches stay in one organisation, when none has a trainer and every stage any more; or where
one keeps parts to itself, when no trainer is left whose microbatches have a way."""
NO_PARTS = (TRAINERS, ROUTES)
"""What may be lost and is no part: nobody keeps a copy of it, or can be asked to take it over."""


def lost_replicas(roster: Roster, part: str, gone: Mapping[PeerId, str]) -> str:
    """The replicas of a part (see :func:`lost_parts`) that are gone, by name with the reason."""
    replicas = (peer for peer in _holders(roster, part) if peer in gone)
    return ", ".join(f"{roster[peer].name or peer} ({gone[peer]})" for peer in replicas)


def _holders(roster: Roster, part: str) -> tuple[PeerId, ...]:
    if part == ROUTES:
        return roster.trainers if roster.owners else tuple(p for p in roster.peers if roster.borders.home(p))
    return roster.trainers if part == TRAINERS else roster.replicas(PartName(part))


def lost_parts(roster: Roster, lost: Collection[str]) -> tuple[str, ...]:
    """The parts of which every replica is ``lost``; with hosted ends TRAINERS, too, when all of those are."""
    parts = [str(part) for part in roster.parts if all(peer in lost for peer in roster.replicas(part))]
    nobody_feeds = ENDS not in roster.parts and all(peer in lost for peer in roster.trainers)
    bound = bool(roster.borders.drawn or roster.owners)
    no_routes = bound and not parts and not nobody_feeds and not roster.feeding(lost)
    return (*parts, *((TRAINERS,) if nobody_feeds else ()), *((ROUTES,) if no_routes else ()))


def lacking(roster: Roster, lost: Collection[str]) -> tuple[tuple[str, PartName], ...]:
    """Return (organisation, stage) of each stage of which an organisation with trainers has no host that is there,
    where microbatches stay in it."""
    homes = {roster.borders.home(trainer): trainer for trainer in roster.trainers}
    return tuple(
        (home, parts[0])
        for home, trainer in sorted(homes.items())
        for parts, replicas in zip(columns(roster.parts), roster.columns(near=trainer), strict=True)
        if home and all(peer in lost for peer in replicas)
    )


def needed(roster: Roster, parts: Collection[str], lost: Collection[str] | None = None) -> set[PeerId]:
    """Any one of these would be enough for one of ``parts`` (see :func:`lost_parts`) not to be lost; or, of routes that
    are, might be: of those that are ``lost``, where they are given."""
    found = {peer for part in parts for peer in _holders(roster, part)}
    return found if lost is None or ROUTES not in parts else found.intersection(lost)


class HowToJoin(Protocol):
    """Says how somebody joins, in words that end up in brackets."""

    def __call__(self, part: PartName | None, *, open_port: bool = False) -> str:
        """Return how one more replica of a part joins: a stage host, for the ends (or None) a trainer; with
        ``open_port`` one that others can call."""


def join_words(part: PartName | None, *, open_port: bool = False) -> str:
    """Return how somebody joins, in words that name no command: see :class:`HowToJoin`."""
    stages = () if part is None else held_columns((part,))
    role = "as a trainer" if not stages else f"as a host of stage {stages[0]}" if len(stages) == 1 else "as a host"
    return f"{role}, at a port opened in its firewall" if open_port else role


def part_lost(roster: Roster, part: str, gone: Mapping[PeerId, str], why: str = "") -> RunEnded | None:
    """Return why the run is over for everybody when all replicas of a part (see :func:`lost_parts`) are ``gone``, by
    peer with the reason, and ``why`` nobody takes it over; None while one is there."""
    if part not in lost_parts(roster, gone):
        return None
    last = "trainer" if part == TRAINERS else f"replica of {part}"
    if part == ROUTES:
        last = "trainer with a way" if roster.owners else "organisation with a trainer and every stage"
    return RunEnded(
        f"the last {last} is lost: {lost_replicas(roster, part, gone)}{f' ({why})' if why else ''}",
        Ending.UNREACHABLE,
        check=Advice.WHAT_IS_KEPT,
        remedy=Advice.RESUME,
    )


# --- serving ---------------------------------------------------------------------------------------------------------
# Where one replica of a part reduces for the others and calls none of them: what becomes of a part in which nobody can
# be called.


def unserved(roster: Roster, out: Container[str]) -> dict[PeerId, str]:
    """Return the members, besides those that are ``out``, that cannot take part in averaging, and why: of every part in
    which all that are there only call others, all but the first by rank, which goes on alone."""
    found: dict[PeerId, str] = {}
    for part in roster.parts:
        there = [peer for peer in roster.replicas(part) if peer not in out]
        if all(roster[peer].outgoing for peer in there):
            why = f"no replica of {part} that others can call is left, and {there[0]} goes on alone" if there else ""
            found |= dict.fromkeys(there[1:], why)
    return found


def can_be_called(roster: Roster, part: PartName) -> bool:
    """Return whether others can call a replica of this part, or nobody holds it yet."""
    replicas = roster.replicas(part)
    return not replicas or not all(roster[peer].outgoing for peer in replicas)


def lacks_server(roster: Roster, member: Member, how: HowToJoin = join_words) -> str:
    """Return why ``member`` cannot join its part yet, with what must happen first; "" when it can: it, or a replica
    that is there, can be called."""
    if member.part is None or not member.outgoing or can_be_called(roster, PartName(member.part)):
        return ""
    return f"no replica of {member.part} can be called by others, nor can this one: {_first(member.part, how)}"


def serves_alone(staying: Roster, member: Member) -> bool:
    """Return whether those of its part that are ``staying`` could not average any more without ``member``, who
    leaves."""
    if member.part is None or member.outgoing:
        return False
    others = staying.replicas(PartName(member.part))
    return len(others) > 1 and all(staying[peer].outgoing for peer in others)


def without_server(roster: Roster, how: HowToJoin = join_words) -> str:
    """Return why a run cannot begin with this roster, with what must happen first; "" when it can."""
    lost = unserved(roster, ())
    parts = sorted({part for peer in lost if (part := roster[peer].part) is not None})
    if not parts:
        return ""
    return f"no replica of {parts[0]} can be called by others: {_first(parts[0], how)}"


def _first(part: str, how: HowToJoin) -> str:
    return f"one that can must join ({how(PartName(part), open_port=True)})"


# --- succession: who leads a step, term after term -------------------------------------------------------------------
# Peers take turns in an order that all compute from the roster, the first again after the last. Nobody is elected: who
# finds all before it gone takes its turn; what keeps two leaders from deciding two things is the majority that accepts
# a record (:mod:`swarm.consensus.acceptor`).


def owner(roster: Roster, step: int, term: int) -> PeerId:
    """Return the leader of this term. Raises ZeroDivisionError for an empty roster."""
    order = roster.succession(step)
    return order[term % len(order)]


def own_term(roster: Roster, step: int, me: PeerId, after: int) -> int:
    """Our first term above ``after``."""
    order = roster.succession(step)
    mine = order.index(me)
    return after + 1 + (mine - after - 1) % len(order)


def due_term(roster: Roster, step: int, me: PeerId, known: int, gone: Container[PeerId]) -> int | None:
    """The term in which we lead now, None while it is another's turn.

    ``known`` is the highest term heard of: it stands while its owner is there, else the next one's whose owner is.
    """
    order = roster.succession(step)
    if me not in order:
        return None
    for term in range(known, known + len(order)):
        peer = order[term % len(order)]
        if peer == me:
            return term
        if peer not in gone:
            return None
    return None


def tail(peer: str) -> str:
    """Return the end of an id, by which peers name those next to them."""
    return peer[-ID_TAIL:]


def machines_of(said: Mapping[PeerId, Collection[str]]) -> Mapping[PeerId, PeerId]:
    """Return by peer the first, by id, of those on its machine, itself included.

    A machine is one vote and one death, however many devices it has. Nobody can prove where it runs, so this holds
    nobody to the truth: it lets who started several peers say so. And it counts only where both say it of each other,
    so that a stranger who names a peer takes neither its vote nor its copies.

    Args:
        said: By peer the tails of those that it says are next to it.
    """
    by_tail = {tail(peer): peer for peer in said}

    def together(peer: PeerId) -> list[PeerId]:
        named = (by_tail[other] for other in said[peer] if other in by_tail)
        return [other for other in named if tail(peer) in said[other]]

    return {peer: min((peer, *together(peer))) for peer in said}

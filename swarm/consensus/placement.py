"""Where peers compute: the stages of the first roster, and the place of one that joins a run in progress. Pure.

Read :func:`choose_place` first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, NamedTuple

from pydantic import Field, StringConstraints

from swarm.columns import MAX_VARIANTS, columns, host_parts, takes
from swarm.consensus.roster import Member, Role, Roster, machines_of
from swarm.errors import Refused
from swarm.ids import ENDS, PartName, PeerId, variant_of
from swarm.schema import BesideField, MachineField, Message, NameField, PeerIdField, RegionField
from swarm.security.credentials import Credential


class Wish(NamedTuple):
    """What a stage host asks to hold: a ``stage``, what microbatches of a ``choice`` pass, or both; neither: whatever
    is needed most. Of a trainer the ``choice`` is that of its microbatches, where its domain says it."""

    stage: int | None = None
    choice: int | None = None

    def __bool__(self) -> bool:
        return self != (None, None)

    def among(self, parts: Sequence[PartName]) -> tuple[PartName, ...]:
        """Return those of a model's parts that it is for, in the order of columns: by a choice alone variants only, not
        stages that all choices pass."""
        there, (stage, choice) = host_parts(parts, None if self.stage is None else (self.stage,)), self
        if choice is None:
            return there
        return tuple(one for one in there if takes(one, choice) and (stage is not None or variant_of(one)[1] > 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of a run, as one peer that joins sees them.

    Attributes:
        parts: All parts of the model.
        lost: The parts that nobody holds any more.
        leaving: The members that have been asked to leave.
        arriving: The peers on their way into the run, each with the stage that it has chosen, None if it has chosen
            none yet. They say so themselves: see :func:`arrivals`.
        cannot: For some of them the parts that their memory does not hold, as they say, too.
        barred: The parts to which the asking peer would not be let in.
        beside: The parts that are held on its machine.
        unfit: Those that its memory does not hold.
        chosen: The part that it chose before, when it chooses again.
        load: Of variants that the asking peer wishes for, which share of microbatches passes each.
        home: Where microbatches stay in one organisation, that of the asking peer: replicas of others are none to it.
    """

    parts: Sequence[PartName]
    lost: Collection[str] = ()
    leaving: Collection[PeerId] = ()
    arriving: Mapping[PeerId, PartName | None] = field(default_factory=dict)
    cannot: Mapping[PeerId, Collection[PartName]] = field(default_factory=dict)
    barred: Collection[str] = ()
    beside: Collection[str] = ()
    unfit: Collection[str] = ()
    chosen: PartName | None = None
    load: Mapping[PartName, float] = field(default_factory=dict)
    home: str | None = None

    def counts(self, roster: Roster, peer: str) -> bool:
        """Return whether a member is a replica to the asking peer."""
        return self.home is None or roster.borders.home(peer) == self.home


MAX_FORESEEN = 64
"""Of so many peers that have not chosen yet it is foreseen what they choose."""


def choose_place(roster: Roster, peer: PeerId, role: Role, wish: Wish, places: Places) -> tuple[PartName | None, str]:
    """Choose the part of a peer that joins a run in progress.

    Its wish, of several variants the one with the fewest replicas for its load; else a stage that is lost; else
    the one with the fewest replicas, whose loss would hurt most: without those that leave, with those on their way. Of
    several each peer takes another. Of those that choose at the same time each foresees what those before it, in the
    order of peer ids, will choose. Who chooses again leaves those out that chose the same and come after it: so two
    that collided do not move together. A stage that does not fit is its place only where none does, or by its wish: it
    cannot take it. Cost: O(members + arrivals · stages).

    Returns:
        The part, None for a role that holds none, and why.

    Raises:
        Refused: The run does not have the stage that was wished for.
    """
    if role != "stage":
        private = role == "trainer" and ENDS in places.parts
        return (ENDS, "every trainer holds the ends") if private else (None, f"a {role}")
    if wish:
        if not (wished := wish.among(places.parts)):
            raise Refused(f"there is no stage {wish.stage}: the run's are 0 to {len(columns(places.parts)) - 1}")
        if len(wished) == 1:
            return wished[0], "asked for"
        places = replace(places, parts=wished)
    held = Counter(member.part for member in roster.members if places.counts(roster, member.peer))
    leaves = Counter(roster[one].part for one in places.leaving if one in roster and places.counts(roster, one))
    counts = {part: 0 if part in places.lost else held[part] - leaves[part] for part in host_parts(places.parts)}
    coming, draws = arrivals(roster, peer, counts, places), _draws(peer, counts)

    def last(part: PartName) -> tuple[float, bool, bool, bytes]:
        return (
            (counts[part] + coming[part]) / places.load.get(part, 1),
            part != places.chosen,
            part in places.beside,
            draws[part],
        )

    part = min(_open_to(counts, places), key=last)
    if part in places.lost:
        return part, f"all that held it are lost{_on_their_way(coming[part])}"
    leaving = f", and {leaves[part]} about to leave" if leaves[part] else ""
    of = " for its load" if part in places.load else ""
    of += f" of {places.home}" if places.home else ""
    return part, f"it has the fewest replicas{of} ({counts[part]}{leaving}{_on_their_way(coming[part])})"


def arrivals(roster: Roster, peer: PeerId, counts: Mapping[PartName, int], places: Places) -> Counter[PartName]:
    """Count by part the peers on their way that ``peer`` believes in, beside ``counts`` replicas of each that stay.

    Anybody can say that it is on its way, as often as it makes identities, and never arrive. So no stage is believed to
    get more than half as many as it has, or two where that is more: whatever is claimed, the stage that a peer chooses
    has no more replicas beyond those of the one that has fewest.
    """
    most = {part: max(2, count // 2) for part, count in counts.items()}
    coming: Counter[PartName] = Counter()
    undecided = []
    for other, part in sorted(places.arriving.items()):
        if other == peer or other in roster or (part is not None and part == places.chosen and other > peer):
            continue
        if part is None and other < peer:
            undecided.append(other)
        elif part in most and coming[part] < most[part]:
            coming[part] += 1
    free = [part for part in _open_to(counts, places) if coming[part] < most[part]]
    for other in undecided[:MAX_FORESEEN]:
        if not free:
            break
        fitting, draws = [part for part in free if part not in places.cannot.get(other, ())], _draws(other, counts)
        if not fitting:
            continue
        part = min(fitting, key=lambda one: (counts[one] + coming[one], draws[one]))
        coming[part] += 1
        if coming[part] >= most[part]:
            free.remove(part)
    return coming


def _open_to(counts: Mapping[PartName, int], places: Places) -> list[PartName]:
    """The parts among which a peer may choose: those that are lost come before all others."""
    fitting = [part for part in counts if part not in places.unfit] or list(counts)
    lost = [part for part in fitting if part in places.lost]
    return lost or [part for part in fitting if part not in places.barred] or fitting


def _on_their_way(count: int) -> str:
    return f", and {count} on the way" if count else ""


def _draws(peer: str, parts: Iterable[PartName]) -> dict[PartName, bytes]:
    return {part: hashlib.sha256(f"{peer}|{number}".encode()).digest() for number, part in enumerate(parts)}


# --- the first roster -----------------------------------------------------------------------------------------------


Own = Mapping[PartName, Collection[str]]
"""The peers that may hold a part, of each that an organisation keeps to itself."""


class Candidate(Message):
    """A peer that asks to be in the first roster; ``stage`` and ``choice`` are its wish, of a trainer that of its
    microbatches; ``unfit`` are the stages that its memory does not hold; ``credential`` what admits it, where one must
    be admitted."""

    peer: PeerIdField
    role: Role
    name: NameField
    stage: Annotated[int, Field(ge=0, lt=1024)] | None
    addresses: Annotated[tuple[Annotated[str, StringConstraints(max_length=300)], ...], Field(max_length=8)]
    region: RegionField = ""
    outgoing: bool = False
    beside: BesideField = ()
    machine: MachineField = ""
    unfit: tuple[Annotated[int, Field(ge=0, lt=512)], ...] = ()
    choice: Annotated[int, Field(ge=0, lt=MAX_VARIANTS)] | None = None
    credential: Credential | None = None

    def fitting(self, parts: Sequence[PartName], own: Own = MappingProxyType({})) -> list[PartName]:
        """Return those that it can hold of the parts of stages, and may; all that it may where it says of each that it
        cannot."""
        allowed = [part for part in parts if self.peer in own.get(part, (self.peer,))]
        cannot = host_parts(parts, self.unfit)
        return [part for part in allowed if part not in cannot] or allowed


def assign_stages(
    candidates: Iterable[Candidate],
    parts: Iterable[PartName],
    homes: Mapping[str, str] | None = None,
    own: Own = MappingProxyType({}),
) -> tuple[Roster, dict[PeerId, str]]:
    """Give every stage host one of the model's ``parts`` that its memory holds: wishes first, then the stage with the
    fewest replicas, of several one that nobody on its machine has, lower stages first. Who can hold few stages comes
    first, so that who can hold more is left for the others. Trainers hold the ends, where these are a part.

    Returns the roster and a reason per peer. A wish is not heard when the stage does not exist or does not fit, or when
    granting it would leave too few hosts to hold every stage. Raises Refused when there are fewer hosts than stages,
    or none is left with the memory for one; exact where of any two hosts one can hold whatever the other can.
    With ``homes``, the organisation of each peer, where microbatches stay in it, each organisation's hosts are placed
    by themselves, and one that has a trainer must hold every stage. ``own`` says who may hold a part that an
    organisation keeps to itself.
    """
    parts = tuple(parts)
    stages, ends = host_parts(parts), ENDS if ENDS in parts else None
    ordered = sorted(candidates, key=lambda candidate: candidate.peer)
    hosts = [candidate for candidate in ordered if candidate.role == "stage"]
    if len(hosts) < len(stages):
        raise Refused(f"{len(hosts)} stage hosts cannot hold {len(stages)} stages")
    machines = machines_of({PeerId(candidate.peer): candidate.beside for candidate in ordered})
    if homes is None:
        places, reasons = _best(hosts, stages, machines, own)
    else:
        places, reasons = _by_home(hosts, stages, machines, homes)
        feeding = {homes.get(candidate.peer) for candidate in ordered if candidate.role == "trainer"} - {None, ""}
        held = {home: {places[host.peer] for host in hosts if homes.get(host.peer) == home} for home in feeding}
        if all(len(stages_held) < len(stages) for stages_held in held.values()):
            raise Refused(f"no organisation has a trainer and a host of each of {len(stages)} stages")
    if lacking := [part for part in stages if part not in places.values()]:
        if lacking[0] in own:
            raise Refused(f"no host that may hold {lacking[0]} is left: an organisation keeps it to itself")
        raise Refused(f"no stage host is left with the memory for {lacking[0]}")
    return Roster(_member(candidate, places, ends) for candidate in ordered), reasons


def _best(
    hosts: Sequence[Candidate],
    stages: Sequence[PartName],
    machines: Mapping[PeerId, PeerId],
    own: Own = MappingProxyType({}),
) -> tuple[dict[str, PartName], dict[PeerId, str]]:
    """As :func:`_placed`, with wishes unless they cost a stage."""
    fits = {host.peer: host.fitting(stages, own) for host in hosts}
    places, reasons = _placed(hosts, stages, machines, fits, wishes=True)
    if len(set(places.values())) < len(stages):  # a wish took away who alone can hold another stage
        places, reasons = _placed(hosts, stages, machines, fits, wishes=False)
    return places, reasons


def _by_home(
    hosts: Sequence[Candidate],
    stages: Sequence[PartName],
    machines: Mapping[PeerId, PeerId],
    homes: Mapping[str, str],
) -> tuple[dict[str, PartName], dict[PeerId, str]]:
    places, reasons = dict[str, PartName](), dict[PeerId, str]()
    for home in sorted({homes.get(host.peer, "") for host in hosts}):
        own = [host for host in hosts if homes.get(host.peer, "") == home]
        placed, why = _best(own, stages, machines)
        places |= placed
        reasons |= {peer: f"{reason}, in {home or 'no organisation'}" for peer, reason in why.items()}
    return places, reasons


def _placed(
    hosts: Sequence[Candidate],
    stages: Sequence[PartName],
    machines: Mapping[PeerId, PeerId],
    fits: Mapping[str, Sequence[PartName]],
    *,
    wishes: bool,
) -> tuple[dict[str, PartName], dict[PeerId, str]]:
    """The part of each host, of those that it ``fits``, and why."""
    replicas = dict.fromkeys(stages, 0)
    places, reasons = dict[str, PartName](), dict[PeerId, str]()
    beside: Counter[tuple[PeerId, PartName]] = Counter()  # (machine, part): how many of the part it has

    def place(host: Candidate, part: PartName, reason: str) -> None:
        places[host.peer], reasons[PeerId(host.peer)] = part, reason
        replicas[part] += 1
        beside[machines[PeerId(host.peer)], part] += 1

    for host in hosts if wishes else ():
        unplaced = len(hosts) - len(places) - 1
        asked = Wish(host.stage, host.choice)
        wished = asked.among(fits[host.peer]) if asked else ()
        for wish in sorted(wished, key=lambda part: replicas[part])[:1]:
            if unplaced >= sum(not count for part, count in replicas.items() if part != wish):
                place(host, wish, "asked for")
    for host in sorted(hosts, key=lambda host: len(fits[host.peer])):
        if host.peer not in places:
            machine = machines[PeerId(host.peer)]
            part = min(fits[host.peer], key=lambda one: (replicas[one], beside[machine, one]))
            of_those = " of those that fit" if len(fits[host.peer]) < len(stages) else ""
            place(host, part, f"fewest replicas{of_those} ({replicas[part]})")
    return places, reasons


def without_memory(
    candidates: Iterable[Candidate],
    parts: Iterable[PartName],
    homes: Mapping[str, str] | None = None,
    own: Own = MappingProxyType({}),
) -> str:
    """Return why these, as many as it takes, cannot hold all stages; "" when they can. ``homes``, ``own``: see
    :func:`assign_stages`."""
    try:
        assign_stages(candidates, parts, homes, own)
    except Refused as refused:
        return refused.reason
    return ""


def holding(roster: Roster, parts: Sequence[PartName]) -> Roster:
    """Return the roster with hosts that hold these parts, and so can go on from a state that is cut into them: as it is
    where they do, else as if they had just come. Raises as :func:`assign_stages`."""
    if set(host_parts(parts)) in (set(), set(host_parts(roster.parts))):
        return roster
    homes: Mapping[str, str] | None = None
    if roster.borders.drawn:
        homes = {peer: roster.borders.home(peer) for peer in roster.peers}
    placed, _ = assign_stages((_candidate(member) for member in roster.members), parts, homes)
    return Roster(m.model_copy(update={"part": placed[m.peer].part}) for m in roster.members)


def _candidate(member: Member) -> Candidate:
    choice = member.choice if member.role == "trainer" else None
    return Candidate(stage=None, choice=choice, **{name: getattr(member, name) for name in COMMON})


COMMON = ("peer", "role", "name", "addresses", "region", "outgoing", "beside", "machine")
"""What a candidate says of itself that the roster says, too."""


def _member(candidate: Candidate, places: Mapping[str, PartName], ends: PartName | None) -> Member:
    part = ends if candidate.role == "trainer" else places.get(candidate.peer)
    choice = candidate.choice or 0 if candidate.role == "trainer" else 0
    return Member(part=part, choice=choice, **{name: getattr(candidate, name) for name in COMMON})

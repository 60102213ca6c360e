"""Where peers compute: the stages of the first roster, and the place of one that joins a run in progress. Pure.

Read :func:`choose_place` first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.consensus.roster import Member, Role, Roster, machines_of
from swarm.errors import Refused
from swarm.ids import ENDS, PartName, PeerId, stage_of, stage_part
from swarm.schema import BesideField, MachineField, Message, NameField, PeerIdField, RegionField
from swarm.security.credentials import Credential


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of a run, as one peer that joins sees them.

    Attributes:
        stages: Their number.
        private_ends: Whether trainers hold the ends.
        lost: The parts that nobody holds any more.
        leaving: The members that have been asked to leave.
        arriving: The peers on their way into the run, each with the stage that it has chosen, None if it has chosen
            none yet. They say so themselves: see :func:`arrivals`.
        cannot: For some of them the stages that their memory does not hold, as they say, too.
        barred: The parts to which the asking peer would not be let in.
        beside: The parts that are held on its machine.
        unfit: Those that its memory does not hold.
        chosen: The part that it chose before, when it chooses again.
        home: Where microbatches stay in one organisation, that of the asking peer: replicas of others are none to it.
    """

    stages: int
    private_ends: bool
    lost: Collection[str] = ()
    leaving: Collection[PeerId] = ()
    arriving: Mapping[PeerId, PartName | None] = field(default_factory=dict)
    cannot: Mapping[PeerId, Collection[int]] = field(default_factory=dict)
    barred: Collection[str] = ()
    beside: Collection[str] = ()
    unfit: Collection[str] = ()
    chosen: PartName | None = None
    home: str | None = None

    def counts(self, roster: Roster, peer: str) -> bool:
        """Return whether a member is a replica to the asking peer."""
        return self.home is None or roster.borders.home(peer) == self.home


MAX_FORESEEN = 64
"""Of so many peers that have not chosen yet it is foreseen what they choose."""


def choose_place(
    roster: Roster, peer: PeerId, role: Role, wish: int | None, places: Places
) -> tuple[PartName | None, str]:
    """Choose the part of a peer that joins a run in progress.

    Its wish; else a stage that is lost; else the one with the fewest replicas, whose loss would hurt most: without
    those that leave, with those on their way. Of several each peer takes another. Of those that choose at the same time
    each foresees what those before it, in the order of peer ids, will choose. Who chooses again
    leaves those out that chose the same and come after it: so two that collided do not move together. A
    stage that does not fit is its place only where none does, or by its wish: it cannot take it. Cost: O(members +
    arrivals · stages).

    Returns:
        The part, None for a role that holds none, and why.

    Raises:
        Refused: The run does not have the stage that was wished for.
    """
    stages, private_ends = places.stages, places.private_ends
    if role != "stage":
        return (ENDS, "every trainer holds the ends") if role == "trainer" and private_ends else (None, f"a {role}")
    if wish is not None:
        if wish >= stages:
            raise Refused(f"there is no stage {wish}: the run's are 0 to {stages - 1}")
        return stage_part(wish), "asked for"
    held = Counter(member.part for member in roster.members if places.counts(roster, member.peer))
    leaves = Counter(roster[one].part for one in places.leaving if one in roster and places.counts(roster, one))
    counts = {
        stage: 0 if (part := stage_part(stage)) in places.lost else held[part] - leaves[part] for stage in range(stages)
    }
    coming = arrivals(roster, peer, counts, places)

    def last(stage: int) -> tuple[int, bool, bool, bytes]:
        part = stage_part(stage)
        return counts[stage] + coming[stage], part != places.chosen, part in places.beside, _draw(peer, stage)

    stage = min(_open_to(counts, places), key=last)
    part = stage_part(stage)
    if part in places.lost:
        return part, f"all that held it are lost{_on_their_way(coming[stage])}"
    leaving = f", and {leaves[part]} about to leave" if leaves[part] else ""
    of = f" of {places.home}" if places.home else ""
    return part, f"it has the fewest replicas{of} ({counts[stage]}{leaving}{_on_their_way(coming[stage])})"


def arrivals(roster: Roster, peer: PeerId, counts: Mapping[int, int], places: Places) -> Counter[int]:
    """Count by stage the peers on their way that ``peer`` believes in, beside ``counts`` replicas of each that stay.

    Anybody can say that it is on its way, as often as it makes identities, and never arrive. So no stage is believed to
    get more than half as many as it has, or two where that is more: whatever is claimed, the stage that a peer chooses
    has no more replicas beyond those of the one that has fewest.
    """
    most = {stage: max(2, count // 2) for stage, count in counts.items()}
    coming: Counter[int] = Counter()
    undecided = []
    for other, part in sorted(places.arriving.items()):
        stage = None if part is None else stage_of(part)
        if other == peer or other in roster or (part is not None and part == places.chosen and other > peer):
            continue
        if part is None and other < peer:
            undecided.append(other)
        elif stage in most and coming[stage] < most[stage]:
            coming[stage] += 1
    free = [stage for stage in _open_to(counts, places) if coming[stage] < most[stage]]
    for other in undecided[:MAX_FORESEEN]:
        if not free:
            break
        fitting = [stage for stage in free if stage not in places.cannot.get(other, ())]
        if not fitting:
            continue
        stage = min(fitting, key=lambda one: (counts[one] + coming[one], _draw(other, one)))
        coming[stage] += 1
        if coming[stage] >= most[stage]:
            free.remove(stage)
    return coming


def _open_to(counts: Mapping[int, int], places: Places) -> list[int]:
    """The stages among which a peer may choose: those that are lost come before all others."""
    fitting = [stage for stage in counts if stage_part(stage) not in places.unfit] or list(counts)
    lost = [stage for stage in fitting if stage_part(stage) in places.lost]
    return lost or [stage for stage in fitting if stage_part(stage) not in places.barred] or fitting


def _on_their_way(count: int) -> str:
    return f", and {count} on the way" if count else ""


def _draw(peer: str, stage: int) -> bytes:
    return hashlib.sha256(f"{peer}|{stage}".encode()).digest()


# --- the first roster -----------------------------------------------------------------------------------------------


class Candidate(Message):
    """A peer that asks to be in the first roster; ``stage`` is its wish, if it has one, ``unfit`` are the stages that
    its memory does not hold; ``credential`` what admits it, where one must be admitted."""

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
    credential: Credential | None = None

    def fitting(self, stages: int) -> list[int]:
        """Return the stages that it can hold; all of them where it says of each that it cannot."""
        return [stage for stage in range(stages) if stage not in self.unfit] or list(range(stages))


def assign_stages(
    candidates: Iterable[Candidate], stages: int, *, private_ends: bool, homes: Mapping[str, str] | None = None
) -> tuple[Roster, dict[PeerId, str]]:
    """Give every stage host a stage that its memory holds: wishes first, then the stage with the fewest replicas, of
    several one that nobody on its machine has, lower stages first. Who can hold few stages comes first, so that who can
    hold more is left for the others.

    Returns the roster and a reason per peer. A wish is not heard when the stage does not exist or does not fit, or when
    granting it would leave too few hosts to hold every stage. Raises Refused when there are fewer hosts than stages,
    or none is left with the memory for one; exact where of any two hosts one can hold whatever the other can.
    With ``homes``, the organisation of each peer, where microbatches stay in it, each organisation's hosts are placed
    by themselves, and one that has a trainer must hold every stage.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.peer)
    hosts = [candidate for candidate in ordered if candidate.role == "stage"]
    if len(hosts) < stages:
        raise Refused(f"{len(hosts)} stage hosts cannot hold {stages} stages")
    machines = machines_of({PeerId(candidate.peer): candidate.beside for candidate in ordered})
    if homes is None:
        places, reasons = _best(hosts, stages, machines)
    else:
        places, reasons = _by_home(hosts, stages, machines, homes)
        feeding = {homes.get(candidate.peer) for candidate in ordered if candidate.role == "trainer"} - {None, ""}
        held = {home: {places[host.peer] for host in hosts if homes.get(host.peer) == home} for home in feeding}
        if all(len(stages_held) < stages for stages_held in held.values()):
            raise Refused(f"no organisation has a trainer and a host of each of {stages} stages")
    if lacking := [stage for stage in range(stages) if stage not in places.values()]:
        raise Refused(f"no stage host is left with the memory for stage {lacking[0]}")
    return Roster(_member(candidate, places, private_ends) for candidate in ordered), reasons


def _best(
    hosts: Sequence[Candidate], stages: int, machines: Mapping[PeerId, PeerId]
) -> tuple[dict[str, int], dict[PeerId, str]]:
    """As :func:`_placed`, with wishes unless they cost a stage."""
    places, reasons = _placed(hosts, stages, machines, wishes=True)
    if len(set(places.values())) < stages:  # a wish took away who alone can hold another stage
        places, reasons = _placed(hosts, stages, machines, wishes=False)
    return places, reasons


def _by_home(
    hosts: Sequence[Candidate], stages: int, machines: Mapping[PeerId, PeerId], homes: Mapping[str, str]
) -> tuple[dict[str, int], dict[PeerId, str]]:
    places, reasons = dict[str, int](), dict[PeerId, str]()
    for home in sorted({homes.get(host.peer, "") for host in hosts}):
        own = [host for host in hosts if homes.get(host.peer, "") == home]
        placed, why = _best(own, stages, machines)
        places |= placed
        reasons |= {peer: f"{reason}, in {home or 'no organisation'}" for peer, reason in why.items()}
    return places, reasons


def _placed(
    hosts: Sequence[Candidate], stages: int, machines: Mapping[PeerId, PeerId], *, wishes: bool
) -> tuple[dict[str, int], dict[PeerId, str]]:
    """The stage of each host, and why."""
    replicas, fits = dict.fromkeys(range(stages), 0), {host.peer: host.fitting(stages) for host in hosts}
    places: dict[str, int] = {}
    beside: Counter[tuple[PeerId, int]] = Counter()  # (machine, stage): how many of the stage it has

    reasons: dict[PeerId, str] = {}
    for host in hosts if wishes else ():
        unplaced = len(hosts) - len(places) - 1
        empty = sum(not count for stage, count in replicas.items() if stage != host.stage)
        if host.stage is not None and host.stage in fits[host.peer] and unplaced >= empty:
            places[host.peer] = host.stage
            replicas[host.stage] += 1
            beside[machines[PeerId(host.peer)], host.stage] += 1
            reasons[PeerId(host.peer)] = "asked for"
    for host in sorted(hosts, key=lambda host: len(fits[host.peer])):
        if host.peer not in places:
            machine = machines[PeerId(host.peer)]
            stage = min(fits[host.peer], key=lambda s: (replicas[s], beside[machine, s], s))
            of_those = " of those that fit" if len(fits[host.peer]) < stages else ""
            reasons[PeerId(host.peer)] = f"fewest replicas{of_those} ({replicas[stage]})"
            places[host.peer] = stage
            replicas[stage] += 1
            beside[machine, stage] += 1
    return places, reasons


def without_memory(candidates: Iterable[Candidate], stages: int, homes: Mapping[str, str] | None = None) -> str:
    """Return why these, as many as it takes, cannot hold all stages; "" when they can. ``homes``: see
    :func:`assign_stages`."""
    try:
        assign_stages(candidates, stages, private_ends=False, homes=homes)
    except Refused as refused:
        return refused.reason
    return ""


COMMON = ("peer", "role", "name", "addresses", "region", "outgoing", "beside", "machine")
"""What a candidate says of itself that the roster says, too."""


def _member(candidate: Candidate, places: Mapping[str, int], private_ends: bool) -> Member:
    part: str | None = None
    if candidate.role == "stage":
        part = stage_part(places[candidate.peer])
    elif candidate.role == "trainer" and private_ends:
        part = ENDS
    return Member(part=part, **{name: getattr(candidate, name) for name in COMMON})

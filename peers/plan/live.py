"""The peers of a run that is under way, for ``swarm plan --swarm INVITE``: asked as an observer, who holds nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from peers.console.words import CommandError, command_name
from peers.dashboard.observer import ObserverSource
from peers.exit_codes import EXIT_UNREACHABLE
from peers.invites.invite import Contacts
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member
from swarm.ids import PartName, PeerId
from swarm.membership.rules import spec_of
from swarm.membership.vitals import Vitals
from swarm.models.registry import family_of
from swarm.planning.predict import BACKWARD
from swarm.planning.workload import PeerClass

LOOK_S, PATIENCE_S = 0.5, 30.0
ASSUMED_RATE, ASSUMED_TRIP_S = 12_500_000.0, 0.05
"""Of who has not averaged anything yet: 100 Mbit/s, and 50 ms."""
ALIKE = 1.5
"""Members of one class differ in speed, in bandwidth and in round trip by about this factor at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run as its newest record has it. ``assumed`` says what nobody measured, in words; ``kinds`` how many
    microbatches of each choice of variants there were, where there are several."""

    manifest: Manifest
    step: int
    classes: list[PeerClass]
    assumed: str
    kinds: tuple[float, ...]


async def look_at_run(contacts: Contacts, clock: Clock, memory: float) -> LiveRun:
    """Find the run, wait for its newest record, and ask its members. ``memory`` is each one's, bytes: no record says.

    Raises RunEnded where no contact answers, CommandError where the run has not begun, or nothing was measured yet.
    """
    async with ObserverSource.open(contacts, clock) as source:
        ends = clock.monotonic() + PATIENCE_S
        while True:
            manifest, record, vitals = await source.standing()
            if record is not None:
                return live_run(manifest, record, vitals, memory)
            if clock.monotonic() > ends:
                raise CommandError(
                    "no peer said at which step the run is",
                    check="has the run begun? The founder's terminal says what it waits for",
                    next_=f"describe its peers in a file: {command_name()} plan MODEL --peers FILE",
                    exit_code=EXIT_UNREACHABLE,
                )
            await clock.sleep(LOOK_S)


def live_run(manifest: Manifest, record: CloseRecord, vitals: Mapping[PeerId, Vitals], memory: float) -> LiveRun:
    """Group a record's members that host stages or train into classes. Speed is what they say of their microbatches, in
    the record or now; a link what was measured in averaging. Pure. Raises CommandError where nobody's speed is known.
    """
    members = [member for member in record.members.members if member.role in ("stage", "trainer")]
    speeds = {member.peer: _speed(manifest, member, record, vitals) for member in members}
    known = [speed for speed in speeds.values() if speed is not None]
    if not known:
        raise CommandError(
            "no speed is known: no member of the run has computed a step yet",
            check=f"does a member compute? {command_name()} peers, on its machine",
            next_=f"repeat the command after a step or two, or {command_name()} plan MODEL --peers FILE",
        )
    usual, links = median(known), record.links
    found: dict[tuple[int, ...], list[PeerClass]] = {}
    for member in members:
        late_us, rate = links.get(member.peer, (0, 0))
        bandwidth, trip_s = float(rate or ASSUMED_RATE), 2e-6 * late_us if late_us else ASSUMED_TRIP_S
        one = PeerClass(name="", count=1, flops=speeds[member.peer] or usual, memory=memory, down=bandwidth,
                        up=bandwidth, round_trip_s=trip_s)  # fmt: skip
        key = tuple(round(math.log(size) / math.log(ALIKE)) for size in (one.flops, bandwidth, trip_s))
        found.setdefault(key, []).append(one)
    classes = [_typical(group, number) for number, (_, group) in enumerate(sorted(found.items(), reverse=True))]
    unknown = len(members) - len(known), sum(not links.get(member.peer, (0, 0))[1] for member in members)
    assumed = (
        f"{memory / 2**30:g} GiB of memory each; the usual speed of {unknown[0]} whose own nobody measured; 100 Mbit/s"
        f" of {unknown[1]}"
    )
    kinds: tuple[float, ...] = ()
    if (choices := manifest.split.choices) > 1:
        counts = Counter(one.choice for one in record.committed)
        kinds = tuple(1.0 + counts[choice] for choice in range(choices))  # the next step may have some of each
    return LiveRun(manifest=manifest, step=record.step, classes=classes, assumed=assumed, kinds=kinds)


def _typical(group: list[PeerClass], number: int) -> PeerClass:
    middle = {key: median(getattr(one, key) for one in group) for key in ("flops", "down", "up", "round_trip_s")}
    return replace(group[0], name=f"class {number + 1}", count=len(group), **middle)


def _speed(manifest: Manifest, member: Member, record: CloseRecord, vitals: Mapping[PeerId, Vitals]) -> float | None:
    """Operations a second of one member, as it tells how long a microbatch takes it; None where it does not."""
    said = vitals.get(PeerId(member.peer))
    microbatch_s = record.paces.get(member.peer, 0) / 1e6
    if not microbatch_s and said is not None and said.microbatches:
        microbatch_s = said.compute_s / said.microbatches
    if member.part is None or member.role != "stage" or microbatch_s <= 0.0:
        return None
    context = manifest.model.context
    cost = family_of(manifest.model).cost(spec_of(manifest, PartName(member.part)), context)
    return BACKWARD * cost.forward_flops * context * manifest.batch.microbatch_size / microbatch_s

"""Choosing the schedule of a round, and saying why. Pure: all members choose the same from what they have agreed on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from swarm.averaging.schedules import SCHEDULES, Schedule, ScheduleName
from swarm.averaging.schedules.costs import Link, Vector, seconds
from swarm.averaging.schedules.routes import Routes
from swarm.averaging.schedules.shares import shares, steady
from swarm.ids import PeerId

WORTH = 0.9
"""Another schedule than ``direct`` is chosen when it takes less than this share of its time: links are measured, not
known, and the fewer hops, the fewer can fail."""

MOST_COMPARED = 32
"""Comparing takes O(K²): 30 ms for 16 members, 110 ms for 32, and more on a busy machine: off the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the members of a round have agreed on. ``members`` in rank order, near ones side by side; ``links`` as the
    last close record has them, which may lack some; ``dial_only`` are those that others reach through relays alone."""

    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, int]
    vector: Vector
    links: Mapping[PeerId, Link] = field(default_factory=dict)
    dial_only: Collection[PeerId] = ()
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule, how much of the vector each member reduces, and why."""

    schedule: ScheduleName
    shares: Mapping[PeerId, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A schedule that is not to be chosen, and why."""

    schedule: ScheduleName
    why: str


def choose(situation: Situation, wanted: Wanted | None = None) -> Choice:
    """The schedule that takes the least time, or the one that is ``wanted``, with parts sized by bandwidth.

    Only members that have something to add and can be dialled reduce anything (all that add something, when none of
    them can be dialled). Cost: see MOST_COMPARED.
    """
    known = {peer: link for peer, link in situation.links.items() if peer in situation.members}
    able = [peer for peer in situation.members if situation.weights[peer] and peer not in situation.dial_only]
    able = able or [peer for peer in situation.members if situation.weights[peer]]
    if not known:
        schedule: ScheduleName = "direct" if wanted is None else wanted.schedule
        return Choice(schedule, dict.fromkeys(able, 1), _told(wanted, "no link has been measured yet"))
    links = _completed(situation.members, known)
    sized = shares(steady({peer: links[peer].bytes_per_s for peer in able}), len(situation.members))
    if wanted is not None:
        return Choice(wanted.schedule, sized, _told(wanted, _sizes(sized)))
    if len(able) > MOST_COMPARED:
        return Choice("direct", sized, f"more than {MOST_COMPARED} members are too many to compare; {_sizes(sized)}")
    times = {name: _seconds(schedule, situation, sized, links) for name, schedule in SCHEDULES.items()}
    best = min(times, key=lambda name: times[name])
    chosen: ScheduleName = best if times[best] < WORTH * times["direct"] else "direct"
    return Choice(chosen, sized, f"{_compared(chosen, times)}; {_sizes(sized)}")


def _seconds(
    schedule: Schedule, situation: Situation, sized: Mapping[PeerId, int], links: Mapping[PeerId, Link]
) -> float:
    routes = Routes(schedule, situation.members, situation.weights, sized, situation.turn)
    return seconds(routes, situation.vector, links)


def _told(wanted: Wanted | None, why: str) -> str:
    return why if wanted is None else f"{wanted.why}; {why}"


def _compared(chosen: ScheduleName, times: Mapping[ScheduleName, float]) -> str:
    others = sorted((each for each in times if each != chosen), key=lambda each: times[each])
    return f"{times[chosen]:.2g} s expected, {others[0]} {times[others[0]]:.2g} s"


def _sizes(sized: Mapping[PeerId, int]) -> str:
    least, most = min(sized.values()), max(sized.values())
    if len(sized) == 1:
        return "one member reduces all"
    if least == most:
        return f"{len(sized)} equal parts"
    if least == 0:
        return f"{sum(share == 0 for share in sized.values())} of {len(sized)} links too slow to reduce a part"
    return f"parts by bandwidth, the largest {most / least:.3g} times the smallest"


def _completed(members: Collection[PeerId], known: Mapping[PeerId, Link]) -> dict[PeerId, Link]:
    """Links of all: one that nobody has measured yet counts as the middle one of those that are."""
    middle = Link(
        latency_s=sorted(link.latency_s for link in known.values())[len(known) // 2],
        bytes_per_s=median_low(link.bytes_per_s for link in known.values()),
    )
    return {peer: known.get(peer, middle) for peer in members}

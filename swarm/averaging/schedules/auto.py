"""Choose the schedule of a round and each member's share of the vector, and say why.

Pure, and in integers where it matters: all members choose the same from what they have agreed on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import gcd
from statistics import median_low

from swarm.averaging.schedules import SCHEDULES, Schedule, ScheduleName
from swarm.averaging.schedules.costs import LinkCost, Vector, seconds
from swarm.averaging.schedules.routes import Routes
from swarm.errors import BugError
from swarm.ids import PeerId

WORTH = 0.9
"""Another schedule than ``direct`` is chosen when it takes less than this share of its time: links are measured, not
known, and the fewer hops, the fewer can fail."""

MAX_COMPARED = 32
"""Comparing takes O(K²): 30 ms for 16 members, 110 ms for 32, and more on a busy machine: off the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInputs:
    """The inputs on which the members of a round agree. ``members`` are in rank order, near ones side by side;
    ``links`` come from the last close record, which may lack some; others reach ``dial_only`` through relays alone."""

    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, int]
    vector: Vector
    links: Mapping[PeerId, LinkCost] = field(default_factory=dict)
    dial_only: Collection[PeerId] = ()
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule, how much of the vector each member reduces, and why."""

    schedule: ScheduleName
    shares: Mapping[PeerId, int]
    reason: str


@dataclass(frozen=True, slots=True)
class UnavailableSchedule:
    """A schedule that is not to be chosen, and why."""

    schedule: ScheduleName
    why: str


def choose(situation: ScheduleInputs, wanted: UnavailableSchedule | None = None) -> Choice:
    """The schedule that takes the least time, or the one that is ``wanted``, with parts sized by bandwidth.

    Only members that have something to add and can be dialled reduce anything (all that add something, when none of
    them can be dialled). Cost: see MAX_COMPARED.
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
    if len(able) > MAX_COMPARED:
        return Choice("direct", sized, f"more than {MAX_COMPARED} members are too many to compare; {_sizes(sized)}")
    times = {name: _seconds(schedule, situation, sized, links) for name, schedule in SCHEDULES.items()}
    best = min(times, key=lambda name: times[name])
    chosen: ScheduleName = best if times[best] < WORTH * times["direct"] else "direct"
    return Choice(chosen, sized, f"{_compared(chosen, times)}; {_sizes(sized)}")


def _seconds(
    schedule: Schedule, situation: ScheduleInputs, sized: Mapping[PeerId, int], links: Mapping[PeerId, LinkCost]
) -> float:
    routes = Routes(schedule, situation.members, situation.weights, sized, situation.turn)
    return seconds(routes, situation.vector, links)


def _told(wanted: UnavailableSchedule | None, why: str) -> str:
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


def _completed(members: Collection[PeerId], known: Mapping[PeerId, LinkCost]) -> dict[PeerId, LinkCost]:
    """Links of all: one that nobody has measured yet counts as the middle one of those that are."""
    middle = LinkCost(
        latency_s=sorted(link.latency_s for link in known.values())[len(known) // 2],
        bytes_per_s=median_low(link.bytes_per_s for link in known.values()),
    )
    return {peer: known.get(peer, middle) for peer in members}


# --- shares by the bandwidth of each member's link -------------------------------------------------------------------
# In integers, the same everywhere.


MAX_CLASSES = 10
"""A link counts as at most 2¹⁰ times as fast, or as slow, as the middle one."""


def shares(rates: Mapping[PeerId, int], members: int) -> dict[PeerId, int]:
    """Shares that let the slowest of a round be done as early as it can, and of the others the next slowest.

    ``rates`` are bytes a second of those who may reduce, any unit, at least 1 each; ``members`` all who ask. Who
    reduces the share s of n bytes sends (1-s)·n for the others' parts and (K-1)·s·n of answers, hence is done after
    (1+(K-2)·s)·n/rate. All whose share is positive are done at the same time; a link too slow to be done by then gets
    none, and its own n bytes are what it sends. Equal links get equal shares. (The linear programme that minimises the
    time of the slowest alone has many solutions when one link is slow, and its solvers return one where a single member
    reduces everything.)
    Raises BugError without rates. Cost: O(K²) at most. Source: ours; the programme is that of Ryabinin et al., "Moshpit
    SGD", 2021, appendix on load balancing.
    """
    if not rates or min(rates.values()) < 1:
        raise BugError(f"shares of links {dict(rates)}")
    if members <= 2:
        return dict.fromkeys(rates, 1)
    taking = dict(rates)
    while True:
        total, others = sum(taking.values()), members - 2 + len(taking)
        given = {peer: others * rate - total for peer, rate in taking.items()}
        if min(given.values()) > 0:
            break
        taking = {peer: taking[peer] for peer, share in given.items() if share > 0}
    unit = gcd(*given.values())
    return {peer: given.get(peer, 0) // unit for peer in rates}


def steady(rates: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Rates as multiples of the middle one, which is 2¹⁰. Measurements of equal links differ, and they shall have equal
    shares: what is within a factor of two of the middle counts as the middle, the rest is rounded to a power of two.
    Raises BugError for a rate below 1.
    """
    if not rates or min(rates.values()) < 1:
        raise BugError(f"rates of links {dict(rates)}")
    middle = median_low(rates.values())
    return {peer: 1 << (MAX_CLASSES + _class(rate, middle)) for peer, rate in rates.items()}


def _class(rate: int, middle: int) -> int:
    """⌊log₂(rate/middle)⌋, towards 0 below: without a logarithm, which might differ between machines."""
    if rate < middle:
        return -_class(middle, rate)
    doublings = (rate // middle).bit_length() - 1
    return min(MAX_CLASSES, doublings if rate > 2 * middle else 0)

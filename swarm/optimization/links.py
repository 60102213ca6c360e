"""What a close record says of the links of those who train a part, for the rounds of the next step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high

from swarm.averaging.meter import MOST_BYTES_PER_S
from swarm.ids import PeerId
from swarm.optimization.messages import Averaged
from swarm.optimization.records import CloseRecord, MeasuredLink
from swarm.optimization.roster import Roster

NEW_SHARE = 4
"""A new measurement moves what is believed by a quarter of the difference."""


def measured(before: CloseRecord, averaged: Mapping[PeerId, Averaged], following: Roster) -> dict[str, MeasuredLink]:
    """(microseconds one way, bytes a second) of everybody of whom anything is known, 0 for what is not.

    A member's latency is the middle of what the others of its part measured to it. Its bandwidth is what came from it
    at those that heard it, the middle times their number, for it sent to all of them at once; or what came to it from
    the others, if it says that this is less. Where not more than half of the others measured anything nothing is
    learnt, and of two the higher counts: one that lies alone makes nobody's link slower but its own, and where there
    are three others no faster either. What comes of it is within the bounds of a record, whatever was said.
    """
    known: dict[str, MeasuredLink] = {}
    for part in following.parts:
        replicas = following.replicas(part)
        for peer in replicas:
            others = [other for other in replicas if other != peer]
            heard, own = list(_reports(averaged, others, [peer])), list(_reports(averaged, [peer], others))
            latency = _middle([each for each, _ in heard], len(others))
            rate = _together([each for _, each in heard], len(others))
            if (said := _together([each for _, each in own], len(others))) and rate:
                rate = min(rate, said)
            old = before.links.get(peer, (0, 0))
            if any(now := (_moved(old[0], latency), _moved(old[1], rate))):
                known[peer] = now
    return known


def _reports(averaged: Mapping[PeerId, Averaged], by: list[PeerId], of: list[PeerId]) -> Iterator[MeasuredLink]:
    for one in by:
        said = averaged[one].heard if one in averaged else {}
        yield from (said[other] for other in of if other in said)


def _middle(values: list[int], others: int) -> int:
    """Of what was measured, by more than half of the others; 0 by fewer."""
    found = [value for value in values if value]
    return median_high(found) if 2 * len(found) > others else 0


def _together(rates: list[int], others: int) -> int:
    return min(MOST_BYTES_PER_S, _middle(rates, others) * sum(rate > 0 for rate in rates))


def _moved(old: int, new: int) -> int:
    if not old or not new:
        return old or new
    return old + (new - old) // NEW_SHARE

"""What a close record says of the links of those who train a part, for the rounds of the next step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_low

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
    the others, if that is less. So one that lies alone moves hardly anybody's link but its own.
    """
    known: dict[str, MeasuredLink] = {}
    for part in following.parts:
        replicas = following.replicas(part)
        for peer in replicas:
            others = [other for other in replicas if other != peer]
            heard = list(_reports(averaged, others, [peer]))
            rates = [_together([rate for _, rate in found]) for found in (heard, _reports(averaged, [peer], others))]
            latency, rate = _middle([each for each, _ in heard]), min(filter(None, rates), default=0)
            old = before.links.get(peer, (0, 0))
            if any(now := (_moved(old[0], latency), _moved(old[1], rate))):
                known[peer] = now
    return known


def _reports(averaged: Mapping[PeerId, Averaged], by: list[PeerId], of: list[PeerId]) -> Iterator[MeasuredLink]:
    for one in by:
        said = averaged[one].heard if one in averaged else {}
        yield from (said[other] for other in of if other in said)


def _middle(values: list[int]) -> int:
    return median_low([value for value in values if value] or [0])


def _together(rates: list[int]) -> int:
    return _middle(rates) * sum(rate > 0 for rate in rates)


def _moved(old: int, new: int) -> int:
    if not old or not new:
        return old or new
    return old + (new - old) // NEW_SHARE

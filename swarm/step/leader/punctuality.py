"""Find out for whom a leader had to wait, from how long answers took. Pure.

Nobody's time is judged by its own times before, only by what others took for the same question. Who averages waits for
the others of its part, and answers as late as the last of them: it says how long it waited for whom to enter the round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from swarm.ids import PeerId
from swarm.waiting import OTHERS, longest_s

LEAST = 2
"""So many have to say that they waited for a member."""

Seconds = Mapping[PeerId, float]


class Lateness(NamedTuple):
    """How long a member's answer took, and what is usual among the others."""

    seconds: float
    usual_s: float


def enough_s(seconds: Sequence[float], spare: float = 1.0) -> float | None:
    """Return how long the rest is waited for, after what these took to answer, ``spare`` times as long as makes one
    late; None where they are too few to tell."""
    return spare * longest_s(median(seconds)) if len(seconds) >= OTHERS else None


def late(
    took: Seconds, waited: Mapping[PeerId, Seconds] | None = None, parts: Mapping[PeerId, str] | None = None
) -> dict[PeerId, Lateness]:
    """Return which members were late with a question.

    Args:
        took: How long each took to answer.
        waited: How long each waited for which others to average, as it says itself.
        parts: What each averages, for those that do: where no other of its part was in time, it may have waited for
            another that did not let the round go on.
    """
    claims = _believed(took, waited or {}, parts or {})
    own = {peer: took[peer] - max(claims.get(peer, {}).values(), default=0.0) for peer in took}
    found: dict[PeerId, Lateness] = {}
    for peer in sorted(took):
        others = [own[other] for other in took if other != peer]
        if len(others) < OTHERS:
            continue
        usual_s = median(others)
        most_s = longest_s(usual_s)
        named_s = max((said[peer] for said in claims.values() if peer in said), default=0.0)
        alone = _answers_alone(peer, took, parts or {}, most_s)
        behind_s = max(named_s, own[peer] if alone else 0.0)
        if behind_s > most_s:
            found[peer] = Lateness(behind_s, usual_s)
    return found


def _answers_alone(peer: PeerId, took: Seconds, parts: Mapping[PeerId, str], most_s: float) -> bool:
    """Return whether its time is its own: it averages with nobody, or another of its part had the result in time."""
    mates = [other for other in took if other != peer and peer in parts and parts.get(other) == parts[peer]]
    return not mates or any(took[other] <= most_s for other in mates)


def _believed(
    took: Seconds, waited: Mapping[PeerId, Seconds], parts: Mapping[PeerId, str]
) -> dict[PeerId, dict[PeerId, float]]:
    """Return what is believed of who waited for whom: where two of a member's part and more than half of it say so, and
    no more than its own answer took, for who answers has averaged. One alone may have held the round up itself."""
    named: defaultdict[PeerId, set[PeerId]] = defaultdict(set)
    for peer, said in waited.items():
        for other in said:
            if other in took and other != peer and peer in took and parts.get(peer) == parts.get(other):
                named[other].add(peer)
    shared = Counter(parts[peer] for peer in took if peer in parts)
    guilty = {peer for peer, by in named.items() if len(by) >= LEAST and 2 * len(by) > shared[parts[peer]] - 1}
    return {
        peer: {other: min(seconds, took[peer], took[other]) for other, seconds in said.items() if other in guilty}
        for peer, said in waited.items()
        if peer in took
    }

"""The groups that a strategy forms: their members, listeners and reducers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from swarm.errors import BugError, RoundFailed
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Group:
    """The members of one group in rank order, the order in which their sums are added.

    ``silent`` ones add nothing and hold the result afterwards, like the others. ``reducers`` compute it: nobody named
    means all that add something, each an equal part. ``outgoing`` ones call the others and are called by nobody.
    """

    members: tuple[PeerId, ...]
    silent: frozenset[PeerId] = frozenset()
    reducers: tuple[PeerId, ...] = ()
    outgoing: frozenset[PeerId] = frozenset()


def ranked(replicas: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """The replicas in the order that everybody agrees on. Raises BugError for a duplicate."""
    if len(set(replicas)) != len(replicas):
        raise BugError(f"a replica is listed twice: {sorted(replicas)}")
    return tuple(sorted(replicas))


def able_to_reduce(members: Sequence[PeerId], outgoing: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Those that others can call, and one that is alone. Raises RoundFailed where there is none."""
    able = tuple(peer for peer in members if peer not in outgoing or len(members) == 1)
    if members and not able:
        raise RoundFailed(f"none of {len(members)} replicas can be called: there is nobody to reduce for the others")
    return able


def shuffled(replicas: Sequence[PeerId], *moment: object) -> tuple[PeerId, ...]:
    """The replicas in an order that is the same for everybody and another at every ``moment``, such as (seed, step).
    Raises BugError for a duplicate. O(n log n)."""
    order = list(ranked(replicas))
    digest = hashlib.sha256(repr(moment).encode()).digest()
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    return tuple(order)


def in_groups(order: Sequence[PeerId], count: int) -> tuple[Group, ...]:
    """``order`` dealt into ``count`` groups whose sizes differ by one at most; fewer when there are fewer replicas."""
    hands = [order[start::count] for start in range(min(count, len(order)))]
    return tuple(Group(tuple(hand)) for hand in hands)


def left_of(rounds: Sequence[Sequence[Group]], replicas: Sequence[PeerId]) -> float:
    """Return the share that these rounds, one after another, leave of the mean squared distance from the mean when the
    replicas differ by independent noise: (‖M‖² - 1)/(P-1) for the product M of their mixing matrices, Frobenius norm.
    O(P²) a round, 8 P² bytes."""
    place = {peer: number for number, peer in enumerate(replicas)}
    mixed = np.eye(len(replicas))
    for groups in rounds:
        for group in groups:
            heard = [place[peer] for peer in group.members if peer not in group.silent]
            mixed[[place[peer] for peer in group.members]] = mixed[heard].mean(axis=0)
    return float((mixed**2).sum() - 1) / max(1, len(replicas) - 1)


def square_root_size(replicas: int) -> int:
    """Replicas of a group where nobody says otherwise: about √P, so that two rounds of disjoint groups reach all."""
    return max(2, round(sqrt(replicas)))

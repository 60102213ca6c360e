"""Strategies that are exact after one round in a single group, or after three across regions.

:class:`Everyone` is the plain case; in :class:`Server` one replica reduces for all; :class:`Hierarchy` averages within
regions first, then across them; :class:`Plain` is the fallback for rounds that break.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.averaging.strategies.groups import Group, able_to_reduce, ranked
from swarm.ids import PeerId

# --- one group of all ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Everyone:
    """All replicas of a part in one group: mixes gradient sums, or parameters, and is exact after a single round.

    Each member sends and receives 2(K-1)/K of the vector whatever K is, but the round waits for the slowest member and
    fails with any: beyond some tens of replicas, swap groups instead.
    Source: reduce-scatter and all-gather, Rabenseifner 2004; Patarasuk and Yuan 2009.
    """

    name: str = "everyone"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """One group, ranked by peer id; step, round and seed change nothing."""
        return (Group(ranked(replicas)),) if replicas else ()

    def exact_after(self, replicas: int) -> int:
        """One round."""
        return 1

    def left_after(self, rounds: int, replicas: int) -> float:
        """Nothing, once there was a round."""
        return 0.0 if rounds else 1.0


# --- one group of all, in which another one reduces nothing in each turn ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Plain:
    """All replicas in one group: exact after a single round, whatever the manifest's strategy is. For rounds that break
    again and again, and no manifest can ask for it.

    In each ``turn`` another member has nothing to reduce. So what breaks a round shows to others than before, and
    anyone who gives one member another result than the rest does so in all turns but one, in which the round is good.
    ``outgoing`` ones reduce nothing ever. Where a single one can be called, it reduces in every turn. Each of those
    that reduce carries K/(K-1) of what it does when all reduce.
    """

    turn: int
    outgoing: Collection[PeerId] = ()
    name: str = "plain"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """One group. Raises RoundFailed where none of several replicas can be called."""
        members = ranked(replicas)
        if not members:
            return ()
        able = able_to_reduce(members, self.outgoing)
        idle = able[self.turn % len(able)]
        reducers = tuple(peer for peer in able if peer != idle) or able
        return (Group(members, reducers=reducers, outgoing=frozenset(members) - frozenset(able)),)

    def exact_after(self, replicas: int) -> int:
        """One round."""
        return 1

    def left_after(self, rounds: int, replicas: int) -> float:
        """Nothing, once there was a round."""
        return 0.0 if rounds else 1.0


# --- one group of all, in which one replica reduces for all ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """All replicas in one group in which a single one computes: mixes gradient sums, or parameters, exactly, in one
    round.

    For peers that can only dial out: they call the others, and nobody calls them. ``outgoing`` are those, which are
    never the server. It is the first of the others by rank in step 0 (for seed 0), the next one in the step after, and
    so on: no one carries every step, and nobody has to be named. The others send and receive the vector once, the
    server (P-1) times, so a round takes (P-1)·n bytes of its link.
    Source: parameter server, Li et al., OSDI 2014.
    """

    outgoing: Collection[PeerId] = ()
    name: str = "server"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """One group. Raises RoundFailed where there are several replicas and none of them can be called: nobody else
        could do it, for all of them would have to be called."""
        members = ranked(replicas)
        if not members:
            return ()
        able = able_to_reduce(members, self.outgoing)
        only_call = frozenset(members) - frozenset(able)
        return (Group(members, reducers=(able[(seed + step) % len(able)],), outgoing=only_call),)

    def exact_after(self, replicas: int) -> int:
        """One round."""
        return 1

    def left_after(self, rounds: int, replicas: int) -> float:
        """Nothing, once there was a round."""
        return 0.0 if rounds else 1.0


# --- a region first, then across -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """All replicas of a region, then one delegate of each, then each region again, where only its delegate has
    something to say: mixes gradient sums, exactly, in three rounds (one where there is a single region, or where each
    has one replica).

    Across regions travels 2(R-1)/R of the vector for each of R delegates, whatever the number of replicas; with
    `everyone` it is that for each replica. ``regions`` names each replica's; one that has none is in "". The delegate
    changes with the step; those that are ``outgoing``, whom other regions call through a relay at best, are it only
    where nobody else is there.
    Source: hierarchical all-reduce, Jia et al., arXiv 1807.11205, section 3.3.
    """

    regions: Mapping[PeerId, str] = field(default_factory=dict)
    outgoing: Collection[PeerId] = ()
    name: str = "hierarchy"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """Return the groups of ``round``, one of three; groups of a single replica count too."""
        regions = self._regions(replicas)
        able = [[peer for peer in members if peer not in self.outgoing] or members for members in regions]
        delegates = [members[(seed + step) % len(members)] for members in able]
        if len(regions) <= 1 or len(regions) == len(replicas):
            return (Group(ranked(replicas)),) if replicas else ()
        if round % 3 == 1:
            others = [peer for members in regions for peer in members if peer not in delegates]
            return (Group(tuple(delegates)), *(Group((peer,)) for peer in others))
        if round % 3 == 0:
            return tuple(Group(members) for members in regions)
        pairs = zip(regions, delegates, strict=True)
        return tuple(Group(members, silent=frozenset(members) - {delegate}) for members, delegate in pairs)

    def exact_after(self, replicas: int) -> int:
        """Three rounds: how many are in which region does not matter."""
        return 3

    def left_after(self, rounds: int, replicas: int) -> float:
        """(R-1)/(P-1) after the first; the second mends the delegates only: (P-R)/P of that; then nothing."""
        regions = min(replicas, max(1, len(set(self.regions.values()))))
        within = (regions - 1) / max(1, replicas - 1)
        return (1.0, within, within * (replicas - regions) / replicas, 0.0)[min(rounds, 3)]

    def _regions(self, replicas: Sequence[PeerId]) -> list[tuple[PeerId, ...]]:
        found: dict[str, list[PeerId]] = defaultdict(list)
        for peer in ranked(replicas):
            found[self.regions.get(peer, "")].append(peer)
        return [tuple(members) for _, members in sorted(found.items())]

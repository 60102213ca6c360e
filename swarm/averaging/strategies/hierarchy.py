"""Within a region first, then across regions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.averaging.strategies.groups import Group, ranked
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """All replicas of a region, then one delegate of each, then each region again, where only its delegate has
    something to say: mixes gradient sums, exactly, in three rounds (one where there is a single region, or where each
    has one replica).

    Across regions travels 2(R-1)/R of the vector for each of R delegates, whatever the number of replicas; with
    `everyone` it is that for each replica. ``regions`` names each replica's; whoever has none is in "". The delegate
    changes with the step; those that are ``outgoing``, whom other regions call through a relay at best, are it only
    where nobody else is there.
    Source: hierarchical all-reduce, Jia et al., arXiv 1807.11205, section 3.3.
    """

    regions: Mapping[PeerId, str] = field(default_factory=dict)
    outgoing: Collection[PeerId] = ()
    name: str = "hierarchy"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """Of the three rounds, the one that ``round`` is; groups of a single replica are groups, too."""
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

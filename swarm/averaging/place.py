"""One member's place in a round: who asks it for what, and what that must weigh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.averaging.partition import Chunk
from swarm.averaging.plan import RoundPlan
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Station:
    """At which others hand us their sums of one part: level 0 are those below us in its tree, the levels above trades
    with one member each. ``weights`` are by who may come, ``due`` who of them brings something."""

    weights: Mapping[PeerId, int]
    due: frozenset[PeerId]

    @staticmethod
    def of(weights: Mapping[PeerId, int]) -> Station:
        """Where these come."""
        return Station(weights, frozenset(peer for peer, weight in weights.items() if weight))


NOBODY = Station.of({})


class Place:
    """What a plan means for one of its members. Pure."""

    def __init__(self, plan: RoundPlan, me: PeerId) -> None:
        self._routes, self._roots = plan.routes, plan.members
        self.me = me
        self.levels = plan.routes.levels if me in plan.routes.core else 0
        """How often we trade for each chunk."""
        self._stations = {(root, 0): self._below(root) for root in plan.routes.roots}
        for level in range(self.levels):
            (root,) = plan.routes.roots
            partner = plan.routes.partner(me, level)
            self._stations[root, level + 1] = Station.of({partner: plan.routes.traded_weight(partner, level)})

    def station(self, chunk: Chunk, level: int) -> Station:
        """Where sums of a chunk arrive; nobody comes at a level that there is not."""
        return self._stations.get((self._roots[chunk.rank], level), NOBODY)

    def asked(self, chunk: Chunk) -> bool:
        """Whether anybody asks us for a chunk's result."""
        return bool(self.station(chunk, 0).weights)

    def blamed(self, chunk: Chunk) -> frozenset[PeerId]:
        """Who owes us a sum for which it need not wait for others."""
        root = self._roots[chunk.rank]
        return frozenset(peer for peer in self.station(chunk, 0).due if not self._routes.children(peer, root))

    def parent(self, root: PeerId) -> PeerId | None:
        """Whom we ask for a root's part; None when we compute it."""
        return self._routes.parent(self.me, root)

    def asks(self, root: PeerId) -> tuple[PeerId, ...]:
        """All to whom we send something for a root's part."""
        parent = self.parent(root)
        if parent is not None:
            return (parent,)
        return tuple(self._routes.partner(self.me, level) for level in range(self.levels))

    def weight(self, root: PeerId, level: int) -> int:
        """Of what we send."""
        return self._routes.traded_weight(self.me, level - 1) if level else self._routes.weight(self.me, root)

    def _below(self, root: PeerId) -> Station:
        return Station.of({peer: self._routes.weight(peer, root) for peer in self._routes.children(self.me, root)})

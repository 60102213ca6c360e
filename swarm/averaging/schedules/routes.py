"""A schedule laid over the members of one round: who sends what to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from swarm.averaging.schedules import Schedule
from swarm.errors import BugError
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class _Tree:
    """One root's: who is below each member that is no leaf, how far the root is, and the weight of each member with
    all that is below it."""

    children: Mapping[PeerId, tuple[PeerId, ...]]
    depths: Mapping[PeerId, int]
    weights: Mapping[PeerId, int]


@dataclass(frozen=True, eq=False)
class Routes:
    """Trees over ``members``, which are in rank order: members that stand side by side are near each other.

    ``shares`` say how much of the vector each member can reduce; who has none is a leaf and is asked by nobody.
    ``turn`` (the step) lets duties go round. The same from the same arguments everywhere. Raises BugError when nobody
    can reduce anything. Cost: O(K) for each root asked about, once; a tree is grown, which takes most of it, only for
    who has somebody below it there: a member is a leaf in all of a ``direct`` round's trees but its own.
    """

    schedule: Schedule
    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, int]
    shares: Mapping[PeerId, int]
    turn: int = 0

    def __post_init__(self) -> None:
        if not self._able:
            raise BugError("no member can reduce anything")

    @property
    def core(self) -> tuple[PeerId, ...]:
        """The members that may be asked, by rank."""
        return self._placed[: len(self._core)]

    @cached_property
    def roots(self) -> Mapping[PeerId, int]:
        """The reducers of parts, in rank order, with their shares of the vector."""
        ranks = self.schedule.roots(len(self._core), self.turn)
        roots = {self._placed[rank] for rank in ranks}
        return {peer: self.shares.get(peer, 0) if len(roots) > 1 else 1 for peer in self.members if peer in roots}

    @cached_property
    def levels(self) -> int:
        """The number of trades of each core member for each chunk; 0 where trees do it all."""
        return self.schedule.levels(len(self._core))

    def parent(self, peer: PeerId, root: PeerId) -> PeerId | None:
        """Return the member that a member asks for the root's part; None for a member that asks nobody."""
        above = self._placed[self.schedule.parent(self._rank[peer], self._rank[root], len(self._core))]
        return None if above == peer else above

    def children(self, peer: PeerId, root: PeerId) -> tuple[PeerId, ...]:
        """Return the members that ask a member for the root's part, in rank order."""
        return () if self._is_leaf(peer, root) else self._tree(root).children.get(peer, ())

    def depth(self, peer: PeerId, root: PeerId) -> int:
        """Hops from a member to where its tree ends."""
        return self._tree(root).depths[peer]

    def downwards(self, root: PeerId) -> tuple[PeerId, ...]:
        """All members, each after the one above it."""
        return tuple(self._tree(root).depths)

    def weight(self, peer: PeerId, root: PeerId) -> int:
        """Σ weights of a member and all below it in the root's tree: of what it sends up."""
        return self.weights[peer] if self._is_leaf(peer, root) else self._tree(root).weights[peer]

    def partner(self, peer: PeerId, level: int) -> PeerId:
        """With whom one of the core trades at a level."""
        return self._placed[self._rank[peer] ^ (1 << level)]

    def traded_weight(self, peer: PeerId, level: int) -> int:
        """Σ weights of what one of the core sends at a level."""
        block = self._rank[peer] >> level << level
        (root,) = self.roots
        return sum(self.weight(self._placed[rank], root) for rank in range(block, block + (1 << level)))

    @cached_property
    def hops(self) -> int:
        """Messages one after the other from the first to the last."""
        return 2 * max(max(self._tree(root).depths.values()) for root in self.roots) + self.levels

    @cached_property
    def _able(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self.members if self.shares.get(peer, 0) > 0)

    @cached_property
    def _core(self) -> tuple[PeerId, ...]:
        return tuple(self._able[rank] for rank in self.schedule.core(len(self._able)))

    @cached_property
    def _placed(self) -> tuple[PeerId, ...]:
        """The core, then the leaves; first those that a power of two has no place for, each beside its neighbour."""
        inside, able = set(self._core), set(self._able)
        beside = (peer for peer in self._able if peer not in inside)
        return (*self._core, *beside, *(peer for peer in self.members if peer not in able))

    @cached_property
    def _rank(self) -> Mapping[PeerId, int]:
        return {peer: rank for rank, peer in enumerate(self._placed)}

    @cached_property
    def _trees(self) -> dict[PeerId, _Tree]:
        return {}

    def _is_leaf(self, peer: PeerId, root: PeerId) -> bool:
        """Return whether nobody is below a member, as far as can be told without a tree or by the one that there is."""
        if root in self._trees:
            return peer not in self._trees[root].children
        mine, top, core = self._rank[peer], self._rank[root], len(self._core)
        return all(self.schedule.parent(rank, top, core) != mine for rank in range(len(self._placed)) if rank != mine)

    def _tree(self, root: PeerId) -> _Tree:
        if root not in self._trees:
            self._trees[root] = self._grow(root)
        return self._trees[root]

    def _grow(self, root: PeerId) -> _Tree:
        rank, core = self._rank[root], len(self._core)
        above = {peer: self._placed[self.schedule.parent(place, rank, core)] for peer, place in self._rank.items()}
        parents = {peer: up for peer, up in above.items() if up != peer}
        below: dict[PeerId, list[PeerId]] = {}
        for peer in self.members:
            if peer in parents:
                below.setdefault(parents[peer], []).append(peer)
        depths = {peer: 0 for peer in self.members if peer not in parents}
        order = list(depths)
        for peer in order:  # it grows while it is walked: breadth first
            if peer in below:
                depths |= dict.fromkeys(below[peer], depths[peer] + 1)
                order += below[peer]
        weights = dict(self.weights)
        for peer in reversed(order):
            if peer in below:
                weights[peer] += sum(weights[other] for other in below[peer])
        return _Tree({peer: tuple(those) for peer, those in below.items()}, depths, weights)

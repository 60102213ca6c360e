"""Replicas on a grid, grouped along one axis after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from swarm.averaging.strategies.groups import Group, left_of, ranked, shuffled
from swarm.averaging.strategies.random_groups import RandomGroups
from swarm.ids import PeerId

FULL_ENOUGH = 0.75
"""Share of cells that must be taken. Below, random groups mix better: published runs on 32 x 32 cells need 8.2 rounds
with the grid and 6.1 with random groups where half is taken, as many where 3/4 are, and 5.0 and 6.4 at 0.88."""
MOST_SKEW = 2
"""The longest side is at most so many times the shortest where that leaves no cell more empty: the groups of a flat
grid are nearly all replicas, or nearly none."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Replicas on a grid of ``dimensions`` nearly equal sides; round r groups those that differ in coordinate r mod d
    alone, so who was together is apart in the next.

    Mixes gradient sums where the grid is full, which it is whenever P is a product of nearly equal factors: then d
    rounds are exact, and what is left after k < d of them is (cells of the axes to come - 1)/(P-1). Mixes parameters or
    deltas at any P: on a grid with empty cells the places are drawn anew every d rounds, and below FULL_ENOUGH random
    groups of the same size take its place. A round costs a group of side M what `everyone` costs M replicas.
    Source: Moshpit SGD, arXiv 2103.03239, algorithm 1, for a roster that all know: a coordinate needs no
    matchmaking then.
    """

    dimensions: int = 2
    name: str = "grid"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """Along one axis. Steps have rounds of their own where the grid is full, else they go on with the axes."""
        sides = self.sides(len(replicas))
        if prod(sides) == len(replicas):
            return _along(ranked(replicas), sides, round % len(sides))
        if len(replicas) < FULL_ENOUGH * prod(sides):
            return RandomGroups(sides[0]).groups(replicas, step, round, seed)
        turn = step + round
        places = shuffled(replicas, seed, turn // len(sides))
        return _along(places, sides, turn % len(sides))

    def sides(self, replicas: int) -> tuple[int, ...]:
        """The grid's sides, the longest first; none is 1 unless all are. Fewest empty cells first, then the
        squarest."""
        if replicas < 4 or self.dimensions == 1:
            return (max(1, replicas),)
        return min(_grids(replicas, self.dimensions), key=lambda sides: (prod(sides), sides))

    def exact_after(self, replicas: int) -> int | None:
        """d rounds where the grid is full, else never."""
        sides = self.sides(replicas)
        return len(sides) if prod(sides) == replicas else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """As above where the grid is full. With empty cells it is what the axes leave, to the power of how often all
        had their turn: places drawn anew have forgotten the earlier ones."""
        sides = self.sides(replicas)
        if prod(sides) == replicas:
            return (prod(sides[min(rounds, len(sides)) :]) - 1) / max(1, replicas - 1)
        if replicas < FULL_ENOUGH * prod(sides):
            return RandomGroups(sides[0]).left_after(rounds, replicas)
        places = [PeerId(str(place)) for place in range(replicas)]
        axes = [_along(places, sides, axis) for axis in range(len(sides))]
        cycles, rest = divmod(rounds, len(sides))
        return left_of(axes, places) ** cycles * left_of(axes[:rest], places)


def _grids(replicas: int, dimensions: int) -> list[tuple[int, ...]]:
    """Grids with room for all, with no row too many."""
    least = max(2, int(replicas ** (1 / dimensions) / MOST_SKEW))
    if dimensions == 1:
        return [(replicas,)]
    found: list[tuple[int, ...]] = []
    for side in range(least, round(replicas ** (1 / dimensions)) + 2):
        rests = _grids(-(-replicas // side), dimensions - 1)
        found += [(*rest, side) for rest in rests if rest[-1] >= side and rest[0] <= MOST_SKEW * side]
    return found or [_even(replicas, dimensions)]


def _even(replicas: int, dimensions: int) -> tuple[int, ...]:
    side = 1
    while side**dimensions < replicas:
        side += 1
    return (side,) * dimensions


def _along(places: Sequence[PeerId], sides: tuple[int, ...], axis: int) -> tuple[Group, ...]:
    """Those whose coordinates differ in ``axis`` alone. The cell of place i has the digits of i in the radices
    ``sides``, the first changing fastest; members are in the order of their coordinate on the axis."""
    rows: dict[int, list[PeerId]] = defaultdict(list)
    below = prod(sides[:axis])
    for cell, peer in enumerate(places):
        rows[cell - (cell // below % sides[axis]) * below].append(peer)
    return tuple(Group(tuple(row)) for _, row in sorted(rows.items()))

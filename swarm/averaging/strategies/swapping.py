"""Strategies that change the groups each round: along a grid's axes, by lot, or along a few bits of the rank.

:class:`Grid` is the one to read first; it forms random groups, too, where too many of its cells are empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from swarm.averaging.strategies.groups import Group, in_groups, left_of, ranked, shuffled, square_root_size
from swarm.ids import PeerId

FULL_ENOUGH = 0.75
"""Share of cells that must be taken. Below, random groups mix better: published runs on 32 x 32 cells need 8.2 rounds
with the grid and 6.1 with random groups where half is taken, as many where 3/4 are, and 5.0 and 6.4 at 0.88."""
MAX_SKEW = 2
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
        """Return the same share as above if the grid is full. With empty cells it is the share that the axes leave, to
        the power of how often all had their turn: places drawn anew have forgotten the earlier ones."""
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
    least = max(2, int(replicas ** (1 / dimensions) / MAX_SKEW))
    if dimensions == 1:
        return [(replicas,)]
    found: list[tuple[int, ...]] = []
    for side in range(least, round(replicas ** (1 / dimensions)) + 2):
        rests = _grids(-(-replicas // side), dimensions - 1)
        found += [(*rest, side) for rest in rests if rest[-1] >= side and rest[0] <= MAX_SKEW * side]
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


# --- groups drawn by lot each round ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """All replicas dealt anew each round into groups of ``size`` (None: about √P), of sizes that differ by one at most.

    Mixes parameters or deltas. With r groups of P replicas a round leaves (r-1)/(P-1) of the disagreement, the mean
    squared distance from the mean, in expectation over the lot and whatever the disagreement is: the mean of all
    projections onto r groups has trace r and, by symmetry, one eigenvalue beside that of the mean.
    It needs no structure, so joins, losses and odd numbers cost nothing. Source: Moshpit SGD, arXiv 2103.03239, theorem
    3.2, whose bound is (r-1)/P + r/P².
    """

    size: int | None = None
    name: str = "random"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """Every (step, round) another lot."""
        return in_groups(shuffled(replicas, seed, step, round), self.count(len(replicas)))

    def count(self, replicas: int) -> int:
        """Return the number of groups."""
        return -(-replicas // (self.size or square_root_size(replicas)))

    def exact_after(self, replicas: int) -> int | None:
        """One round where one group holds all, else never."""
        return 1 if self.count(replicas) <= 1 else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """((r-1)/(P-1)) to the power of ``rounds``."""
        return ((self.count(replicas) - 1) / max(1, replicas - 1)) ** rounds


# --- groups along a few bits of the rank, and along the next few bits in the round after -----------------------------


@dataclass(frozen=True, slots=True)
class ButterflyGroups:
    """Round t groups the ranks that differ only in bits (t·g + i) mod G, i < g, of G = log2 P; groups have S = 2^g
    members (``size`` rounded down to a power of two; None: about √P).

    Mixes gradient sums where P is a power of two: all bits had their turn after ⌈G/g⌉ rounds, which are exact, and k
    rounds leave (2^(G - bits had) - 1)/(P-1). Where it is none, ranks beyond the largest power of two stand beside
    another one, in whose group they are, and ranks are drawn anew every ⌈G/g⌉ rounds; that mixes parameters or deltas.
    Source: WAGMA-SGD, arXiv 2005.00124, algorithm 1. Its printed shift is cumulative, which repeats bits where a window
    wraps around; here every bit's mask is made by itself.
    """

    size: int | None = None
    name: str = "butterfly-groups"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """The window of bits of this round. Steps have rounds of their own where that is exact, else they go on."""
        count = len(replicas)
        bits, width = self._bits(count), self._width(count)
        if count == 1 << bits:
            return _differing_in(ranked(replicas), bits, _window(round, bits, width))
        turn = step + round
        order = shuffled(replicas, seed, turn // -(-bits // width)) if bits else ranked(replicas)
        return _differing_in(order, bits, _window(turn % max(1, -(-bits // width)), bits, width))

    def exact_after(self, replicas: int) -> int | None:
        """⌈G/g⌉ where the number of replicas is a power of two, else never."""
        bits = self._bits(replicas)
        return max(1, -(-bits // self._width(replicas))) if replicas == 1 << bits else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """Return the same share as above if P is a power of two; else the share that the windows leave, to the power of
        how often all had their turn."""
        bits, width = self._bits(replicas), self._width(replicas)
        if replicas == 1 << bits:
            return float(((1 << max(0, bits - rounds * width)) - 1) / max(1, replicas - 1))
        order = [PeerId(str(rank)) for rank in range(replicas)]
        windows = [_differing_in(order, bits, _window(turn, bits, width)) for turn in range(-(-bits // width))]
        cycles, rest = divmod(rounds, len(windows))
        return left_of(windows, order) ** cycles * left_of(windows[:rest], order)

    def _bits(self, replicas: int) -> int:
        return max(0, replicas.bit_length() - 1)

    def _width(self, replicas: int) -> int:
        bits = self._bits(replicas)
        wanted = -(-bits // 2) if self.size is None else self.size.bit_length() - 1
        return max(1, min(wanted, bits))


def _window(turn: int, bits: int, width: int) -> int:
    """The mask of the bits whose turn it is."""
    mask = 0
    for one in range(width if bits else 0):
        mask |= 1 << (turn * width + one) % bits
    return mask


def _differing_in(order: Sequence[PeerId], bits: int, mask: int) -> tuple[Group, ...]:
    """Those whose rank, less the highest power of two, differs in the mask's bits alone."""
    together: dict[int, list[PeerId]] = defaultdict(list)
    for rank, peer in enumerate(order):
        together[rank & ((1 << bits) - 1) & ~mask].append(peer)
    return tuple(Group(tuple(peers)) for _, peers in sorted(together.items()))

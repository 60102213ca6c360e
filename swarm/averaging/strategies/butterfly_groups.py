"""Groups along a few bits of the rank, and along the next few bits in the round after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.averaging.strategies.groups import Group, left_of, ranked, shuffled
from swarm.ids import PeerId


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
            return _along(ranked(replicas), bits, _window(round, bits, width))
        turn = step + round
        order = shuffled(replicas, seed, turn // -(-bits // width)) if bits else ranked(replicas)
        return _along(order, bits, _window(turn % max(1, -(-bits // width)), bits, width))

    def exact_after(self, replicas: int) -> int | None:
        """⌈G/g⌉ where the number of replicas is a power of two, else never."""
        bits = self._bits(replicas)
        return max(1, -(-bits // self._width(replicas))) if replicas == 1 << bits else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """As above where P is a power of two; else what the windows leave, to the power of how often all had their
        turn."""
        bits, width = self._bits(replicas), self._width(replicas)
        if replicas == 1 << bits:
            return float(((1 << max(0, bits - rounds * width)) - 1) / max(1, replicas - 1))
        order = [PeerId(str(rank)) for rank in range(replicas)]
        windows = [_along(order, bits, _window(turn, bits, width)) for turn in range(-(-bits // width))]
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


def _along(order: Sequence[PeerId], bits: int, mask: int) -> tuple[Group, ...]:
    """Those whose rank, less the highest power of two, differs in the mask's bits alone."""
    together: dict[int, list[PeerId]] = defaultdict(list)
    for rank, peer in enumerate(order):
        together[rank & ((1 << bits) - 1) & ~mask].append(peer)
    return tuple(Group(tuple(peers)) for _, peers in sorted(together.items()))

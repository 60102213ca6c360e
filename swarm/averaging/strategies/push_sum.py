"""To one other a round: nobody waits for anybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi

from swarm.averaging.strategies.groups import shuffled
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class PushSum:
    """In round t the replica at place i sends half of its (sum, weight) to the one at i + 2^(t mod ⌈log2 P⌉): a
    directed exponential graph with one target each.

    Mixes parameters or deltas. What is sent and what is kept sum to what there was (columns of the mixing matrix sum to
    one), so Σ sums and Σ weights never change, and sum ÷ weight tends to the mean at every replica although nobody
    waits for what it is sent. Exact after log2 P rounds where P is a power of two; what k rounds leave is
    Σ_j Π_t cos²(π j 2^t / P) / (P-1) over j = 1 … P-1 when all go in step.
    Each replica sends the vector once a round. Source: stochastic gradient push, arXiv 1811.10792, section 3 and
    appendix A; Kempe, Dobra and Gehrke, FOCS 2003.
    """

    name: str = "push-sum"

    def target(self, peer: PeerId, replicas: Sequence[PeerId], step: int, seed: int) -> PeerId | None:
        """Whom ``peer`` sends to; None when it is alone. All replicas have another target in every round, and as many
        senders as targets."""
        places = shuffled(replicas, seed)
        if len(places) < 2:
            return None
        hops = 1 << (step % self.cycle(len(places)))
        return places[(places.index(peer) + hops) % len(places)]

    def cycle(self, replicas: int) -> int:
        """Rounds until the distances repeat: ⌈log2 P⌉."""
        return max(1, (replicas - 1).bit_length())

    def exact_after(self, replicas: int) -> int | None:
        """log2 P rounds where it is whole, and all go in step."""
        return self.cycle(replicas) if replicas & (replicas - 1) == 0 else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """As above. O(rounds · P)."""
        if replicas < 2:
            return 0.0
        cycle, total = self.cycle(replicas), 0.0
        for frequency in range(1, replicas):
            kept = 1.0
            for turn in range(rounds):
                kept *= cos(pi * frequency * (1 << turn % cycle) / replicas) ** 2
            total += kept
        return total / (replicas - 1)

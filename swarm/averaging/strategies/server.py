"""One replica reduces for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.averaging.strategies.groups import Group, ranked
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Server:
    """All replicas in one group in which a single one computes: mixes gradient sums, or parameters, exactly, in one
    round.

    For peers that can only dial out: they call the server, and nobody has to call them. ``reachable`` are those that
    may be it (empty: all); which of them changes with the step, so that no one carries every step. The others send and
    receive the vector once, the server (P-1) times, so a round takes (P-1)·n bytes of its link.
    Source: parameter server, Li et al., OSDI 2014.
    """

    reachable: Collection[PeerId] = ()
    name: str = "server"

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """One group; of the reachable replicas, or of all where none is, the next one reduces in each step."""
        members = ranked(replicas)
        if not members:
            return ()
        able = [peer for peer in members if peer in self.reachable] or list(members)
        return (Group(members, reducers=(able[(seed + step) % len(able)],)),)

    def exact_after(self, replicas: int) -> int:
        """One round."""
        return 1

    def left_after(self, rounds: int, replicas: int) -> float:
        """Nothing, once there was a round."""
        return 0.0 if rounds else 1.0

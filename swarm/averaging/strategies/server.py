"""One replica reduces for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.averaging.strategies.groups import Group, able_to_reduce, ranked
from swarm.ids import PeerId


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

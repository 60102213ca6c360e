"""One group of all, in which another one reduces nothing in each turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.averaging.strategies.groups import Group, able_to_reduce, ranked
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Plain:
    """All replicas in one group: exact after a single round, whatever the manifest's strategy is. For rounds that break
    again and again, and no manifest can ask for it.

    In each ``turn`` another member has nothing to reduce. So what breaks a round shows to others than before, and
    whoever gives one member another result than the rest does so in all turns but one, in which the round is good.
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

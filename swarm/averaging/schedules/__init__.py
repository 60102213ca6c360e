"""The routes of one round's sums: the schedules and their interface."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

from swarm.averaging.schedules.patterns import Butterfly, Direct, Halving, Ring, Tree

ScheduleName = Literal["direct", "ring", "tree", "halving", "butterfly"]


class Schedule(Protocol):
    """A tree over the members for each part of the vector: a member adds the sums of those below it to its own, asks
    the one above with it, and is answered with the result, which it passes on to those below.

    Pure functions of ranks. Ranks below ``core`` may be asked; those from there on are leaves, which only ask: members
    that can only dial out, that nobody trusts yet, or whose link is too slow to carry others.
    """

    @property
    def name(self) -> ScheduleName:
        """Its name in the manifest."""

    def core(self, able: int) -> tuple[int, ...]:
        """Return the core of so many members that may be asked (at least one); the others are leaves too."""

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """The ranks that reduce a part each, at ``turn``, ascending."""

    def parent(self, rank: int, root: int, core: int) -> int:
        """Return the member that a member asks for the root's part; itself when it asks nobody."""

    def levels(self, core: int) -> int:
        """Return how often each member of the core, whose size is a power of two then, trades sums with the member
        across the next bit of its rank, before it divides the result itself; 0 where trees do it all."""


SCHEDULES: Mapping[ScheduleName, Schedule] = MappingProxyType(
    {schedule.name: schedule for schedule in (Direct(), Ring(), Tree(), Halving(), Butterfly())}
)
"""All schedules, by the name the manifest gives them. Of those that cost the same the first is best."""

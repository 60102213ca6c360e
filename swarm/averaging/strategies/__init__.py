"""The groups in which replicas average: the strategies and their interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from swarm.averaging.strategies.exact import Everyone, Hierarchy, Server
from swarm.averaging.strategies.groups import Group as Group
from swarm.averaging.strategies.swapping import ButterflyGroups, Grid, RandomGroups
from swarm.ids import PeerId


class Strategy(Protocol):
    """A pure function (replicas, step, round, seed) → groups; its docstring states what is mixed and how fast.

    ``replicas`` is a part's slice of the roster. Every replica computes the same groups from the same arguments,
    without a message: no matchmaking, hence no disagreement about who is in.
    """

    @property
    def name(self) -> str:
        """Its name in the manifest."""

    def groups(self, replicas: Sequence[PeerId], step: int, round: int, seed: int) -> tuple[Group, ...]:
        """Disjoint groups that cover ``replicas`` exactly. No replicas, no groups. Raises BugError for a duplicate."""

    def exact_after(self, replicas: int) -> int | None:
        """Rounds after which all replicas hold the exact mean; None when they only approach it."""

    def left_after(self, rounds: int, replicas: int) -> float:
        """Return the share that these rounds leave of the mean squared distance from the mean, in expectation, when the
        replicas differ by independent noise; as theory has it."""


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (Everyone(), Grid(), ButterflyGroups(), RandomGroups(), Server(), Hierarchy())
    }
)
"""All strategies that group, by the name the manifest gives them."""

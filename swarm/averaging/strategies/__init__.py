"""The groups in which replicas average: the strategies and their interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from swarm.averaging.strategies.exact import Everyone, Hierarchy, Plain, Server
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


class Site(Protocol):
    """A replica's statement of its location, such as a roster's member."""

    @property
    def region(self) -> str:
        """Its region, in its owner's words; "" for none, which is a region too."""

    @property
    def outgoing(self) -> bool:
        """It calls others, and they shall not have to call it."""


def plainest(turn: int, sites: Mapping[PeerId, Site]) -> Strategy:
    """For rounds that break again and again: see :class:`~swarm.averaging.strategies.exact.Plain`."""
    return Plain(turn, frozenset(peer for peer, site in sites.items() if site.outgoing))


def strategy_at(name: str, sites: Mapping[PeerId, Site]) -> Strategy:
    """The strategy of this name among replicas that are at these sites. A hierarchy of a single region, or of regions
    of one replica each, is one round of all. Raises KeyError for a name that there is not."""
    outgoing = frozenset(peer for peer, site in sites.items() if site.outgoing)
    if name == "server":
        return Server(outgoing)
    if name == "hierarchy":
        regions = {peer: site.region for peer, site in sites.items()}
        flat = len(set(regions.values())) in (0, 1, len(regions))
        return STRATEGIES["everyone"] if flat else Hierarchy(regions, outgoing)
    return STRATEGIES[name]

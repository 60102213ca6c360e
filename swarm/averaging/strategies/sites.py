"""Locations of replicas, as far as groups depend on them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from swarm.averaging.strategies import STRATEGIES, Strategy
from swarm.averaging.strategies.exact import Hierarchy, Plain, Server
from swarm.ids import PeerId


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

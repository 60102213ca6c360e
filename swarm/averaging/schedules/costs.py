"""Compute a schedule's cost for the members of a round: bytes and messages exactly, seconds as estimated from links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from swarm.averaging.allreduce.partition import part_bounds
from swarm.averaging.schedules.routes import Routes
from swarm.ids import PeerId

MESSAGE_S = 0.0005
"""What one call costs the processor of each side: 0.3 ms in memory, some 1 ms through the daemon."""
SITE_LATENCY_S = 0.0005
"""One way between two members of one site, at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Measurements of one member's link: median seconds of a message one way to the others; bytes a second, up and down
    alike; and its site, whose members share the link out of it."""

    latency_s: float
    bytes_per_s: int
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """The averaged vector: ``item_bytes`` are those of an element of a sum on the wire, ``result_bytes`` of the
    result."""

    elements: int
    item_bytes: int = 4
    result_bytes: int = 4
    chunk_elements: int = 1 << 16


@dataclass(slots=True)
class Load:
    """The load of a round on its members. ``calls`` by caller and target, ``sent`` bytes by sender and receiver."""

    calls: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)
    sent: Counter[tuple[PeerId, PeerId]] = field(default_factory=Counter)

    def bytes_of(self, peer: PeerId) -> tuple[int, int]:
        """Return the bytes that a member sends and receives."""
        return (
            sum(count for (source, _), count in self.sent.items() if source == peer),
            sum(count for (_, target), count in self.sent.items() if target == peer),
        )


def load(routes: Routes, vector: Vector) -> Load:
    """Payload bytes and chunk calls between all pairs; entering and signing off are the same with every schedule and
    left out. O(members · roots)."""
    load = Load()
    roots = list(routes.roots)
    for root, (start, stop) in zip(roots, part_bounds(vector.elements, list(routes.roots.values())), strict=True):
        elements = stop - start
        for peer in routes.members:
            parent = routes.parent(peer, root)
            if parent is not None:
                _ask(load, routes.weight(peer, root), (peer, parent), elements, vector)
    for level in range(routes.levels):
        for peer in routes.core:
            pair = peer, routes.partner(peer, level)
            load.calls[pair] += _chunks(vector.elements, vector)
            load.sent[pair] += vector.elements * vector.item_bytes if routes.traded_weight(peer, level) else 0
    return load


def _ask(load: Load, weight: int, pair: tuple[PeerId, PeerId], elements: int, vector: Vector) -> None:
    load.calls[pair] += _chunks(elements, vector)
    load.sent[pair] += elements * vector.item_bytes if weight else 0
    load.sent[pair[1], pair[0]] += elements * vector.result_bytes


def _chunks(elements: int, vector: Vector) -> int:
    return -(-elements // vector.chunk_elements)


def seconds(routes: Routes, vector: Vector, links: Mapping[PeerId, LinkCost]) -> float:
    """Return the seconds of a round from its first sum to its last result, when all begin at once: the latency of its
    longest path, the messages of the busiest member, the bytes of the busiest link, and a chunk on each hop before the
    ways are full (the alpha-beta model of Hockney, 1994, with a price per message, and links in place of pairs).

    The members of a site share the fastest of their links for what crosses its border. Deterministic: only + - × ÷.
    """
    asked = load(routes, vector)
    messages: Counter[PeerId] = Counter()
    for (caller, target), calls in asked.calls.items():
        messages[caller] += calls
        messages[target] += calls
    chunk_bytes = min(vector.chunk_elements, -(-vector.elements // len(routes.roots))) * vector.item_bytes
    slowest = min(link.bytes_per_s for link in links.values())
    return (
        _latency_s(routes, links)
        + MESSAGE_S * max(messages.values(), default=0)
        + max(_busy_s(asked, links), default=0.0)
        + routes.hops * chunk_bytes / slowest
    )


def _busy_s(asked: Load, links: Mapping[PeerId, LinkCost]) -> Iterator[float]:
    """Return the seconds for which each direction of each link, and each site's, carries bytes."""
    flows: Counter[tuple[str, str]] = Counter()
    rates: Counter[str] = Counter()
    sites = {peer: f"site {link.site}" for peer, link in links.items()}
    for peer, link in links.items():
        rates[sites[peer]] = max(rates[sites[peer]], link.bytes_per_s)
        rates[peer] = link.bytes_per_s
    for (source, target), count in asked.sent.items():
        flows["up", source] += count
        flows["down", target] += count
        if sites[source] != sites[target]:
            flows["up", sites[source]] += count
            flows["down", sites[target]] += count
    for (_, way), count in flows.items():
        yield count / rates[way]


def _latency_s(routes: Routes, links: Mapping[PeerId, LinkCost]) -> float:
    """Return the latency of the longest path, there and back."""
    longest = 0.0
    for root in routes.roots:
        arrived: dict[PeerId, float] = {}
        for peer in routes.downwards(root):
            parent = routes.parent(peer, root)
            arrived[peer] = 0.0 if parent is None else arrived[parent] + _hop_s(links[peer], links[parent])
        longest = max(longest, 2 * max(arrived.values()))
    return longest + math.fsum(_level_s(routes, level, links) for level in range(routes.levels))


def _level_s(routes: Routes, level: int, links: Mapping[PeerId, LinkCost]) -> float:
    return max(_hop_s(links[peer], links[routes.partner(peer, level)]) for peer in routes.core)


def _hop_s(one: LinkCost, other: LinkCost) -> float:
    between = (one.latency_s + other.latency_s) / 2
    return min(between, SITE_LATENCY_S) if one.site and one.site == other.site else between

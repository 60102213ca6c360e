"""Which peers are on one machine, as those say that were started together. Pure.

A machine is one vote and one death, however many devices it has. Nobody can prove where it runs, so this holds nobody
to the truth: it lets who started several peers say so. And it counts only where both say it of each other, so that a
stranger who names a peer takes neither its vote nor its copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm.ids import PeerId
from swarm.schema import ID_TAIL


def tail(peer: str) -> str:
    """Return the end of an id, by which peers name those next to them."""
    return peer[-ID_TAIL:]


def machines_of(said: Mapping[PeerId, Collection[str]]) -> Mapping[PeerId, PeerId]:
    """Return by peer the first, by id, of those on its machine, itself included.

    Args:
        said: By peer the tails of those that it says are next to it.
    """
    by_tail = {tail(peer): peer for peer in said}

    def together(peer: PeerId) -> list[PeerId]:
        named = (by_tail[other] for other in said[peer] if other in by_tail)
        return [other for other in named if tail(peer) in said[other]]

    return {peer: min((peer, *together(peer))) for peer in said}

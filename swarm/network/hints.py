"""What we were told about where peers can be dialled: by the invite, the roster, the directory. Never proof."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import multiaddr
from multiaddr import Multiaddr

from swarm.ids import PeerId
from swarm.network.addresses import is_loopback, is_relayed, split_peer


class Hints:
    """The last addresses told for each peer, without their ``/p2p`` part."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: dict[PeerId, tuple[Multiaddr, ...]] = {}

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Replace what is known of a peer. Addresses that cannot be read or name another peer are ignored: they come
        from other peers."""
        parsed = []
        for text in addresses:
            with contextlib.suppress(ValueError, LookupError, multiaddr.exceptions.Error):
                address, named = split_peer(Multiaddr(text))
                if named == peer:
                    parsed.append(address)
        if parsed and peer != self._me:
            self._known[peer] = tuple(parsed)

    def of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Where to dial a peer; empty when nothing is known."""
        return self._known.get(peer, ())

    def dialable(self) -> list[PeerId]:
        """Peers that tell addresses of their own, and not only of their machine: those who could relay."""
        return [
            peer
            for peer, known in self._known.items()
            if not any(map(is_relayed, known)) and not all(map(is_loopback, known))
        ]

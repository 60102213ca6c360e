"""What we were told about where peers can be dialled: by the invite, the roster, the directory. Never proof."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import multiaddr
from multiaddr import Multiaddr

from swarm.ids import PeerId
from swarm.network.addresses import is_loopback, is_relayed, split_peer

MAX_PEERS = 4096
MAX_PER_PEER = 16


class Hints:
    """The last addresses told for each peer, without their ``/p2p`` part: of the 4096 peers that were last told of or
    asked for, at most 16 each."""

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
            self._known.pop(peer, None)
            self._known[peer] = tuple(parsed[:MAX_PER_PEER])
            if len(self._known) > MAX_PEERS:
                del self._known[next(iter(self._known))]

    def of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Where to dial a peer; empty when nothing is known."""
        if (known := self._known.pop(peer, None)) is None:
            return ()
        self._known[peer] = known  # the last to be forgotten now
        return known

    def dialable(self) -> list[PeerId]:
        """Peers that tell addresses of their own, and not only of their machine: those who could relay."""
        return [
            peer
            for peer, known in self._known.items()
            if not any(map(is_relayed, known)) and not all(map(is_loopback, known))
        ]

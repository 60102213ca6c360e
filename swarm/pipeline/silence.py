"""Which replicas have fallen silent, as one trainer sees it: what one journey finds out holds for all of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from swarm.ids import PeerId


class Silence:
    """A replica that let a whole turn pass and meanwhile said nothing, about any microbatch, is late with everything:
    no other turn there is waited for to its end, until it is heard of or tried again. Who is merely slow with one
    microbatch goes on telling of others. Times are monotonic seconds; memory is a number per replica."""

    def __init__(self) -> None:
        self._heard: dict[PeerId, float] = {}
        self._silent: set[PeerId] = set()

    def __contains__(self, peer: object) -> bool:
        return peer in self._silent

    def heard(self, peer: PeerId, now: float) -> None:
        """It said something, whatever that was."""
        self._heard[peer] = now
        self._silent.discard(peer)

    def passed(self, peer: PeerId, since: float) -> bool:
        """A turn that began at ``since`` has passed. Whether it is news that the peer is silent."""
        if peer in self._silent or self._heard.get(peer, -math.inf) >= since:
            return False
        self._silent.add(peer)
        return True

    def lost(self, peer: PeerId) -> None:
        """Its connection broke."""
        self._silent.add(peer)

    def tried(self, peer: PeerId) -> None:
        """It is given a microbatch again, and the time for it."""
        self._silent.discard(peer)

    def follow(self, peers: Collection[PeerId]) -> None:
        """Forget everybody else."""
        self._heard = {peer: at for peer, at in self._heard.items() if peer in peers}
        self._silent &= set(peers)

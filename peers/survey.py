"""What the members of a run say about it, one by one, to a peer that has yet to choose its place."""

from __future__ import annotations

import asyncio

from swarm.errors import PeerError
from swarm.ids import ENDS, PeerId
from swarm.network.protocols import Endpoint
from swarm.optimization.observation import STANDING, RunStanding, StandingRequest
from swarm.optimization.roster import Roster

STANDING_TIMEOUT_S = 5.0
MOST_ASKED = 4
"""How many others are asked for what any member knows, when the contact does not answer."""
MOST_HOSTS = 16
"""How many stage hosts are asked whether they are about to leave."""


class Survey:
    """Asks through our ``endpoint``. Raises no PeerError: who does not answer says nothing."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def lost(self, roster: Roster, contact: PeerId | None) -> tuple[str, ...]:
        """The parts that nobody holds any more, as the contact sees it, or the first member that answers."""
        others = [peer for peer in roster.peers if peer not in (self._endpoint.peer, contact)]
        for peer in [*filter(None, [contact]), *others[:MOST_ASKED]]:
            standing = await self._ask(peer)
            if standing is not None:
                return standing.lost
        return ()

    async def leaving(self, roster: Roster) -> set[PeerId]:
        """The stage hosts that have been asked to leave and are in the run yet, as each says itself: those of the
        stages with the fewest replicas, where it matters most. Cost: one question to each, all at once."""
        stages = sorted((roster.replicas(part) for part in roster.parts if part != ENDS), key=len)
        asked = [peer for held in stages for peer in held if peer != self._endpoint.peer][:MOST_HOSTS]
        standings = zip(asked, await asyncio.gather(*map(self._ask, asked)), strict=True)
        return {peer for peer, standing in standings if standing is not None and standing.leaving}

    async def _ask(self, peer: PeerId) -> RunStanding | None:
        try:
            standing, _ = await self._endpoint.call(
                peer, STANDING, StandingRequest(), RunStanding, timeout_s=STANDING_TIMEOUT_S
            )
        except PeerError:
            return None
        return standing

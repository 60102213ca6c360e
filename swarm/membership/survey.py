"""Ask about a run before taking part in it: the contact through which this peer came, and the members one by one.

:class:`FirstContact` also says what the loss of the contact means; :class:`Survey` helps a peer choose its place.
"""

from __future__ import annotations

import asyncio

from swarm.clock import Clock
from swarm.consensus.roster import Roster
from swarm.errors import Advice, DeadlineMissed, Ending, PeerError, RunEnded, Unreachable
from swarm.ids import ENDS, PeerId
from swarm.membership.contact import ask_standing
from swarm.network.protocols import Endpoint
from swarm.step.observe_messages import STANDING, RunStanding, StandingRequest


class FirstContact:
    """``peer`` is the contact, ``founder`` whose run it is; often the same."""

    def __init__(self, endpoint: Endpoint, clock: Clock, peer: PeerId, founder: PeerId) -> None:
        self._endpoint, self._clock = endpoint, clock
        self.peer, self._founder = peer, founder
        self._began: bool | None = None

    async def standing(self) -> RunStanding:
        """Where the run stands. Raises RunEnded when the contact is gone, its last error when it never answers."""
        try:
            standing = await ask_standing(self._endpoint, self._clock, self.peer)
        except (Unreachable, DeadlineMissed) as error:
            raise self.gone(error.reason) from error
        self._began = standing.closed is not None
        return standing

    def gone(self, reason: str) -> RunEnded:
        """The error of a peer that has nobody to begin with any more: there is nothing here to go on with."""
        if self._began is not False:
            return RunEnded(
                f"the contact ({self.peer}) is gone before this peer took part: {reason}",
                Ending.UNREACHABLE,
                check="is that peer running, or is the run over? Can this machine reach it?",
                remedy=Advice.JOIN_ANEW,
            )
        if self.peer != self._founder:
            return RunEnded(
                f"the contact ({self.peer}) is gone, and the run has not begun: {reason}",
                Ending.UNREACHABLE,
                check=f"does its founder ({self._founder}) wait for others still? The start needs no other contact.",
                remedy=Advice.JOIN_FOUNDER,
            )
        return RunEnded(
            f"the run's founder ({self.peer}) is gone, and the run never began: {reason}",
            Ending.UNREACHABLE,
            check="nothing is lost: nobody had learned anything. Does its founder mean to start it again?",
            remedy=Advice.FOUND_AGAIN,
        )


# --- survey of the members -------------------------------------------------------------------------------------------


STANDING_TIMEOUT_S = 5.0
MAX_ASKED = 4
"""How many others are asked for what any member knows, when the contact does not answer."""
MAX_HOSTS = 16
"""How many stage hosts are asked whether they are about to leave."""


class Survey:
    """Asks through our ``endpoint``. Raises no PeerError: who does not answer says nothing."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def lost(self, roster: Roster, contact: PeerId | None) -> tuple[str, ...]:
        """The parts that nobody holds any more, as the contact sees it, or the first member that answers."""
        others = [peer for peer in roster.peers if peer not in (self._endpoint.peer, contact)]
        for peer in [*filter(None, [contact]), *others[:MAX_ASKED]]:
            standing = await self._ask(peer)
            if standing is not None:
                return standing.lost
        return ()

    async def leaving(self, roster: Roster) -> set[PeerId]:
        """The stage hosts that have been asked to leave and are in the run yet, as each says itself: those of the
        stages with the fewest replicas, where it matters most. Cost: one question to each, all at once."""
        stages = sorted((roster.replicas(part) for part in roster.parts if part != ENDS), key=len)
        asked = [peer for held in stages for peer in held if peer != self._endpoint.peer][:MAX_HOSTS]
        standings = zip(asked, await asyncio.gather(*map(self._ask, asked)), strict=True)
        return {peer for peer, standing in standings if standing is not None and standing.leaving}

    async def _ask(self, peer: PeerId) -> RunStanding | None:
        try:
            standing, _ = await self._endpoint.call(peer, STANDING, StandingRequest(), timeout_s=STANDING_TIMEOUT_S)
        except PeerError:
            return None
        return standing

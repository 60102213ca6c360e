"""The peer through which this one came: what it says of the run until this one takes part, and what its loss means."""

from __future__ import annotations

from peers.contact import ask_standing
from swarm.clock import Clock
from swarm.errors import Advice, DeadlineMissed, Ending, RunEnded, Unreachable
from swarm.ids import PeerId
from swarm.network.protocols import Endpoint
from swarm.optimization.observation import RunStanding


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

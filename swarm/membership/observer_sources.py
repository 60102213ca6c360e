"""Choose who helps an observer: the replica that leads it from step to step, and one that could take its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarm.consensus.records import CloseRecord
from swarm.errors import OutOfSync, PeerError
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Endpoint
from swarm.step.observe_messages import LEAVE, STAY, LeaveRequest, StayRequest
from swarm.waiting import ExponentialBackoff

STAND_INS = 1
"""Each keeps 4 bytes a parameter and step for us, for nothing if the first lives; without one, its death means to
download the state again."""
STAY_S = 5.0
LEAVE_S = 2.0

logger = logging.getLogger(__name__)


class UpdateSources:
    """The first leads, the others keep the same updates. Without a part (``name`` None) anybody can lead."""

    def __init__(self, endpoint: Endpoint, name: PartName | None) -> None:
        self._endpoint, self._name = endpoint, name
        self._peers: tuple[PeerId, ...] = ()
        self._dropped: set[PeerId] = set()
        self._had = 0

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """All of them, in the order in which they are asked."""
        return self._peers

    @property
    def first(self) -> PeerId:
        """Return who leads. Raises OutOfSync when nobody does."""
        if not self._peers:
            raise OutOfSync("nobody is left to observe the run with")
        return self._peers[0]

    def set(self, peers: Sequence[PeerId]) -> None:
        """These keep our state, and every update from it on."""
        self._peers = tuple(peers)

    def drop(self, peer: PeerId) -> None:
        """It failed: never ask it again."""
        self._dropped.add(peer)
        self._peers = tuple(other for other in self._peers if other != peer)

    async def keep(self, head: CloseRecord) -> None:
        """See to it that a stand-in is there, which has all updates after ``head``; who helped us before and is not
        needed any more is told so. Never raises a PeerError: without a stand-in one goes on, too."""
        if self._name is None:
            return
        others, self._had = self._peers[1:], head.step
        staying = dict(zip(others, await asyncio.gather(*map(self._stays, others)), strict=True))
        for peer in others:
            if staying[peer] is None:
                self.drop(peer)
        here = [peer for peer in others if staying[peer] is not None]
        kept, spare = here[:STAND_INS], here[STAND_INS:]
        self._peers = tuple(peer for peer in self._peers if peer not in spare)
        await self._tell(spare)
        if len(kept) < STAND_INS:
            await self._recruit(head)

    async def stay(self) -> None:
        """Renew the stand-ins' promise while a step takes long."""
        if self._name is not None:
            await asyncio.gather(*map(self._stays, self._peers[1:]))

    async def leave(self) -> None:
        """Nobody needs to keep anything for us any more. Takes at most LEAVE_S and never raises a PeerError."""
        if self._name is not None:
            await self._tell(self._peers)

    async def _recruit(self, head: CloseRecord) -> None:
        """One more replica, if there is one that has not closed another step yet: it keeps what comes after."""
        assert self._name is not None  # noqa: S101 - asked before
        known = {self._endpoint.peer, *self._peers, *self._dropped}
        for peer in head.members.replicas(self._name):
            if peer not in known:
                closed = await self._stays(peer)
                if closed is None:
                    self._dropped.add(peer)
                elif closed <= head.step:
                    self._peers = (*self._peers, peer)
                    return
                else:  # we are behind: what it keeps leaves out what we need next
                    await self._tell((peer,))

    async def _stays(self, peer: PeerId) -> int | None:
        """The step after which it keeps updates for us; None when it does not."""
        assert self._name is not None  # noqa: S101 - asked before
        try:
            body = StayRequest(part=self._name, had=self._had)
            staying, _ = await self._endpoint.call(peer, STAY, body, timeout_s=STAY_S)
        except PeerError as error:
            logger.info("%s does not stand in: %s", peer, error)
            return None
        return staying.closed

    async def _tell(self, peers: Sequence[PeerId]) -> None:
        assert self._name is not None  # noqa: S101 - asked before
        body = LeaveRequest(part=self._name)
        calls = (self._endpoint.call(peer, LEAVE, body, timeout_s=LEAVE_S) for peer in peers)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, PeerError):
                raise outcome


# --- how long one guide is waited for, and when another should be asked (pure) ---------------------------------------


PATIENCE_S = 10.0
"""How long one question may take. A step may take longer: then it is asked again. So may the update of a large part
over a thin link: then it is given twice the time."""
LONGEST_PATIENCE_S = 64 * PATIENCE_S
"""No update is given longer: anyone who needs that for one step's update will never keep up with the run."""
MAX_IDLE = 2
"""So often an update is given twice the time though it does not come at a pace that would bring it in the longest: it
may have been closed just now, or wait behind other tensors."""


class UpdateTimeout:
    """With the guide that is asked. What a thin link was found to need is kept from step to step, and forgotten with
    the guide: a dead one that follows must be noticed soon."""

    def __init__(self) -> None:
        self._guide: PeerId | None = None
        self._idle = 0
        self._time = ExponentialBackoff(PATIENCE_S, LONGEST_PATIENCE_S)

    @property
    def seconds(self) -> float:
        """Return how long the next question may take."""
        return self._time.next_s

    def begin(self, guide: PeerId) -> None:
        """Something else is asked now, of ``guide``."""
        if guide != self._guide:
            self._guide = guide
            self._time.restart()
        self._idle = 0

    def late(self, waited_s: float, brought: int, size: int) -> str:
        """The guide has the update of ``size`` bytes, and in ``waited_s`` only ``brought`` bytes of whatever came from
        it. Why another should be asked, "" when this one is given twice the time."""
        comes = brought > 0 and brought * LONGEST_PATIENCE_S >= size * waited_s
        self._idle = 0 if comes else self._idle + 1
        if self._idle > MAX_IDLE:
            return f"{brought} of {size} bytes in {waited_s:g} s"
        if self.seconds >= LONGEST_PATIENCE_S:
            return f"not in {self.seconds:g} s"
        self._time.pause_s()
        return ""

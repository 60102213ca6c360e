"""The ways into a run: found it, be in its genesis, join it in progress, or come back when it went on without us."""

from __future__ import annotations

import asyncio
import contextlib

from swarm.errors import Ending, PeerError, RunEnded
from swarm.events import CutOff
from swarm.ids import PeerId
from swarm.membership.following import Following
from swarm.membership.founder import Founder
from swarm.membership.holding import RoleManager
from swarm.membership.joining import Joining
from swarm.membership.roles import insist_on_being_reached
from swarm.membership.run import RunContext
from swarm.membership.survey import FirstContact
from swarm.network.discovery.records import PeerRecord
from swarm.step.observe_messages import RunStanding
from swarm.waiting import ended

WAITING_S = 1.0
"""How often a peer that waits for the genesis asks how far it is."""


class Entering:
    """One peer's ways in. ``founder`` is None for a peer that does not found the run."""

    def __init__(
        self,
        run: RunContext,
        contact: FirstContact,
        founder: Founder | None,
        holding: RoleManager,
        following: Following,
        joining: Joining,
    ) -> None:
        self._run, self._around, self._at = run, run.around, run.position
        self._contact, self._founder, self._holding = contact, founder, holding
        self._following, self._joining = following, joining

    async def begin(self) -> None:
        """Return when this peer is in the roster. Raises RunEnded when it cannot be."""
        if self._founder is not None:
            await self._found(self._founder)
            return
        await self._be_reached()
        while not self._at.is_member:
            standing = await self._asked()
            if standing is None:
                break
            if standing.closed is not None and not self._holding.ready.is_set():
                await self._joining.run(self._contact.peer)
                return
            if standing.closed is not None and self._replaced(standing.closed):
                self._following.start_over()
                await self._joining.again(self._holding.part, None, self._contact.peer)
                return
            if standing.closed is None and not self._at.is_member:
                self._run.situation.wait_for(standing.waiting_for or "the run to start")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAITING_S):
                    await self._at.wait_member()
        await self._around.be_reachable(self._at.roster.peers)  # others than those through which it came know now

    async def _asked(self) -> RunStanding | None:
        """Where the run stands; None once this peer is a member, and needs to ask nobody."""
        told = asyncio.create_task(self._contact.standing(self._run.situation.wait_for))
        named = asyncio.create_task(self._at.wait_member())
        try:
            await asyncio.wait((told, named), return_when=asyncio.FIRST_COMPLETED)
            return told.result() if told.done() else None
        finally:
            await ended((told, named))

    def _replaced(self, closed: int) -> bool:
        """Whether the run began, and went on, without us who had taken our part in another founding record."""
        state = self._at.open
        accepted = None if self._at.head is not None or state.closing is not None else state.ballot.vote
        return accepted is not None and closed > accepted.record.step

    async def _found(self, founder: Founder) -> None:
        with founder.expecting():
            await founder.found(self._run.settings.patience_s, self._run.situation.wait_for)
            await self._at.wait_member()  # our own close may take longer than the others'
        await self._around.be_reachable(self._at.roster.peers)  # now there is somebody to ask

    async def _be_reached(self) -> None:
        """Before anybody counts on us. Whoever is in the directory may relay for us."""
        if await self._around.be_reachable((self._run.contact,)):
            records: dict[PeerId, PeerRecord] = {}
            with contextlib.suppress(PeerError):
                records = await self._run.directory.lookup(PeerRecord)
            for peer, record in records.items():
                self._around.endpoint.learn(peer, record.addresses)
            await insist_on_being_reached(self._around, tuple(records))

    async def again(self) -> None:
        """Get the newest state from others, and be let in again, where the run went on without us. Raises RunEnded when
        nobody is left who could help, or when it is over."""
        at, reason = self._at, self._at.cut_off
        self._around.events.emit(CutOff(step=at.open_step, reason=reason))
        self._following.start_over()
        if at.forking.given_up is not None:
            self._holding.rewound()
        known, others = at.forking.helpers(at.head)
        if not others:
            raise RunEnded(
                f"the run went on without this peer, which knows of nobody else in it: {reason}", Ending.UNREACHABLE
            )
        self._run.situation.wait_for(f"a member that can help to come back: {reason}")
        await self._joining.again(self._holding.part, known, None if self._run.founds else self._run.contact)

"""The ways into a run: found it, be in its genesis, join it in progress, or come back when it went on without us."""

from __future__ import annotations

import asyncio
import contextlib

from swarm.errors import Ending, PeerError, RunEnded
from swarm.events import CutOff, ResidualLost, WentBack
from swarm.ids import PartName, PeerId
from swarm.membership.following import Following
from swarm.membership.founder import Founder
from swarm.membership.going_back import Checkpoints
from swarm.membership.holding import RoleManager
from swarm.membership.joining import Joining
from swarm.membership.roles import insist_on_being_reached
from swarm.membership.run import RunContext
from swarm.membership.survey import FirstContact
from swarm.network.discovery.records import PeerRecord
from swarm.step.member.member_service import MemberService
from swarm.step.observe_messages import RunStanding
from swarm.waiting import ended

WAITING_S = 1.0
"""How often a peer that waits for the genesis asks how far it is."""


class Returning:
    """One peer's way into a chain that begins where the run went back to a checkpoint."""

    def __init__(
        self, run: RunContext, checkpoints: Checkpoints, following: Following, member: MemberService, joining: Joining
    ) -> None:
        self._run, self._checkpoints = run, checkpoints
        self._following, self._member, self._joining = following, member, joining

    async def begin(self) -> None:
        """Hold what the record gives this peer, as it was then, and return when it is a member; where it names another
        life of it, or none, join again. Raises RunEnded when it cannot be."""
        run, decision, me = self._run, self._run.returns[-1], self._run.around.endpoint.peer
        record, absent = decision.record, tuple(map(PeerId, decision.record.absent))
        run.learn(record.members)
        run.situation.may_go_back = False  # it was for this record
        back = WentBack(step=record.step, repeats=record.repeats, returns=record.returns, absent=absent)
        run.around.events.emit(back)
        if not run.position.names(record):
            self._let_in()
            return await self._joining.again(None, record)
        name, part, why = record.members[me].part, None, f"the run went back to step {record.step}"
        run.assigned(None if name is None else PartName(name), why, record)
        if name is not None:
            run.position.loading = True
            try:
                part = await self._checkpoints.part(PartName(name), record)
            finally:
                run.position.loading = False
            if part is None:  # the run may go back further, with this peer as one that asks to join
                self._let_in()
                return await self._joining.again(None, record)
            if run.around.manifest.averaging.feeds_back:
                run.around.events.emit(ResidualLost(step=record.step, part=PartName(name), peer=me, reason=why))
        await self._following.prepare(part, record)
        await self._member.observe(decision)
        self._let_in()
        return None

    def _let_in(self) -> None:
        """Judge who calls by what is decided from here on."""
        if (gate := self._run.around.gate) is not None:
            gate.follow(self._run.position, self._run.founder)


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
        """Return where the run stands; None once this peer is a member, and needs to ask nobody."""
        told = asyncio.create_task(self._contact.standing(self._run.situation.wait_for))
        named = asyncio.create_task(self._at.wait_member())
        try:
            await asyncio.wait((told, named), return_when=asyncio.FIRST_COMPLETED)
            return told.result() if told.done() else None
        finally:
            await ended((told, named))

    def _replaced(self, closed: int) -> bool:
        """Return whether the run began, and went on, without us who had taken our part in another founding record."""
        state = self._at.open
        accepted = None if self._at.head is not None or state.closing is not None else state.ballot.vote
        return accepted is not None and closed > accepted.record.step

    async def _found(self, founder: Founder) -> None:
        with founder.expecting():
            await founder.found(self._run.settings.patience_s, self._run.situation.wait_for)
            await self._at.wait_member()  # our own close may take longer than the others'
        await self._around.be_reachable(self._at.roster.peers)  # now there is somebody to ask

    async def _be_reached(self) -> None:
        """Before anybody counts on us. Anyone who is in the directory may relay for us."""
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
                f"the run went on without this peer, and it knows no other member: {reason}", Ending.UNREACHABLE
            )
        self._run.situation.wait_for(f"a member that can help to come back: {reason}")
        await self._joining.again(self._holding.part, known)

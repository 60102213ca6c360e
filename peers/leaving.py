"""Leaving in order: no new part in the run after the open step, nothing lost, nobody surprised."""

from __future__ import annotations

import asyncio

from peers.situation import Situation
from swarm.errors import EXIT_OK, PeerError, RunEnded, WrongStep
from swarm.ids import RunId
from swarm.optimization.calls import StepCalls
from swarm.optimization.changes import Departure, departure_bytes
from swarm.optimization.member import Member
from swarm.optimization.records import NO_RECORD
from swarm.planning.deadlines import AdaptiveDeadline
from swarm.schema import Empty
from swarm.security.signing import PrivateIdentity


class Leaving:
    """Asks the leader of each step to let this peer go, from the moment it is told to, until a record does."""

    def __init__(
        self,
        run: RunId,
        member: Member,
        calls: StepCalls,
        identity: PrivateIdentity,
        situation: Situation,
        deadline: AdaptiveDeadline,
    ) -> None:
        self._run, self._member, self._calls, self._identity = run, member, calls, identity
        self._situation, self._deadline = situation, deadline
        self._asked = asyncio.Event()
        self.exit_code = EXIT_OK
        self.admitted = asyncio.Event()
        """Set once this peer has asked to be let in: from then on a record may name it, and it leaves by another."""

    @property
    def asked(self) -> bool:
        """Whether this peer is to leave."""
        return self._asked.is_set()

    def ask(self, reason: str, exit_code: int) -> str:
        """Leave as soon as the run can do without. Returns what happens now, in words. Idempotent."""
        if not self._asked.is_set():
            self.exit_code = exit_code
            self._situation.drain(reason)
            self._asked.set()
        if self._situation.waiting_for:
            return f"draining: {self._situation.waiting_for}"
        return f"asked to leave; step {self._member.open_step} is the first with which it may"

    async def run(self) -> None:
        """Wait to be asked, then ask. Raises RunEnded when there is nothing to leave in order."""
        await self._asked.wait()
        if not self._member.is_member and not self.admitted.is_set():
            raise RunEnded("it left before it took part", self.exit_code)
        await self._member.wait_member()
        while not (self._member.departed or self._member.over):
            step = self._member.open_step
            await self._ask_leader(step)
            await self._member.wait_open(step + 1)

    async def _ask_leader(self, step: int) -> None:
        me = self._calls.me
        head = self._member.head
        previous = NO_RECORD if head is None else head.hash()
        signature = self._identity.sign(departure_bytes(self._run, step, previous, me))
        body, leader = Departure(step=step, peer=me, signature=signature), self._member.roster.leader(step)
        try:
            await self._calls.ask(leader, "lead/1/leave", body, Empty, timeout_s=self._deadline.seconds())
            self._situation.wait_for(f"step {step} to close")
        except WrongStep as error:
            self._situation.wait_for(f"the next step: {error.reason}")
        except PeerError as error:
            self._situation.wait_for(error.reason)

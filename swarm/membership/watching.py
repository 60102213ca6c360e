"""What a peer makes of the health watch: events with names, and catching up when others are ahead."""

from __future__ import annotations

import asyncio
import logging
import random

from swarm.consensus.copies import KEPT_UPDATES
from swarm.consensus.majority import majority
from swarm.consensus.records import voters
from swarm.errors import Ending, PeerError, RunEnded, WrongStep
from swarm.events import PeerBack, PeerLost
from swarm.ids import PeerId
from swarm.membership.going_back import went_back
from swarm.membership.run import RunContext
from swarm.membership.survey import FirstContact
from swarm.step.member.member_service import MemberService
from swarm.step.observe_messages import NEXT, STANDING, NextRequest, StandingRequest

logger = logging.getLogger(__name__)
DECISION_TIMEOUT_S = 10.0
ASKED = 4
STUCK_S = 30.0
"""How long a step may be open before another member is asked whether the run went back to a checkpoint instead."""


class Watching:
    """Runs the watch of one peer from before it is a member, and hears from it. The contact is watched until then:
    without it a peer that has not begun has nobody to begin with."""

    def __init__(self, run: RunContext, member: MemberService, contact: FirstContact) -> None:
        self._run, self._patience_s = run, run.rules.wait_for_lost_s
        self._rng = random.Random(run.around.endpoint.peer)
        self._watch, self._endpoint, self._events = run.around.watch, run.around.endpoint, run.around.events
        self._member, self._at, self._name_of, self._contact = member, run.position, run.name_of, contact
        self._ended: asyncio.Future[RunEnded] = asyncio.get_running_loop().create_future()
        self._ahead: asyncio.Queue[tuple[PeerId, int]] = asyncio.Queue(maxsize=8)

    async def run(self) -> None:
        """Watch until cancelled. Raises RunEnded when the contact says that it leaves before this peer takes part, and
        when nobody of the run has answered for as long as the manifest says."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run())
            group.create_task(self._catch_up())
            group.create_task(self._end_alone())
            group.create_task(self._look_back())
            raise await self._ended

    async def _end_alone(self) -> None:
        """Raises RunEnded."""
        while True:
            changed = self._watch.changed()
            if not self._alone():
                await changed
                continue
            try:
                async with asyncio.timeout(self._patience_s):
                    await changed
            except TimeoutError:
                if self._alone():
                    raise self._nobody_answers() from None

    def _alone(self) -> bool:
        others = [peer for peer in self._at.roster.peers if peer != self._endpoint.peer]
        return bool(others) and all(peer in self._watch.gone for peer in others)

    def _nobody_answers(self) -> RunEnded:
        names = ", ".join(f"{self._name_of(peer)} ({reason})" for peer, reason in sorted(self._watch.gone.items()))
        return RunEnded(
            f"nobody of the run has answered this peer for {self._patience_s:.0f} s; asked again and again: {names}"[
                :2000
            ],
            Ending.UNREACHABLE,
            check="is this machine's network up? The run may be over, or have stopped, without this peer.",
            remedy="Join again, with a new invite, once one of them is there.",
        )

    # --- what the watch tells: see :class:`swarm.health.watch.WatchListener` ----------------------------------------

    def standing(self) -> tuple[int, bool]:
        """See :class:`~swarm.health.watch.WatchListener`."""
        if self._at.loading:  # it is there, and as a member
            return self._run.returns[-1].record.step + 1, True
        return self._at.open_step, self._at.is_member

    def lineage(self) -> int:
        """See :class:`~swarm.health.watch.WatchListener`."""
        return 0 if self._at.head is None else self._at.head.lineage

    def lost(self, peer: PeerId, reason: str) -> None:
        """See :class:`~swarm.health.watch.WatchListener`."""
        self._events.emit(PeerLost(peer=peer, name=self._name_of(peer), reason=reason))
        self._at.open.conduct.missed.add(peer)
        if self._at.open_step == 0 and not self._run.returns and not self._ended.done():
            error = self._watch.unanswered.get(peer)
            left = error is None and peer in self._watch.left
            if (ended := self._contact.lost(peer, reason, error, left=left)) is not None:
                self._ended.set_result(ended)

    def back(self, peer: PeerId) -> None:
        """See :class:`~swarm.health.watch.WatchListener`."""
        self._events.emit(PeerBack(peer=peer, name=self._name_of(peer)))

    def ahead(self, peer: PeerId, step: int) -> None:
        """See :class:`~swarm.health.watch.WatchListener`."""
        if self._at.is_member and not self._ahead.full():
            self._ahead.put_nowait((peer, step))

    # --- catching up ---------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """A step that is open elsewhere is decided: what was, a member can prove."""
        while True:
            peer, step = await self._ahead.get()
            if step <= self._at.open_step:
                continue  # we have caught up since; asking would wait for what is not decided yet
            try:
                await self._learn(peer)
            except PeerError as error:
                logger.info("%s is ahead, and does not help: %s", peer, error)

    async def _look_back(self) -> None:
        """Find out whether the run went back to a checkpoint without us: nobody answers for the step that is open here
        then."""
        while True:
            step, head = self._at.open_step, self._at.head
            await self._run.around.clock.sleep(STUCK_S)
            if head is None or self._at.open_step != step or not self._at.is_member:
                continue
            others = [peer for peer in self._at.roster.peers if peer not in {self._endpoint.peer, *self._watch.gone}]
            found = await went_back(self._run, head, self._rng.sample(others, min(ASKED, len(others))))
            if found is not None:
                await self._member.learn(found)

    async def _learn(self, peer: PeerId) -> None:
        """Raises PeerError."""
        step = self._at.open_step
        body = NextRequest(part=None, step=step)
        try:
            decided, _ = await self._endpoint.call(peer, NEXT, body, timeout_s=DECISION_TIMEOUT_S)
        except WrongStep:
            await self._cut_if_far_behind(peer, step)
            raise
        await self._member.learn(decided.decision())

    async def _cut_if_far_behind(self, peer: PeerId, step: int) -> None:
        """It does not keep the decision of our open step: because that was so long ago, or not yet, or it lies. Most of
        those who decide the step have to say the same. Cost: one question to each of them."""
        head = self._at.head
        if head is None:
            return
        deciding = voters(head.members, head.hash())
        far = sum(
            await asyncio.gather(*(self._is_far(other, step) for other in deciding if other != self._endpoint.peer))
        )
        if far >= majority(len(deciding)) and self._at.open_step == step:
            reason = f"{far} of {len(deciding)} voters, {peer} among others, are steps ahead"
            await (self._member.cut(reason) if self._at.forking.fork is None else self._member.rewind(reason, None))

    async def _is_far(self, peer: PeerId, step: int) -> bool:
        ask = self._endpoint.call(peer, STANDING, StandingRequest(), timeout_s=DECISION_TIMEOUT_S)
        try:
            standing, _ = await ask
        except PeerError:
            return False
        return standing.closed is not None and standing.closed >= step + KEPT_UPDATES

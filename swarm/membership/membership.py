"""One peer's membership of one run: it is announced, gets its part at the genesis or joins later, follows the steps,
and leaves.

:meth:`Membership.run` tells the story; :mod:`swarm.membership.composition` makes everything that takes part in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.consensus.roster import Roster
from swarm.errors import Ending, RunEnded
from swarm.ids import PartName
from swarm.membership.copying import Copying
from swarm.membership.holding import RoleManager
from swarm.membership.last_holder import LastHolder
from swarm.membership.leaving import Leaving
from swarm.membership.run import RunContext
from swarm.membership.status import PeerStatus
from swarm.network.protocols import Service
from swarm.state.snapshot import Snapshot
from swarm.step.loop import StepLoop

COPIES_S = 10.0
"""How long after the last close is done with here the writing of another's part may begin."""

Work = Callable[[], Coroutine[Any, Any, None]]
"""A work that goes on during the steps, until cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChain:
    """Everything that a peer does in one chain of records, which begins with the genesis or where the run went back to
    a checkpoint: the way out of the run, the steps before it, and the ``background`` works that begin at once and go on
    as long as it lives; the way in is one of them. ``services`` are mounted."""

    context: RunContext
    steps: StepLoop
    holding: RoleManager
    copying: Copying
    leaving: Leaving
    last: LastHolder
    services: Sequence[Service]
    background: Sequence[Work]

    async def run(self) -> None:
        """Found or join, train, and return when the last step is closed, this peer has left, or the run goes back."""
        at, keeper, copies = self.context.position, self.context.keeper, list[Snapshot]()
        async with keeper:  # checkpoints may outlast the steps
            try:
                async with asyncio.TaskGroup() as group:
                    background = [group.create_task(work()) for work in self.background]
                    await self.steps.run()
                    await self.leaving.hand_over()
                    if keeper.root is not None and at.over and (head := at.head) is not None:
                        copies = await self.copying.last(head)
                    for task in background:
                        task.cancel()
                if copies:  # those who train these parts may not live to write them; this peer may have to be gone soon
                    await keeper.keep_copies(copies, self.context.history.head, COPIES_S)
            except* RunEnded:
                if keeper.root is not None and (head := at.head) is not None and at.is_member:
                    await self.last.keep(head, self.copying.left)
                raise

    def close(self) -> None:
        """Serve nothing any more. At once."""
        self.holding.let_go()
        for service in self.services:
            self.context.around.endpoint.unmount(service)


class Membership:
    """One peer's membership of one run. ``chain`` makes what it does from a beginning on: there is another one each
    time that the run goes back to a checkpoint."""

    def __init__(self, run: RunContext, chain: Callable[[RunContext], RunChain]) -> None:
        self._make, self._chain = chain, chain(run)

    async def run(self) -> str:
        """Announce, be founded or join, train, and leave when the last step is closed or earlier when asked. Returns
        why it is over, in words. Raises, in an ExceptionGroup, whatever ends it earlier; RunEnded when the last state
        could not be kept."""
        try:
            await self._chain.run()
            while self._run.position.back is not None:
                self._chain.close()
                self._chain = self._make(self._run.gone_back())
                await self._chain.run()
        except* RunEnded:  # it never came to be, or cannot go on: others need not wait for its record to expire
            await self._leaving.say_gone()
            raise
        await self._leaving.say_gone()
        if not self._run.position.departed:
            self._run.keeper.check_last()
        return self._leaving.outcome

    @property
    def _run(self) -> RunContext:
        return self._chain.context

    @property
    def _leaving(self) -> Leaving:
        return self._chain.leaving

    def leave(self, reason: str, ending: Ending, within_s: float | None = None, bound: str = "") -> str:
        """Leave in order: see :meth:`swarm.membership.leaving.Leaving.ask`. :meth:`run` then ends after the step's
        close."""
        return self._leaving.ask(reason, ending, within_s, bound)

    async def secure(self, within_s: float) -> str:
        """Have the newest state of a part that only this peer holds be somewhere else before it ends: see
        :meth:`swarm.membership.last_holder.LastHolder.secure`."""
        return await self._chain.last.secure(within_s)

    @property
    def ending(self) -> Ending:
        """Return how it ended, once :meth:`run` has returned."""
        return self._leaving.ending

    @property
    def situation(self) -> PeerStatus:
        """Return this peer's own view of itself, for people."""
        return self._run.situation

    @property
    def roster(self) -> Roster:
        """Return the roster of the open step; empty before the genesis."""
        return self._run.position.roster

    @property
    def copies(self) -> tuple[PartName, ...]:
        """Return the parts of which this peer keeps a copy beside its own."""
        return self._chain.copying.copies.parts

    def describe(self, error: BaseException) -> str:
        """Return a peer's failure in words, with the peer's name."""
        return self._run.describe(error)

"""How members leave, after the last step or before: nobody leaves while another has not swapped yet.

The leader of a step tells everybody the decision and knows who has swapped; it releases them when all have. A member
that left earlier would look like one that died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.schema import Count, Empty, Message
from swarm.step.calls import StepCalls

RELEASE_S = 5.0
"""How long a member that is done waits to be let go. It is only a courtesy: everything is decided and written."""


MAX_HEARD = 4096


class ExitRelease(Message):
    """Everybody has closed the step with which the receiver leaves."""

    step: Count


EXIT_RELEASE = Rpc("parting/1/farewell", ExitRelease, Empty)


class ExitBarrier:
    """The ``parting/1`` service of every member."""

    def __init__(self) -> None:
        self._said: set[PeerId] = set()
        self._heard = asyncio.Condition()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [EXIT_RELEASE.handled(self._on_release)]

    async def wait(self, members: Collection[PeerId]) -> None:
        """Return when the leader of our last step, one of its members, lets us go. Takes at most RELEASE_S."""
        try:
            async with asyncio.timeout(RELEASE_S), self._heard:
                await self._heard.wait_for(lambda: not self._said.isdisjoint(members))
        except TimeoutError:
            return

    async def release(self, calls: StepCalls, leaving: Iterable[PeerId], step: int) -> None:
        """As the leader that has seen everybody swap: let these go. Never raises a PeerError; at most RELEASE_S."""
        others = sorted(peer for peer in leaving if peer != calls.me)
        await asyncio.gather(*(_say(calls, peer, ExitRelease(step=step)) for peer in others))

    async def _on_release(self, caller: PeerId, body: ExitRelease) -> Empty:
        if len(self._said) < MAX_HEARD:
            self._said.add(caller)
        async with self._heard:
            self._heard.notify_all()
        return Empty()


async def _say(calls: StepCalls, peer: PeerId, release: ExitRelease) -> None:
    try:
        await calls.ask(peer, EXIT_RELEASE, release, timeout_s=RELEASE_S)
    except PeerError:
        return  # it has left already, and may

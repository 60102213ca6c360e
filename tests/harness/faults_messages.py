"""Messages as moments to strike at: what a peer asks another, and what it answers, beside the events it writes.

    with MemoryWorld(swarm) as world, messages_told(world):
        plan = FaultPlan(Strike("kill", On("answers step/1/propose", peer="host-1"), Kill(("host-1",))), world=world)

Who is killed when it *asks* has not sent the question. Who is killed when it *answers* has done what it was asked, and
nobody hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import swarm.sim.network
from swarm.network.protocols import Rpc
from swarm.sim.loop import PEER, SimLoop
from swarm.sim.network import SimEndpoint
from tests.harness.faults_memory import MemoryWorld

ASKS, ANSWERS = "asks ", "answers "
CHATTER = ("health/", "manifest/")
"""Questions that change nothing wherever they are lost."""


@contextlib.contextmanager
def messages_told(world: MemoryWorld) -> Iterator[None]:
    """While it is open, plans and listeners of this world in virtual time hear of messages: kinds are ``asks METHOD``
    and ``answers METHOD``, without fields."""
    call, notify, handle = SimEndpoint.call, SimEndpoint.notify, swarm.sim.network.handle

    async def told_call(self: SimEndpoint, target: Any, rpc: Rpc[Any, Any], *args: Any, **more: Any) -> Any:
        await _tell(world, self, ASKS + rpc.name)
        return await call(self, target, rpc, *args, **more)

    async def told_notify(self: SimEndpoint, target: Any, rpc: Rpc[Any, Any], *args: Any, **more: Any) -> None:
        await _tell(world, self, ASKS + rpc.name)
        await notify(self, target, rpc, *args, **more)

    async def told_handle(admitted: Any, *args: Any) -> Any:
        answer = await handle(admitted, *args)
        await _tell(world, None, ANSWERS + admitted.method.rpc.name)
        return answer

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(SimEndpoint, "call", told_call))
        patches.enter_context(mock.patch.object(SimEndpoint, "notify", told_notify))
        patches.enter_context(mock.patch.object(swarm.sim.network, "handle", told_handle))
        yield


async def _tell(world: MemoryWorld, asker: SimEndpoint | None, kind: str) -> None:
    if kind.partition(" ")[2].startswith(CHATTER):
        return
    name = PEER.get() or ("" if asker is None else world.swarm.network.names.get(asker.peer, ""))
    if name:
        world.tell(name, kind, {})
    loop = asyncio.get_running_loop()
    if isinstance(loop, SimLoop) and loop.is_frozen(PEER.get()):
        await asyncio.sleep(0)  # it was killed here: nothing after this line happens

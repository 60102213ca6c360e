"""A host that has others go ways that no trainer chose stops nobody."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import PeerError, Refused
from swarm.events import StepClosed
from swarm.ids import ATTEMPTS_OF_A_WAY, JourneyKey, MicrobatchId, PeerId
from swarm.pipeline.messages import BACKWARD, FORWARD, Backward, Forward
from swarm.pipeline.seals import Across
from swarm.pipeline.stage.server import StageServer
from swarm.sim.loop import PEER, run_world
from tests.swarms.story import DONE

STEPS, LIAR = 4, "host-0"
LAST = 4 * ATTEMPTS_OF_A_WAY - 1
"""Above any attempt that a trainer makes."""


class MakesUpWays:
    """What a replica of one of two stages does whenever its step opens: it brings those of the other one what the next
    microbatches of all trainers are, as it says. Their names follow from those before."""

    def __init__(self) -> None:
        self.newest = dict[PeerId, MicrobatchId]()
        self.refused = list[str]()

    def note(self, server: StageServer) -> None:
        """See which microbatches there were."""
        for one in server._table:
            last = one.key.microbatch
            self.newest[last.trainer] = max(last, self.newest.get(last.trainer, last))

    async def bring(self, server: StageServer, step: int, after: str) -> None:
        """Do so for a while."""
        settings, context = server._settings, server._context
        me, hop = context.endpoint.peer, 1 - settings.stage
        onward: tuple[Any, Any, str] = (FORWARD, Forward, "forward")
        rpc, kind, way = onward if hop else (BACKWARD, Backward, "backward")
        payload = bytes(settings.specs.arriving_bytes(step, way)[0])
        ids = [one._replace(position=one.position + n) for one in self.newest.values() for n in range(1, 13)]

        async def one(victim: PeerId, microbatch: MicrobatchId) -> None:
            key = JourneyKey(step, microbatch, LAST, after)
            seal = context.seals.seal(Across(key, hop, way), blake3(payload).digest())
            route = (me, victim) if hop else (victim, me)
            about: dict[str, Any] = {**key._asdict(), "route": route, "chosen": context.seals.choose(key, route)}
            body: Any = kind(**about, hop=hop, seal=seal)
            try:
                await context.endpoint.call(victim, rpc, body, timeout_s=5.0, payload=payload)
            except Refused as refused:
                self.refused.append(refused.reason)
            except PeerError:
                return

        for _ in range(20):
            await asyncio.gather(*(one(v, m) for v in server._rules.participants.stages[hop] for m in ids))
            await asyncio.sleep(0.05)


def test_host_that_makes_up_ways_of_others_microbatches_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS}, stage_s={"forward": 0.05, "backward": 0.1})
    liar, open_step, at_work = MakesUpWays(), StageServer.open_step, list[asyncio.Task[None]]()

    def opens(server: StageServer, step: int, participants: Any, after: str = "", before: str = "") -> None:
        if PEER.get() == LIAR:
            liar.note(server)
        open_step(server, step, participants, after, before)
        if PEER.get() == LIAR and step > 1:
            at_work.append(asyncio.create_task(liar.bring(server, step, after)))

    async def live() -> None:
        await swarm.run(timeout_s=300.0)
        for task in at_work:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    monkeypatch.setattr(StageServer, "open_step", opens)
    run_world(live())
    assert "its trainer did not choose this way" in liar.refused
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    seconds = {event.step: event.seconds for event in swarm.events(StepClosed)}
    assert max(seconds.values()) < 10.0

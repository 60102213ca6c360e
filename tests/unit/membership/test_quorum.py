"""A member that is cut off with too few says so, and when the others are back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from swarm.events import QuorumBack, QuorumLost, Waiting
from swarm.health.watch import HealthWatch
from swarm.membership.quorum import Quorum
from swarm.membership.status import PeerStatus
from swarm.sim.network import SimNetwork
from tests.harness.rigs.membership import ROSTER, RUN, A, EventList, LoopClock, MemberBench


class Scene:
    """A member of three, its watch, and what it said that it waits for."""

    async def set(self, *, founded: bool = True) -> Scene:
        endpoint = SimNetwork(LoopClock()).endpoint(A)
        await endpoint.enter(RUN)
        self.watch, self.bench, self.events = (
            HealthWatch(endpoint, LoopClock()),
            MemberBench(A, founded=founded),
            EventList(),
        )
        self.situation = PeerStatus(self.events)
        self.watch.follow(ROSTER.peers)
        run = SimpleNamespace(
            around=SimpleNamespace(watch=self.watch, clock=LoopClock()),
            position=self.bench.position,
            situation=self.situation,
            rules=SimpleNamespace(quorum_grace_s=600.0),
        )
        self.quorum = Quorum(cast(Any, run))
        return self

    @property
    def waited(self) -> list[str]:
        return [event.what for event in self.events.of(Waiting)]


async def test_member_without_a_majority_says_so_until_it_is_back() -> None:
    here = await Scene().set()
    watching = asyncio.gather(here.watch.run(), here.quorum.run())  # nobody else is on this network
    await asyncio.sleep(30)
    assert here.events.of(QuorumLost) == [QuorumLost(step=1, there=1, voters=3)]
    assert here.waited == ["a majority: 1 of 3 voters answer, 2 are needed, however long that takes"]
    assert here.situation.no_majority == here.waited[0]
    watching.cancel()
    here.watch.follow(())  # all that were gone are forgotten
    here.quorum.look()
    (back,) = here.events.of(QuorumBack)
    assert (back.step, 25 < back.seconds < 30) == (1, True)
    assert here.waited[-1] == here.situation.no_majority == ""

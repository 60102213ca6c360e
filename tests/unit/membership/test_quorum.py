"""A member that is cut off with too few says so, and when the others are back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from peers.console.words import command_to_join
from swarm.consensus.roster import owner
from swarm.events import QuorumBack, QuorumLost, Waiting
from swarm.health.watch import HealthWatch
from swarm.membership.quorum import MissingReplicas, Quorum
from swarm.membership.status import PeerStatus
from swarm.sim.network import SimNetwork
from tests.harness.rigs.membership import ROSTER, RUN, A, EventList, LoopClock, MemberBench, T


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
        manifest = SimpleNamespace(run=SimpleNamespace(copies=0, rewind="auto"))
        around = {"endpoint": endpoint, "manifest": manifest, "how_to_join": command_to_join}
        self.run = run = SimpleNamespace(
            around=SimpleNamespace(watch=self.watch, clock=LoopClock(), **around),
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


async def test_lost_part_is_told_of_by_its_leader_once_the_next_step_is_open() -> None:
    here = await Scene().set()
    at = here.bench.position
    missing = MissingReplicas(cast(Any, here.run))
    at.open_step = next(step for step in range(1, 100) if owner(ROSTER, step, at.term) == A)
    here.watch.follow((T,))
    judging = asyncio.gather(here.watch.run(), missing.run())
    await asyncio.sleep(30)
    assert (at.leader, list(here.watch.gone), here.waited) == (A, [T], []), "its leader says so itself"
    at.open_step = next(step for step in range(100) if owner(ROSTER, step, at.term) != A)
    await at.news.tell()
    await asyncio.sleep(1)
    judging.cancel()
    assert ["a replica of ends: " in said for said in here.waited] == [True]

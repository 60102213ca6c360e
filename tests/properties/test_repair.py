"""Random faults at random moments: every microbatch counts once at every stage, or not at all."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from swarm.ids import MicrobatchId, PeerId
from swarm.pipeline.settle import Assigned
from tests.harness.expect import eventually
from tests.harness.rigs.pipeline import Crew, FakeLeader, microbatch, quick, working

STAGES = [[PeerId(f"{stage}{number}") for number in range(3)] for stage in "abc"]
QUOTA, FAULTS = 10, 5
HOOKS = ("forward", "backward", "accumulate")


class Fate:
    """Strikes at random hooks: kills at most two replicas of a stage, silences or stalls others for a while."""

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew, self._rng = crew, random.Random(seed)
        self.struck: list[str] = []
        for peer, replica in crew.replicas.items():
            for hook in HOOKS:
                replica.part.on[hook] = lambda peer=peer, hook=hook: self._strike(peer, hook)

    def _strike(self, peer: PeerId, hook: str) -> None:
        if len(self.struck) >= FAULTS or self._rng.random() > 0.15:
            return
        stage = self._crew.replicas[peer].stage
        victim = self._rng.choice([other for other in STAGES[self._rng.randrange(3)]] + [peer])
        stage = self._crew.replicas[victim].stage
        dead = [other for other in STAGES[stage] if other in self._crew.struck]
        fault = self._rng.choice(["kill", "silence", "stall"])
        if victim in self._crew.struck or (fault == "kill" and len(dead) >= 2):
            return
        self.struck.append(f"{fault} {victim} at {hook}")
        loop = asyncio.get_running_loop()
        if fault == "kill":
            self._crew.kill(victim)
        elif fault == "silence":
            self._crew.silence(victim)
            self._crew.struck.remove(victim)
            loop.call_later(self._rng.uniform(0.1, 0.8), self._crew.mend, victim)
        else:
            self._stall(victim, loop)

    def _stall(self, victim: PeerId, loop: asyncio.AbstractEventLoop) -> None:
        device = self._crew.replicas[victim].device
        if device.gate is not None:
            return
        device.gate = gate = asyncio.Event()

        def go_on() -> None:
            gate.set()
            device.gate = None

        loop.call_later(self._rng.uniform(0.1, 0.8), go_on)


async def sums_without_faults(**options: Any) -> list[dict[Any, float]]:
    """What every stage should hold."""
    crew = await Crew.of(STAGES, **options)
    await crew.feed(QUOTA)
    return crew.sums()


@pytest.mark.promise("nothing lost, nothing twice")
@pytest.mark.parametrize("hosted", [False, True], ids=["private", "hosted"])
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_strikes_each_microbatch_counts_once_everywhere(seed: int, hosted: bool) -> None:
    crew = await Crew.of(STAGES, hosted=hosted, in_flight=4, pace=quick(), limits={"retention_bytes": 64 * (seed % 3)})
    fate, leader = Fate(crew, seed), FakeLeader(QUOTA)
    async with working(*crew.replicas.values()), asyncio.timeout(120):
        await leader.fed_by(crew.side.trainer)
        for replica in crew.replicas.values():
            replica.part.on.clear()
        await eventually(lambda: all(replica.device.gate is None for replica in crew.replicas.values()))
        await settle_until_it_holds(crew, leader)
    assert len(fate.struck) >= 2, f"too little struck: {fate.struck}"
    assert {journey.key.microbatch for journey in leader.finished} == {microbatch(i) for i in range(QUOTA)}
    assert crew.sums() == await sums_without_faults(hosted=hosted)


async def settle_until_it_holds(crew: Crew, leader: FakeLeader) -> None:
    """As the leader does that closes a step: what was still under way may add after a settling."""
    assigned = crew.assigned(leader)
    while True:
        await crew.settle(assigned)
        await asyncio.sleep(0)
        if all(crew.held(peer) == own(assigned, peer) for peer in crew.replicas if peer not in crew.struck):
            return


def own(assigned: Assigned, peer: PeerId) -> set[MicrobatchId]:
    """What a replica should hold."""
    return {microbatch for microbatch, route in assigned.items() if peer in route}

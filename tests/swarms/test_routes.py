"""Microbatches stay in the organisation of their trainer, no matter who dies, joins or leads."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from peers.simulate.local_swarm import founder_id
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord
from swarm.events import PartAssigned, PeerReady
from swarm.ids import PeerId
from swarm.sim.loop import run_world
from swarm.sim.network import SimEndpoint
from tests.swarms.stories import LOCAL, SHAPE
from tests.swarms.test_churn import after_step

TARGET, STUCK_S = 4, 60.0
DONE = "every step of the run is closed"
HOMES = ("st-mary", "charite")
MICROBATCHES = ("pipeline/1/", "trainer/1/")
"""Methods of which whole microbatches, or what is computed of them, are carried."""


class Hospitals(SimSwarm):
    """A swarm of two organisations; who is whose follows from the last digit of its name."""

    def __init__(self, root: Path, *, steps: int, routes: str = "organisation", **more: Mapping[str, Any]) -> None:
        organisation = {"organisation": HOMES[0]} if routes == "organisation" else {}
        shape: dict[str, Mapping[str, Any]] = {
            "run": {"steps": steps, "copies": 2},
            "split": {"stages": 2, "routes": routes},
            "admission": {"mode": "token", "issuers": (str(founder_id()),), **organisation},
            **{key: SHAPE[key] for key in ("model", "batch", "stage_s")},
        }
        shape |= {section: {**shape.get(section, {}), **keys} for section, keys in more.items()}
        super().__init__(root, hosts=4, trainers=2, may_fail=True, **shape)
        self.home: dict[PeerId, str] = {founder_id(): HOMES[0]}
        self.opened: list[SimEndpoint] = []

    def organisation_of(self, name: str) -> str:
        return HOMES[int(name[-1]) % 2]

    async def _add(self, name: str, role: str, number: int, *args: object, **more: object) -> PeerId:  # type: ignore[override]
        peer = await super()._add(name, role, number, *args, **more)  # type: ignore[arg-type]
        if role != "bootstrap":
            self.home[peer] = self.organisation_of(name)
        self.opened.append(self._endpoint_of(name))
        return peer

    def carried(self) -> Counter[bool]:
        """Bytes that were sent for microbatches, to peers abroad (True) and at home."""
        found: Counter[bool] = Counter()
        for endpoint in self.opened:
            for method, counts in endpoint.statistics().sent_by.items():
                if method.startswith(MICROBATCHES):
                    for peer, size in counts.items():
                        found[self.home[peer] != self.home[endpoint.peer]] += size
        return found

    def fed(self) -> dict[int, set[str]]:
        """By step of the history the organisations whose microbatches count."""
        records = [CloseRecord.model_validate_json(json.dumps(record)) for record in self.history()]
        return {record.step: {self.home[one.microbatch.trainer] for one in record.committed} for record in records}


class Schedule:
    """Hosts and trainers that are killed, drawn from a seed, and others that join in their place, or do not."""

    def __init__(self, swarm: Hospitals, seed: int, steps: int) -> None:
        self.swarm, self.rng, self.steps = swarm, random.Random(seed), steps
        self.kills, self.rescues, self.number = 0, 0, 300

    async def run(self) -> None:
        """Strike at every few steps until the run is nearly over."""
        step = 1
        while step < self.steps - 3:
            await self._after(step)
            await asyncio.sleep(self.rng.random())  # anywhere within a step
            await self._strike()
            step += self.rng.randint(1, 3)
        await self._after(self.steps)

    async def _after(self, step: int) -> None:
        """Until a step is closed; while none has been for long, somebody starts what each organisation may lack."""
        while True:
            try:
                async with asyncio.timeout(STUCK_S):
                    return await after_step(self.swarm, step)
            except TimeoutError:
                self.rescues += 1
                for home in range(2):
                    await self._join(home)

    async def _strike(self) -> None:
        rng, swarm = self.rng, self.swarm
        living = [name for name, one in swarm.peers.items() if not swarm.is_dead(name) and one.outcome is None]
        hosts = [name for name in living if "host" in name and swarm.peers[name].events.of(PeerReady)]
        if len(hosts) > 3:  # two of them may be the last of a stage, or of one in an organisation
            victim = rng.choice(hosts)
            swarm.kill(victim)
            self.kills += 1
            if rng.random() < 0.7:
                await self._join(int(victim[-1]) % 2)
        else:
            await self._join(rng.randint(0, 1))

    async def _join(self, home: int) -> None:
        self.number += 1
        await self.swarm.join(f"host-{self.number}-{home}", "stage", self.number)


def play(root: Path, seed: int, steps: int = 10, **more: Mapping[str, Any]) -> tuple[Hospitals, Schedule]:
    swarm = Hospitals(root, steps=steps, **more)
    schedule = Schedule(swarm, seed, steps)

    async def story() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=900))
            group.create_task(schedule.run())

    run_world(story())
    return swarm, schedule


def check_history(history: list[dict[str, Any]], last: int) -> None:
    """One chain to the last step, in which nothing counts twice, every step that is not given up is full, and each
    shard is fed without a gap."""
    records = [CloseRecord.model_validate_json(json.dumps(record)) for record in history]
    assert records[-1].step == last
    assert all(after.previous == before.hash() for before, after in pairwise(records))
    assert all(len(record.committed) == TARGET for record in records if not (record.founding or record.void))
    counted = [one.microbatch for record in records for one in record.committed]
    assert len(counted) == len(set(counted))
    aside = {one.microbatch for record in records for one in record.aside}
    for trainer, (epoch, position) in records[-1].cursors.items():
        done = {(one.epoch, one.position) for one in {*counted, *aside} if one.trainer == trainer}
        assert done == {at for at in done if at < (epoch, position)}
        assert {at for e, at in done if e == epoch} == set(range(position)), "nothing is left out"


def check(swarm: Hospitals, schedule: Schedule, steps: int = 10) -> None:
    check_history(swarm.history(), steps)
    carried = swarm.carried()
    assert carried[True] == 0
    assert carried[False] > 10_000
    assert schedule.kills > 0
    outcomes = {name: one.outcome for name, one in swarm.peers.items() if not swarm.is_dead(name)}
    assert outcomes["bootstrap"] == DONE


@pytest.mark.parametrize("seed", range(20))
def test_nothing_of_a_microbatch_goes_abroad_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    check(*play(tmp_path, seed))


@pytest.mark.parametrize("seed", range(20, 200))
def test_nothing_of_a_microbatch_goes_abroad_in_many_schedules(tmp_path: Path, seed: int) -> None:
    check(*play(tmp_path, seed))


@pytest.mark.parametrize("more", [{"split": {"ends": "hosted"}}, {"speed": {"mode": "overlap"}}, LOCAL])
def test_nothing_of_a_microbatch_goes_abroad_however_the_run_trains(
    tmp_path: Path, more: Mapping[str, Mapping[str, Any]]
) -> None:
    swarm, schedule = play(tmp_path, 0, **more)
    carried = swarm.carried()
    assert (carried[True], swarm.peers["bootstrap"].outcome) == (0, DONE)
    assert carried[False] > 10_000
    assert schedule.kills > 0


def test_without_own_routes_they_do_go_abroad(tmp_path: Path) -> None:
    swarm = Hospitals(tmp_path, steps=3, routes="any")
    run_world(swarm.run())
    assert swarm.carried()[True] > 0


def test_organisation_that_lacks_a_stage_waits_and_says_so_while_others_go_on(tmp_path: Path) -> None:
    swarm, said = Hospitals(tmp_path, steps=16), list[str]()

    async def story() -> None:
        await after_step(swarm, 2)
        swarm.kill("host-1")  # the only host of its stage at charite
        await after_step(swarm, 6)
        membership = swarm.peers["trainer-1"].membership
        assert membership is not None
        said.append(membership.situation.waiting_for)
        await swarm.join("host-301", "stage", 301)

    async def world() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=900))
            group.create_task(story())

    run_world(world())
    check_history(swarm.history(), 16)
    part = swarm.peers["host-1"].events.of(PartAssigned)[-1].part
    assert said[0].startswith(
        f"a host of {part} in charite, whose trainers wait while others go on; next: charite starts"
    )
    assert swarm.peers["host-301"].events.of(PartAssigned)[-1].part == part
    fed = swarm.fed()
    assert "charite" in fed[1] | fed[2]
    assert fed[5] == fed[6] == {"st-mary"}
    assert "charite" in fed[15] | fed[16]
    assert swarm.carried()[True] == 0
    assert swarm.peers["trainer-1"].outcome == DONE

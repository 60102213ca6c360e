"""Stages that share their layers: any host stands at any hop, the gradient is the sum over all of them, and one record
has each go on by itself from what they shared."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Pause
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.commands.history import read, row_lines
from peers.commands.history_source import HistorySource
from peers.dashboard.overview import Overview
from peers.simulate.sim_swarm import SimSwarm
from swarm.columns import becomes
from swarm.consensus.records import CloseRecord
from swarm.events import (
    Accumulated,
    AttemptFailed,
    CutOff,
    DigestMismatch,
    PartAssigned,
    PeerReady,
    StepClosed,
    SyncProgress,
    Waiting,
)
from swarm.ids import shared_part
from swarm.sim.loop import run_world
from tests.harness.crashes import BACK, SHAPE, Crash, Life, live, sweep
from tests.harness.expect import eventually
from tests.harness.faults_memory import MemoryWorld

STAGES, AT, STEPS = 2, 3, 6
SHARED = shared_part(STAGES)


def shape(at: int = AT, **model: Any) -> dict[str, Any]:
    return {"model": {**SHAPE["model"], "share": "stages", "delink_at": at, "dropout": 0.1, **model}}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Ran to its end without any fault."""
    return live(tmp_path_factory.mktemp("delink") / "calm", **shape())


async def beside(swarm: SimSwarm, story: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run(timeout_s=900.0))
        group.create_task(story)


def parts(record: Mapping[str, Any]) -> Counter[str]:
    return Counter(member["part"] for member in record["roster"])


def test_hosts_part_with_one_record_and_nothing_is_fetched(calm: Life) -> None:
    swarm, records = calm.swarm, calm.swarm.history()
    before, after = [{SHARED, "ends"}] * AT, [{*becomes(SHARED), "ends"}] * (STEPS + 1 - AT)
    assert [set(record["digests"]) for record in records] == [*before, *after]
    assert parts(records[AT - 1])[SHARED] == 4
    assert [parts(records[AT])[stage] for stage in becomes(SHARED)] == [2, 2]
    for event in (AttemptFailed, CutOff, DigestMismatch):
        assert not swarm.events(event)
    by_hosts = [one for name, peer in swarm.peers.items() if "host" in name for one in peer.events.of(SyncProgress)]
    assert {one.part for one in by_hosts} == {SHARED}
    stood = {(hop, peer) for one in records[1]["committed"] for hop, peer in enumerate(one["route"])}
    assert len(stood) > 4, "one at several hops"
    added = Counter((one.step, one.part, one.hop, one.microbatch) for one in swarm.events(Accumulated))
    assert set(added.values()) == {1}
    check_run([swarm.root]).assert_sound()


def test_history_and_dashboard_say_when_stages_part(calm: Life) -> None:
    rows = read(HistorySource(calm.swarm.root / "bootstrap" / "history.jsonl"), last=None, verify=False).rows
    assert [row.step for row in rows if row.parted] == [AT]
    assert sum("stages share their layers no more" in line for line in row_lines(rows)) == 1
    overview = Overview({"kind": "files", "label": "here"})
    overview.founded(calm.swarm.manifest, 1)
    said = list[dict[str, str]]()
    for record in calm.swarm.history():
        overview.record(CloseRecord.model_validate_json(json.dumps(record)))
        said.append({one["part"]: one["said"] for one in overview.document(0.0)["parts"] if one["said"]})
    assert said[AT - 1] == {SHARED: "2 stages share their layers until step 3 is closed: any host serves any of them"}
    assert said[AT] == {}


def of_the_close(calm: Life, each: int) -> list[Crash]:
    """Deaths around messages of the close with which stages part, so many of a kind, each with another return."""
    kinds = Counter[str]()
    backs, chosen = itertools.cycle(BACK), list[Crash]()
    for moment in random.Random(7).sample(calm.moments.seen, len(calm.moments.seen)):
        kind = str(moment.on.kind)
        if moment.step == AT and " step/1/" in kind and kinds[kind] < each:
            kinds[kind] += 1
            chosen.append(Crash(moment, next(backs)))
    assert len(kinds) == 8, "reconcile, apply, propose and decide, each asked and answered"
    return chosen


def test_death_around_a_message_of_that_close_changes_nothing(calm: Life, tmp_path: Path) -> None:
    sweep(tmp_path, calm, of_the_close(calm, each=1), **shape())


@pytest.mark.nemesis
@pytest.mark.timeout(3600)
def test_death_around_any_message_of_that_close_changes_nothing(calm: Life, tmp_path: Path) -> None:
    chosen = of_the_close(calm, each=100)
    assert len(chosen) >= 50
    sweep(tmp_path, calm, chosen, **shape())


def test_run_with_too_few_hosts_waits_and_parts_with_one_that_joins(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, **{**SHAPE, **shape(), "hosts": 2})
    waited = list[str]()

    async def story() -> None:
        await eventually(lambda: any(one.step >= 1 for one in swarm.peers["host-0"].events.of(StepClosed)))
        swarm.kill("host-1")
        await eventually(lambda: any("share their layers" in one.what for one in swarm.events(Waiting)))
        waited.append(next(one.what for one in swarm.events(Waiting) if "share their layers" in one.what))
        await swarm.join("late", "stage", 300)

    run_world(beside(swarm, story()))
    assert waited[0].endswith("1 are here")
    records = swarm.history()
    assert set(parts(records[AT - 1])) == {SHARED, "ends", None}
    assert [parts(records[AT])[stage] for stage in becomes(SHARED)] == [1, 1]
    assert "late" in {member["name"] for member in records[AT]["roster"]}
    assert len(records) == STEPS + 1
    check_run([swarm.root]).assert_sound()


def test_host_that_joins_after_stages_have_parted_fits_in(tmp_path: Path, calm: Life) -> None:
    """It came while they shared, and follows the run as they part."""
    swarm = SimSwarm(tmp_path, **{**SHAPE, **shape()})

    async def story() -> None:
        await eventually(lambda: any(one.step >= AT - 2 for one in swarm.peers["host-0"].events.of(StepClosed)))
        ready = await swarm.join("late", "stage", 300)
        await eventually(lambda: bool(ready.events.of(PeerReady)))

    run_world(beside(swarm, story()))
    assert [one["digests"] for one in swarm.history()] == [one["digests"] for one in calm.swarm.history()]
    assert "late" in {member["name"] for member in swarm.history()[-2]["roster"]}


def test_host_that_slept_while_stages_parted_comes_back_as_one_of_them(tmp_path: Path) -> None:
    """What it held there is no part any more: it fetches the stage that it is given."""
    swarm = SimSwarm(tmp_path, **{**SHAPE, **shape(), "run": {"steps": 60}, "may_fail": True})
    sleep = Pause(("host-1",), seconds=20.0)
    plan = FaultPlan(
        Strike("sleep", On("SumTaken", peer="host-1", where={"step": AT}), sleep), world=MemoryWorld(swarm)
    )
    run_world(swarm.run(timeout_s=3000.0))
    plan.assert_fired()
    assert swarm.peers["host-1"].events.of(CutOff)
    assert swarm.peers["host-1"].outcome == "every step of the run is closed"
    assert [one.part for one in swarm.peers["host-1"].events.of(PartAssigned)][-1] in becomes(SHARED)
    assert not swarm.events(DigestMismatch)

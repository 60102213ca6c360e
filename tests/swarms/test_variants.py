"""Stages of which there are several variants: microbatches pass one, and only its replicas judge each other."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_shards.histogram import pieces_of
from data_shards.router import Points, learn
from data_shards.shard import Shard
from peers.commands.history import read, variant_lines
from peers.commands.history_source import HistorySource
from peers.dashboard.overview import Overview
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord
from swarm.events import HopAudited, StepClosed
from swarm.ids import ENDS, stage_part
from swarm.models.spec import SplitConfig
from swarm.sim.loop import run_world
from tests.harness.expect import eventually

SHAPE: dict[str, Any] = {
    "hosts": 6,
    "trainers": 2,
    "split": {"stages": 2, "variants": (1, 2), "route_by": "domain", "domains": ("law", "code")},
    "sites": {"trainer-0": {"domain": "law"}, "trainer-1": {"domain": "code"}},
}


TAKES = {"forward": 0.05, "forward_loss": 0.05, "backward": 0.1}


def records(swarm: SimSwarm) -> list[CloseRecord]:
    return [CloseRecord.model_validate_json(json.dumps(one)) for one in swarm.history()]


def test_host_that_says_a_domain_holds_its_expert_from_the_beginning_and_when_it_comes_later(tmp_path: Path) -> None:
    said = {f"host-{at}": {"domain": "code"} for at in range(4)}
    swarm = SimSwarm(tmp_path, **{**SHAPE, "run": {"steps": 12}, "sites": SHAPE["sites"] | said, "stage_s": TAKES})
    code = stage_part(1, 1, 2)

    async def story() -> None:
        await eventually(lambda: any(one.step >= 1 for one in swarm.peers["host-5"].events.of(StepClosed)))
        await swarm.join("late", "stage", 300, domain="code")

    async def beside() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run())
            group.create_task(story())

    run_world(beside())
    first, *_, last = records(swarm)
    assert {first.members.names[peer] for peer in first.members.replicas(code)} == {f"host-{at}" for at in range(4)}
    assert "late" in {last.members.names[peer] for peer in last.members.replicas(code)}


def test_history_dashboard_and_status_say_what_passed_each_variant(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, **SHAPE)
    run_world(swarm.run())
    found = read(HistorySource(tmp_path / "bootstrap" / "history.jsonl"), last=None, verify=True)
    newest = found.rows[-1]
    law, code = newest.variants
    assert (law.part, code.part) == (stage_part(1, 0, 2), stage_part(1, 1, 2))
    assert law.passed + code.passed == newest.microbatches == 6
    assert (law.hosts, code.hosts) == (2, 2)
    assert variant_lines(found.rows)[1].split()[:3] == [law.part, "2", "hosts"]
    overview = Overview({"kind": "files", "label": "here"})
    overview.founded(swarm.manifest, 1)
    for record in records(swarm):
        overview.record(record)
    said = {one["part"]: one["said"] for one in overview.document(0.0)["parts"]}
    assert said == {
        ENDS: "", stage_part(0): "",
        law.part: f"for law, {law.passed} of 6 microbatches in the newest step",
        code.part: f"for code, {code.passed} of 6 microbatches in the newest step",
    }  # fmt: skip
    membership = swarm.peers["host-0"].membership
    assert membership is not None
    assert dict(membership.situation.passed) == {law.part: law.passed, code.part: code.passed}


def test_rows_of_two_kinds_of_one_trainers_text_pass_two_variants(tmp_path: Path) -> None:
    law = [f"The party of the first part shall {n} times pay the party of the second part. " * 9 for n in range(20)]
    code = [f"for (i = {n}; i < n; i++) {{ x[i] += y[{n}]; }} // {n}\n" * 9 for n in range(20)]
    swarm = SimSwarm(tmp_path, hosts=4, documents=[law + code], run={"steps": 3})
    pieces, _ = pieces_of(iter([Shard.open(swarm.shards[0]).tokens]), swarm.manifest.model.context)
    centres = learn(Points(pieces, np.ones(len(pieces), np.int64)), 2, seed=0)
    split = SplitConfig(variants=(1, 2), route_by="text", centres=centres)
    swarm.manifest = swarm.manifest.model_copy(update={"split": split})
    run_world(swarm.run())
    for before, record in pairwise(records(swarm)):
        assert {one.choice for one in record.committed} == {0, 1}
        assert all(before.members.holds(one.route[1], one.choice) for one in record.committed)


@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_hops_are_computed_again_by_replicas_of_the_same_variant_and_found_right(tmp_path: Path, ends: str) -> None:
    more = {"split": SHAPE["split"] | {"ends": ends}, "verify": {"audit": 1.0}, "run": {"steps": 2}}
    swarm = SimSwarm(tmp_path, **SHAPE | more)
    run_world(swarm.run())
    assert {event.outcome for event in swarm.events(HopAudited)} == {"passed"}

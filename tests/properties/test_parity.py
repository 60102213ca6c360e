"""A reproducible swarm is the plain loop, bit for bit, in whatever way its model is cut and no matter who dies.

The benchmark ``hf`` plays it with real processes that are killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.chaos.faults import Kill, Restart
from peers.chaos.plan import On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord
from swarm.events import ChoicesDropped
from swarm.models.registry import family_of
from swarm.sim.links import Links
from tests.benchmarks._parity_replay import ExactLoop, replay
from tests.benchmarks._parity_run import TrainedRun, read_history
from tests.swarms.story import live_through

STEPS = 8
SMALL: Mapping[str, Any] = {
    "run": {"steps": STEPS, "reproducible": True},
    "model": {"layers": 2, "dim": 16, "context": 8},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 4},
}
KILLS = (
    Strike("host", On("Accumulated", peer="host-1", nth=2), Kill(("host-1",))),
    Strike("trainer", On("RoundDone", peer="trainer-1", nth=2), Restart("trainer-1")),
    Strike("founder", On("StepClosed", peer="host-0", nth=3), Kill(("bootstrap",))),
    Strike("back", On("StepClosed", peer="host-0", nth=1, after="founder"), Restart("host-1")),
)
BACK = Strike("back", On("StepClosed", peer="host-0", nth=5), Restart("host-1"))


def lived(root: Path, *strikes: Strike, hosts: int = 4, **shape: Any) -> tuple[TrainedRun, SimSwarm]:
    """A run in virtual time that kept its invariants whatever struck it, as those who outlived it have it."""
    links = Links.parse({"default": {"latency_ms": 20}})
    swarm = SimSwarm(root, hosts=hosts, trainers=2, links=links, **{"split": {"stages": 2}, **SMALL, **shape})
    live_through(swarm, root, *strikes, steps=STEPS, timeout_s=600.0)
    records = read_history(root / "host-0" / "history.jsonl")
    return TrainedRun.linked(root, swarm.manifest, records, swarm.shards), swarm


def differing(run: TrainedRun, records: tuple[CloseRecord, ...]) -> list[tuple[int, str]]:
    """The steps and parts, or microbatches, of which the plain loop has other bits than the records say."""
    found: list[tuple[int, str]] = []
    loop = replay(replace(run, records=records), ExactLoop(run.manifest))
    for record, step in zip(run.records[1:], loop.steps, strict=True):
        assert record.digests.keys() == step.digests.keys()
        found += [(record.step, part) for part, digest in step.digests.items() if record.digests[part] != digest]
        told = [(contribution.microbatch, contribution.loss_sum) for contribution in record.committed]
        found += [(record.step, str(m)) for (m, ours), loss in zip(told, step.loss_sums, strict=True) if ours != loss]
    return found


@pytest.mark.promise("replicas equal")
@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_run_of_replicas_trains_the_plain_loops_bits(tmp_path: Path, ends: str) -> None:
    run, _ = lived(tmp_path, split={"stages": 2, "ends": ends})
    assert len({record.digests["stage-0"] for record in run.records}) == STEPS + 1, "it does not move"
    assert differing(run, run.records) == []
    # A ledger that is wrong about one microbatch of the first two steps each is seen.
    genesis, first, second, *rest = run.records
    moved = (second.committed[0], *first.committed[1:]), (first.committed[0], *second.committed[1:])
    exchanged = [
        record.model_copy(update={"committed": committed})
        for record, committed in zip((first, second), moved, strict=True)
    ]
    assert {step for step, _ in differing(run, (genesis, *exchanged, *rest))} == set(range(1, STEPS + 1))


@pytest.mark.promise("trajectory 0.0 with kills")
def test_run_whose_host_trainer_and_founder_are_killed_trains_the_plain_loops_bits(tmp_path: Path) -> None:
    """The distance of the trajectory is 0.0: what the ledger says was trained is all that decides it."""
    run, swarm = lived(tmp_path, *KILLS)
    assert {name for name in swarm.peers if swarm.is_dead(name)} == {"host-1", "trainer-1", "bootstrap"}
    assert differing(run, run.records) == []


@pytest.mark.promise("experts 0.0 with kills")
@pytest.mark.parametrize("kind", ["aux", "bias"])
def test_run_with_experts_trains_the_plain_loops_bits_though_a_host_is_killed(tmp_path: Path, kind: str) -> None:
    """What experts got, by which a step steers, is counted once like the gradients; so is what they had no room for."""
    balance = {"kind": kind, "rate": 0.01, "weight": 0.1}
    experts = {"experts": 4, "expert_every": 1, "capacity": 1.0, "balance": balance}
    run, swarm = lived(tmp_path, *KILLS[:1], BACK, model=SMALL["model"] | experts)
    assert swarm.is_dead("host-1")
    assert differing(run, run.records) == []
    told = [event for host in ("host-0", "host-2", "host-3") for event in swarm.peers[host].events.of(ChoicesDropped)]
    steps = {step: [event for event in told if event.step == step] for step in range(1, STEPS + 1)}
    whole = [each for each in steps.values() if sum(event.choices for event in each) == 2 * 4 * 8]
    assert whole, "where all hosts of a step tell, they tell of the tokens of four microbatches at two stages"
    assert any(event.without_room for event in told)


def test_sparse_run_trains_the_plain_loops_bits_though_a_host_is_killed(tmp_path: Path) -> None:
    """What is no weight is exactly 0 at the end, and all that is one has moved."""
    run, swarm = lived(tmp_path, *KILLS[:1], BACK, model=SMALL["model"] | {"sparsity": 0.75})
    assert swarm.is_dead("host-1")
    assert differing(run, run.records) == []
    family = family_of(run.manifest.model)
    weights, begun = replay(run, ExactLoop(run.manifest)).weights, family.initial_weights(run.manifest.run.seed)
    for name, trained in family.export_weights(family.whole, weights).items():
        before = family.export_weights(family.whole, begun)[name]
        assert not torch.equal(trained, before)
        if "_proj" in name:
            assert torch.equal(trained == 0, before == 0)
            assert ((before != 0).sum(1) == before.shape[1] // 4).all()


@pytest.mark.promise("variants 0.0 with kills")
def test_each_variant_of_a_stage_trains_the_bits_of_one_process_on_its_rows(tmp_path: Path) -> None:
    """Also where a replica dies with what it holds; the one that nobody feeds stays as it began."""
    split = {"stages": 2, "variants": (1, 3), "route_by": "domain", "domains": ("law", "code", "prose")}
    sites = {"trainer-0": {"domain": "law"}, "trainer-1": {"domain": "code"}}
    run, swarm = lived(tmp_path, *KILLS[:1], BACK, hosts=8, split=split, sites=sites)
    assert swarm.is_dead("host-1")
    assert differing(run, run.records) == []
    states = [len({record.digests[f"stage-1.v{each}of3"] for record in run.records}) for each in range(3)]
    assert states == [STEPS + 1, STEPS + 1, 1]

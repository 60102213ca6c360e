"""Whole runs in one process: what every run must hold, for every shape of a swarm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm.events import Accumulated, DigestMismatch, JourneyCompleted, JourneyStarted, RoundDone, StepClosed
from swarm.ids import MicrobatchId
from swarm.models import family as models
from swarm.models.recompute import recomputed
from swarm.pipeline.compute import StageCompute
from tests.harness.swarm import LocalSwarm

SHAPES = {
    "one stage, one host": {"hosts": 1, "trainers": 1, "split": {"stages": 1}},
    "one stage, hosted": {"hosts": 2, "trainers": 2, "split": {"stages": 1, "ends": "hosted"}},
    "uneven replicas": {"hosts": 5, "trainers": 2, "split": {"stages": 2}},
    "hosted ends": {"hosts": 4, "trainers": 2, "split": {"stages": 2, "ends": "hosted"}},
    "four stages": {"hosts": 4, "trainers": 3, "split": {"stages": 4}},
    "bfloat16 on the wire": {"hosts": 2, "trainers": 1, "codecs": {"activations": "bfloat16"}},
    "bfloat16 inside": {"hosts": 2, "trainers": 1, "model": {"compute": "bfloat16"}},
    "reproducible": {"hosts": 4, "trainers": 2, "run": {"reproducible": True}},
    "more trainers than microbatches": {"hosts": 2, "trainers": 3, "batch": {"microbatches_per_step": 2}},
    "adapters": {"hosts": 4, "trainers": 2, "model": {"lora": {"rank": 4, "base": "nf4"}}},
    "adapters, hosted ends": {
        "hosts": 3,
        "trainers": 1,
        "split": {"ends": "hosted"},
        "model": {"lora": {"rank": 4}, "compute": "bfloat16"},
    },
    "stages with nothing to train": {
        "hosts": 4,
        "trainers": 2,
        "model": {"lora": {"rank": 4, "targets": ["0.attention.query"]}},
    },
    "adapters, Muon": {
        "hosts": 2,
        "trainers": 1,
        "model": {"lora": {"rank": 8, "targets": ["query"]}},
        "optimizer": {"name": "muon"},
    },
    "Adafactor": {"hosts": 4, "trainers": 1, "optimizer": {"name": "adafactor"}},
    "dropout": {"hosts": 2, "trainers": 1, "model": {"dropout": 0.1}},
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
async def test_run_of_any_shape_counts_every_microbatch_once_everywhere(tmp_path: Path, shape: str) -> None:
    swarm = LocalSwarm(tmp_path, **SHAPES[shape])  # type: ignore[arg-type]
    await swarm.run()

    steps, target = swarm.manifest.run.steps, swarm.manifest.batch.microbatches_per_step
    closed = swarm.events(StepClosed)
    assert Counter(event.step for event in closed) == dict.fromkeys(range(1, steps + 1), len(swarm.peers))
    assert not swarm.events(DigestMismatch)

    records = swarm.history()
    assert [record["step"] for record in records] == list(range(steps + 1))
    committed = [MicrobatchId(*item["microbatch"]) for record in records for item in record["committed"]]
    assert len(committed) == len(set(committed)) == steps * target

    started = [event.microbatch for event in swarm.events(JourneyStarted)]
    assert Counter(started) == Counter(committed)
    assert Counter(event.microbatch for event in swarm.events(JourneyCompleted)) == Counter(committed)

    accumulated = Counter((event.part, event.microbatch) for event in swarm.events(Accumulated))
    stages = range(swarm.manifest.split.stages)
    assert accumulated == Counter((f"stage-{stage}", microbatch) for stage in stages for microbatch in committed)
    assert len({event.record for event in closed if event.step == steps}) == 1
    assert all(event.members >= event.participating >= 1 for event in swarm.events(RoundDone))


async def test_replicas_that_compute_activations_again_give_the_digests_of_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: Counter[str] = Counter()

    def counted(*given: Any) -> Any:
        again[root.name] += 1
        return recomputed(*given)

    monkeypatch.setattr(models, "recomputed", counted)
    digests = {}
    for choice in ("off", "on"):
        root = tmp_path / choice
        root.mkdir()
        sites = {"host-0": {"activation_checkpointing": choice}}
        adapters = {"rank": 4, "dropout": 0.2}
        shape: dict[str, Any] = {"run": {"reproducible": True}, "model": {"dropout": 0.1, "lora": adapters}}
        swarm = LocalSwarm(root, hosts=2, split={"stages": 1}, batch={"packing": "documents"}, sites=sites, **shape)
        await swarm.run()
        assert not swarm.events(DigestMismatch)
        digests[choice] = [record["digests"] for record in swarm.history()]
    assert digests["on"] == digests["off"]
    assert set(again) == {"on"}


async def test_replicas_that_defer_weight_gradients_give_the_digests_of_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned: Counter[str] = Counter()
    usual = StageCompute.turn_back

    def counted(*given: Any) -> Any:
        contributed, rest = yield from usual(*given)
        turned[root.name] += bool(rest._passes)
        return contributed, rest

    monkeypatch.setattr(StageCompute, "turn_back", counted)
    digests = {}
    for choice in ("off", "on"):
        root = tmp_path / choice
        root.mkdir()
        sites = {f"host-{index}": {"deferred_weights": choice} for index in range(4)}
        swarm = LocalSwarm(root, hosts=4, sites=sites, run={"reproducible": True}, model={"dropout": 0.1})
        await swarm.run()
        assert not swarm.events(DigestMismatch)
        digests[choice] = [record["digests"] for record in swarm.history()]
    assert digests["on"] == digests["off"]
    assert set(turned) == {"on", "off"}
    assert (turned["on"] > 0, turned["off"]) == (True, 0)


async def test_run_learns(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path, hosts=2, trainers=1, run={"steps": 12}, optimizer={"lr": 1e-2, "warmup_steps": 2})
    await swarm.run()
    losses = {event.step: event.loss for event in swarm.events(StepClosed)}
    assert losses[12] < 0.8 * losses[1]

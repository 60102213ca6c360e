"""A trainer that measures the loss of rows that nobody learns from changes nothing of what is learnt."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from data_shards.build import build_shard
from peers.data.trainer_data import open_source
from swarm.events import HeldOutLoss
from swarm.ids import PeerId
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from tests.harness.rigs.peers import TEXT
from tests.harness.swarm import LocalSwarm

EVERY = 2


async def trained(root: Path, ends: str, *, measures: bool) -> LocalSwarm:
    site = {"eval": root / "held-out", "eval_every": EVERY} if measures else {}
    swarm = LocalSwarm(
        root,
        hosts=4,
        trainers=2,
        run={"reproducible": True, "steps": 4},
        model={"dropout": 0.1},
        split={"ends": ends},
        sites={"trainer-0": site},
    )
    build_shard(root / "held-out", [TEXT[:2000]], swarm.tokenizer)
    await swarm.run()
    return swarm


def loss_at_first(swarm: LocalSwarm, microbatches: int) -> float:
    """The loss of as many microbatches by the whole model, as it began."""
    family = family_of(swarm.manifest.model)
    model = family.build(family.whole)
    install_weights(model, family.initial_weights(swarm.manifest.run.seed))
    source, total, tokens = open_source(swarm.manifest, swarm.root / "held-out", PeerId("me")), 0.0, 0
    for batch in (source.take() for _ in range(microbatches)):
        loss_sum, counted = model.evaluate(batch.inputs, batch.targets)
        total, tokens = total + loss_sum, tokens + counted
    return total / tokens


@pytest.mark.parametrize("ends", ["private", "hosted"])
async def test_run_whose_trainer_measures_has_the_bits_of_one_whose_does_not(tmp_path: Path, ends: str) -> None:
    for name in ("calm", "measuring"):
        (tmp_path / name).mkdir()
    calm = await trained(tmp_path / "calm", ends, measures=False)
    measuring = await trained(tmp_path / "measuring", ends, measures=True)
    digests = [[record["digests"] for record in swarm.history()] for swarm in (calm, measuring)]
    assert digests[0] == digests[1]
    assert not calm.events(HeldOutLoss)
    first, *others = measuring.events(HeldOutLoss)
    assert first.step == 0
    assert {event.step for event in others} <= {EVERY, 2 * EVERY}
    assert first.loss is not None
    assert 0 < first.microbatches <= first.most
    if ends == "hosted":  # private ones begin from a secret seed
        assert math.isclose(first.loss, loss_at_first(measuring, first.microbatches), rel_tol=1e-5)

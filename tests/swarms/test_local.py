"""Whole runs in ``local`` mode: replicas train apart, meet at each close, and hold the same there, whoever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm.events import DigestMismatch, RoundDone, StepClosed
from tests.harness.faults import On, Strike
from tests.harness.faults_kinds import Kill
from tests.harness.simulated import SimSwarm
from tests.harness.swarm import LocalSwarm
from tests.swarms.story import live_through

STEPS, INNER = 4, 6
SHAPE: dict[str, Any] = {
    "hosts": 4,
    "trainers": 2,
    "run": {"steps": STEPS},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 4},
    "optimizer": {"warmup_steps": 0},
}
LOCAL: dict[str, Any] = {"mode": "local", "local": {"steps": INNER}}


async def test_replicas_that_train_apart_hold_the_same_weights_at_every_close_and_the_loss_falls(
    tmp_path: Path,
) -> None:
    swarm = LocalSwarm(tmp_path, averaging=LOCAL, **SHAPE)
    await swarm.run()
    assert not swarm.events(DigestMismatch)
    history = swarm.history()
    assert [len(record["committed"]) for record in history] == [0] + [4 * INNER] * STEPS
    losses = [record["loss_sum"] / record["tokens"] for record in history[1:]]
    assert losses[-1] < losses[0] - 0.2, losses
    assert len({str(record["digests"]) for record in history}) == STEPS + 1
    assert {event.step for event in swarm.events(RoundDone)} == set(range(1, STEPS + 1))

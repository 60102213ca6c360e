"""Swarms in virtual time with a bad leader, replica or guest: how long it holds them up, and what it gets decided."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord, voters
from swarm.events import StepClosed
from swarm.ids import PeerId
from swarm.sim.loop import run_world
from tests.harness.bad_leaders import (
    Attack,
    evicts,
    forges_rows,
    lies_about_weights,
    spoils_sums,
    striking,
    sybils_join,
    victim_of,
)
from tests.harness.expect import eventually

STEP, STEPS, SYBILS = 3, 5, 8
LAST = 3
"""Steps over which losses are averaged, the last of the run."""
LEARNS: dict[str, Any] = {
    "trainers": 2,
    "model": {"layers": 2, "dim": 16, "context": 8},
    "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}


def stalled_leader(root: Path, stall: Attack) -> float:
    """Seconds of the longest step after the first, when a leader stands still."""
    swarm = SimSwarm(root, hosts=4, trainers=2, run={"steps": STEPS})
    _struck(swarm, stall)
    return _longest_step(swarm)


def tie(root: Path) -> float:
    """Seconds of the longest step after the first, when of two replicas one always differs and there are two copies."""
    swarm = SimSwarm(root, hosts=4, trainers=2, run={"steps": STEPS, "copies": 2}, may_fail=True)
    with lies_about_weights("host-0", swarm, step=STEP) as lies:
        run_world(swarm.run(timeout_s=3600.0))
    _fired(lies)
    return _longest_step(swarm)


def sybil_votes(root: Path) -> int:
    """How many of the members that joined and did nothing have a vote after any record."""
    shape: dict[str, Any] = {"run": {"steps": 12}, "stage_s": {"forward": 0.3, "backward": 0.3}}
    swarm, inside = SimSwarm(root, hosts=4, trainers=2, **shape), list[PeerId]()

    async def live() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=3600.0))
            await eventually(lambda: bool(swarm.events(StepClosed)))
            inside.extend(await sybils_join(swarm, SYBILS))

    run_world(live())
    _fired(inside)
    return len({peer for one in _records(swarm) for peer in voters(one.members, one.hash())} & set(inside))


def evictions(root: Path, who: str) -> int:
    """How many records say that a member is lost, whom a leader tried to evict though it was there."""
    swarm = SimSwarm(root, hosts=4, trainers=3, run={"steps": STEPS})
    _struck(swarm, evicts(victim_of(swarm, STEP, who)))
    return sum(bool(record.absent) for record in _records(swarm))


def forged_rows(root: Path, ends: str) -> int:
    """How many microbatches were decided with the loss that a leader made up."""
    swarm = SimSwarm(root, hosts=4, trainers=2, run={"steps": STEPS}, split={"ends": ends})
    _struck(swarm, forges_rows)
    return sum(one.loss_sum <= 0 for record in _records(swarm) for one in record.committed)


def poisoned_sum(root: Path, hosts: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses by step without and with a replica whose sums are all 1e30, of ``hosts`` of two stages."""
    root.joinpath("clean").mkdir()
    root.joinpath("spoilt").mkdir()
    shape = {**LEARNS, "hosts": hosts, "run": {"steps": steps}}
    clean = SimSwarm(root / "clean", **shape)
    run_world(clean.run())
    swarm = SimSwarm(root / "spoilt", **shape)
    with spoils_sums("host-0", lambda sums: torch.full_like(sums, 1e30)) as spoilt:
        run_world(swarm.run())
    _fired(list(spoilt))
    return _losses(clean), _losses(swarm)


def loss_ratio(clean: Sequence[float], spoilt: Sequence[float]) -> float:
    """Mean loss of the last steps, spoilt beside clean."""
    return mean(spoilt[-LAST:]) / mean(clean[-LAST:])


def _struck(swarm: SimSwarm, attack: Attack) -> None:
    """Play an attack to the end of the run. Raises RuntimeError when it was not made, or the run did not end."""
    with striking(attack, step=STEP) as done:
        run_world(swarm.run(timeout_s=3600.0))
    _fired(done)


def _fired(done: Sequence[Any]) -> None:
    if not done:
        raise RuntimeError("the attack was never made: what it replaces is not called any more")


def _longest_step(swarm: SimSwarm) -> float:
    return max(event.seconds for event in swarm.events(StepClosed) if event.step > 1)


def _losses(swarm: SimSwarm) -> list[float]:
    return [event.loss for event in swarm.peers["bootstrap"].events.of(StepClosed)]


def _records(swarm: SimSwarm) -> list[CloseRecord]:
    """What the founder knows was decided."""
    return [CloseRecord.model_validate_json(json.dumps(one)) for one in swarm.history()]

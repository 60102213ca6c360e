"""Averaging large parts over thin links takes long: it closes, and who is dead meanwhile is noticed as soon as ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import swarm.averaging.deadline
from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import AttemptFailed, PeerLost, RoundDone, StepClosed, SumTaken, TermBegan
from swarm.ids import stage_part
from swarm.models.registry import family_of
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.sim.wires import PayloadWeights

PART_BYTES, ROUND_S = 100_000_000, 150.0
MBIT = PART_BYTES * 8 / ROUND_S / 1e6
"""Of each of two machines: each sends half of its sum and half of the mean."""
STEPS, TARGET = 3, 4
NOTICED_S = 30.0
"""A member that fell silent was known to be lost within this before rounds could take so long."""


@pytest.fixture
def thin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimSwarm:
    """Two replicas whose part stands for one of 100 MB. What is assumed of links is so many times smaller, too, as are
    all the bytes that the product sees."""
    model: dict[str, Any] = {"vocab_size": 300, "dim": 64, "layers": 1, "heads": 1, "context": 8}
    swarm_ = SimSwarm(
        tmp_path,
        hosts=2,
        trainers=1,
        links=Links.parse({"machine": [{"peer": "host-*", "up_mbit_per_s": MBIT, "down_mbit_per_s": MBIT}]}),
        run={"steps": STEPS},
        model=model,
        split={"stages": 1},
        batch={"microbatch_size": 1, "microbatches_per_step": TARGET},
    )
    family = family_of(swarm_.manifest.model)
    stage = next(part for part in family.parts(swarm_.manifest.split) if part.name == stage_part(0))
    factor = PART_BYTES / (4 * family.cost(stage, model["context"]).parameters)
    swarm_.network.weights = PayloadWeights(averages={"host-*": factor})
    assumed = swarm.averaging.deadline.UNMEASURED_BYTES_PER_S
    monkeypatch.setattr(swarm.averaging.deadline, "UNMEASURED_BYTES_PER_S", assumed / factor)
    return swarm_


def rounds(swarm_: SimSwarm) -> list[float]:
    return [event.seconds for event in swarm_.events(RoundDone) if event.part == stage_part(0) and event.members > 1]


def test_round_of_150_s_closes(thin: SimSwarm, tmp_path: Path) -> None:
    run_world(thin.run())
    assert len(rounds(thin)) == 2 * STEPS
    assert min(rounds(thin)) >= ROUND_S
    assert not thin.events(AttemptFailed)
    assert not thin.events(TermBegan), "nobody took the leader for stalled meanwhile"
    links = thin.history()[-1]["links"]
    assert links, "the first rounds measured the links by which later ones are bounded"
    check_run([tmp_path], Limits(target=TARGET, gap_s=1.1 * ROUND_S)).assert_sound()


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_member_that_dies_in_a_long_round_is_noticed_as_soon_as_ever(thin: SimSwarm, fault: str) -> None:
    armed: list[SumTaken] = []
    struck_at: list[float] = []
    lost_at: list[float] = []
    closed_at: dict[int, float] = {}

    def strike() -> None:
        struck_at.append(asyncio.get_running_loop().time())
        getattr(thin, fault)("host-1")

    def hear(event: Any) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(event, SumTaken) and (event.step, event.part) == (2, stage_part(0)) and not armed:
            armed.append(event)
            loop.call_later(ROUND_S / 2, strike)
        elif isinstance(event, PeerLost):
            lost_at.append(loop.time())
        elif isinstance(event, StepClosed):
            closed_at.setdefault(event.step, loop.time())
            if event.step == STEPS and not thin.is_dead("host-1"):
                thin.kill("host-1")  # what stands still never ends

    thin.on_added.append(lambda name: thin.peers[name].events.listeners.append(hear) if name != "host-1" else None)
    run_world(thin.run())
    assert len(struck_at) == 1
    assert lost_at[0] - struck_at[0] < NOTICED_S
    assert closed_at[2] - struck_at[0] < NOTICED_S, "it closed without the one that was lost"
    assert sorted(closed_at)[-1] == STEPS


@pytest.mark.parametrize("mbit", [50, 10])
def test_step_of_tensors_that_fill_their_links_closes_and_none_is_sent_for_ever(mbit: int, tmp_path: Path) -> None:
    """8 MB each. A trainer took its own queues for a longer way, had more under way for it, and no turn ended in
    its time: after the first journeys none came home any more."""
    target, dim, context, activation = 32, 64, 8, 8e6
    swarm_ = SimSwarm(
        tmp_path,
        hosts=4,
        trainers=1,
        links=Links.parse(
            {"default": {"latency_ms": 50}, "machine": [{"peer": "*", "up_mbit_per_s": mbit, "down_mbit_per_s": mbit}]}
        ),
        run={"steps": 1},
        stage_s={"forward": 0.2, "backward": 0.4},
        model={"vocab_size": 300, "dim": dim, "layers": 2, "heads": 1, "context": context},
        split={"stages": 2},
        batch={"microbatch_size": 1, "microbatches_per_step": target},
    )
    swarm_.network.weights = PayloadWeights(activations=activation / (4 * dim * context))
    carried_s = target * 2 * activation * 8 / (mbit * 1e6)  # by the trainer's link, each way
    run_world(swarm_.run(timeout_s=20 * carried_s))
    (closed,) = [event for event in swarm_.peers["bootstrap"].events.of(StepClosed) if event.step == 1]
    assert closed.seconds < 3 * carried_s, "the link was mostly full of what was wanted"
    check_run([tmp_path], Limits(target=target, gap_s=4 * carried_s)).assert_sound()

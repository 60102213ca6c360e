"""Runs that average in 4 bits: no replica differs, and what is rounded off survives those who leave in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.simulate.sim_swarm import SimSwarm
from swarm.events import (
    DigestMismatch,
    Event,
    PeerReady,
    ResidualHandedOver,
    ResidualLost,
    RoundDone,
    RoundVoid,
    StepClosed,
    SumTaken,
    TermBegan,
)
from swarm.models.registry import family_of
from swarm.sim.loop import run_world
from tests.harness.bad_leaders import Attack, never_closes, stops_in_the_middle, striking
from tests.harness.swarm import LocalPeer
from tests.swarms.story import DONE
from tests.swarms.test_churn import leave

INT4H: dict[str, Any] = {"averaging": {"codec": "int4h"}, "optimizer": {"lr": 1e-2, "warmup_steps": 2}}


def swarm_of(root: Path, steps: int, **more: Any) -> SimSwarm:
    shape: dict[str, Any] = {"hosts": 3, "trainers": 2, "split": {"stages": 1}, "run": {"steps": steps}, **INT4H}
    return SimSwarm(root, **(shape | more))


def at_step(peer: LocalPeer, step: int, kind: type[Event], act: Any) -> None:
    """Do something the moment a peer says this of a step."""

    def listen(event: Event) -> None:
        if isinstance(event, kind) and event.step == step and not done:  # type: ignore[attr-defined]
            done.append(event)
            act()

    done: list[Event] = []
    peer.events.listeners.append(listen)


def residual_norm(peer: LocalPeer) -> float:
    assert peer.membership is not None
    part = peer.membership._leaving._handover._holding.part
    assert part is not None
    found = part.feedback.residual
    return 0.0 if found is None else float(found.norm())


def check_4_bits_travelled(swarm: SimSwarm) -> None:
    stage = family_of(swarm.manifest.model).build(family_of(swarm.manifest.model).parts(swarm.manifest.split)[0])
    whole = 4 * sum(parameter.numel() for parameter in stage.parameters())
    sent = [event.bytes_sent for event in swarm.events(RoundDone) if event.part == "stage-0"]
    assert 0 < max(sent) < 0.35 * whole, "the numbers did not travel as 4 bits"


def test_run_that_averages_in_4_bits_learns_and_no_replica_differs(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, 12)
    run_world(swarm.run())
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    assert not swarm.events(DigestMismatch)
    assert not swarm.events(ResidualLost)
    losses = {event.step: event.loss for event in swarm.events(StepClosed)}
    assert losses[12] < 0.8 * losses[1]
    check_4_bits_travelled(swarm)
    assert all(residual_norm(peer) > 0 for name, peer in swarm.peers.items() if name != "bootstrap")


APART: dict[str, Any] = {
    "averaging": {"codec": "int4h", "mode": "local", "local": {"steps": 4}},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 6},
}


def test_replica_that_leaves_in_order_hands_its_residual_over(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, 8)
    run_world(_with(swarm, lambda: at_step(swarm.peers["host-1"], 3, StepClosed, lambda: leave(swarm.peers["host-1"]))))
    assert not swarm.events(DigestMismatch)
    gone = swarm.peers["host-1"]
    given = gone.events.of(ResidualHandedOver)
    assert [event.part for event in given] == ["stage-0"]
    assert given[0].to in {swarm.peers[name].endpoint.peer for name in ("host-0", "host-2")}
    assert not swarm.events(ResidualLost)
    assert max(event.step for event in swarm.events(StepClosed)) == 8


@pytest.mark.parametrize("shape", [{}, APART], ids=["together", "apart"])
def test_residual_of_a_replica_that_dies_is_lost_and_a_void_round_loses_none(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    swarm = swarm_of(tmp_path, 6, **shape)
    run_world(_with(swarm, swarm_killer(swarm, "host-2", 3)))
    assert swarm.is_dead("host-2")
    assert any(event.step == 3 for event in swarm.events(RoundVoid)), "it died too early to break a round"
    assert not swarm.events(DigestMismatch)
    losses = {event.step: event.loss for event in swarm.events(StepClosed)}
    assert max(losses) == 6
    assert losses[6] < losses[1] * (0.9 if shape else 1.0), losses
    lost = swarm.peers["host-0"].events.of(ResidualLost)
    assert [(event.part, event.peer) for event in lost] == [("stage-0", swarm.peers["host-2"].endpoint.peer)]
    check_4_bits_travelled(swarm)
    assert all(residual_norm(swarm.peers[name]) > 0 for name in ("host-0", "host-1"))


@pytest.mark.parametrize("stall", [never_closes, stops_in_the_middle])
def test_residuals_outlive_a_leader_that_is_replaced(stall: Attack, tmp_path: Path) -> None:
    """Its successor repeats the attempt, or goes on with what was averaged."""
    swarm = swarm_of(tmp_path, 6)
    with striking(stall, step=3) as struck:
        run_world(swarm.run(timeout_s=600.0))
    assert struck
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    assert [event for event in swarm.events(TermBegan) if event.step == 3 and event.term > 0]
    assert not swarm.events(DigestMismatch)
    assert not swarm.events(ResidualLost)
    assert all(residual_norm(peer) > 0 for name, peer in swarm.peers.items() if name != "bootstrap")


def test_replica_that_stood_still_comes_back_without_its_residual(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, 40, batch={"microbatch_size": 1, "microbatches_per_step": 2})

    def arm() -> None:
        at_step(swarm.peers["host-2"], 3, SumTaken, lambda: swarm.pause("host-2"))
        at_step(swarm.peers["host-0"], 6, StepClosed, lambda: swarm.resume("host-2"))

    run_world(_with(swarm, arm))
    assert swarm.peers["host-2"].outcome == DONE
    assert [event.again for event in swarm.peers["host-2"].events.of(PeerReady)] == [False, True]
    assert not swarm.events(DigestMismatch)
    back = swarm.peers["host-2"].endpoint.peer
    assert [event.peer for event in swarm.peers["host-2"].events.of(ResidualLost)] == [back]
    assert [event.peer for event in swarm.peers["host-0"].events.of(ResidualLost)] == [back]
    assert residual_norm(swarm.peers["host-2"]) > 0, "it averages again"


def swarm_killer(swarm: SimSwarm, name: str, step: int) -> Any:
    return lambda: at_step(swarm.peers[name], step, SumTaken, lambda: swarm.kill(name))


async def _with(swarm: SimSwarm, arm: Any) -> None:
    await swarm.open()
    arm()
    await swarm.run()

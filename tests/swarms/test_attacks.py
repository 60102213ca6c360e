"""Members gone bad, in whole swarms: that the attack was made, and what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.events import DigestMismatch, PartsCapped, StepClosed
from swarm.optim.part import TrainedPart
from swarm.sim.loop import PEER, run_world
from tests.harness.simulated import SimSwarm

LEARNS: dict[str, Any] = {
    "hosts": 4,
    "trainers": 2,
    "run": {"steps": 10},
    "model": {"layers": 2, "dim": 16, "context": 8},
    "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}


def losses(swarm: SimSwarm) -> list[float]:
    """By step."""
    return [event.loss for event in swarm.peers["bootstrap"].events.of(StepClosed)]


# --- a spoilt sum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [lambda sums: sums * 1e30, lambda sums: torch.full_like(sums, 1e30)])
def test_replica_whose_sum_is_huge_stops_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    honest, spoilt = TrainedPart.contribution, dict[int, list[str]]()

    def contribution(part: TrainedPart, *said: Any) -> torch.Tensor | None:
        sums = honest(part, *said)
        if sums is None or PEER.get() != "host-0":
            return sums
        spoilt[part.step + 1] = [part.spec.name]
        return spoil(sums)

    monkeypatch.setattr(TrainedPart, "contribution", contribution)
    swarm = SimSwarm(tmp_path, **LEARNS)
    run_world(swarm.run())
    assert list(spoilt) == list(range(1, 11))
    told = swarm.peers["bootstrap"].events.of(PartsCapped)
    assert {event.step: list(event.caps) for event in told} == spoilt
    assert not swarm.events(DigestMismatch)
    assert losses(swarm)[-1] < 0.9 * losses(swarm)[0], "with one factor for all nobody learns anything"
    for record in swarm.history()[1:]:
        assert record["clip"] > 1e-3

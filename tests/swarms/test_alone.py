"""One machine with every part: what its stages compute in turns on one device is what a pipeline computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.simulate.local_swarm import LocalSwarm
from swarm.models.layout import state_of
from swarm.optim.swapped_part import SwappedPart
from swarm.residency import RESIDENT
from tests.harness.machines import OnMachines

STAGES = 4
SHAPE: dict[str, dict[str, Any]] = {"split": {"stages": STAGES}, "run": {"steps": 3, "reproducible": True}}


class OneMachine(OnMachines):
    """One, and whoever is left."""


async def test_stages_in_turns_on_one_device_give_the_weights_of_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, most = set[SwappedPart](), 0
    bring = SwappedPart._bring

    def counted(part: SwappedPart) -> None:
        nonlocal most
        bring(part)
        parts.add(part)
        held = [any(not tensor.is_meta for tensor in state_of(one._module).values()) for one in parts]
        most = max(most, sum(held))

    monkeypatch.setattr(SwappedPart, "_bring", counted)
    digests = []
    for kind, hosts in ((LocalSwarm, 4), (OneMachine, 4), (OneMachine, 5)):
        root = tmp_path / f"{kind.__name__}-{hosts}"
        root.mkdir()
        parts.clear()  # one machine's
        swarm = kind(root, hosts=hosts, trainers=2, **SHAPE)
        await swarm.run(timeout_s=120.0)
        digests.append([record["digests"] for record in swarm.history()])
        if isinstance(swarm, OneMachine):
            home = swarm.homes[0]
            assert home is not None
            assert home.residents.moves > STAGES
            assert list((root / "state-0").iterdir()) == []  # files without a name
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) == SHAPE["run"]["steps"] + 1
    assert most == RESIDENT

"""One machine with every part: what its stages compute in turns on one device is what a pipeline computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peers.simulate.local_swarm import LocalSwarm
from swarm.device import Device, DeviceThread, Seat, TakingTurns, resolve_device
from swarm.ids import PeerId
from swarm.models.layout import state_of
from swarm.optim.swapped_part import Home, SwappedPart
from swarm.residency import RESIDENT

STAGES = 4
SHAPE: dict[str, dict[str, Any]] = {"split": {"stages": STAGES}, "run": {"steps": 3, "reproducible": True}}
HERE = {f"host-{stage}" for stage in range(STAGES)}


class OneMachine(LocalSwarm):
    """A swarm of which a host of each stage is on one device, beside the first trainer; one more host is not."""

    def __init__(self, root: Path, **shape: Any) -> None:
        super().__init__(root, **shape)
        self.device, self.turns = DeviceThread(resolve_device("cpu")), TakingTurns()
        self.home, self.there = Home(directory=root / "state"), set[PeerId]()

    def _device(self, name: str) -> Device:
        return Seat(self.device, self.turns, name) if name in HERE else super()._device(name)

    async def _add(self, name: str, role: Any, *more: Any, **settings: Any) -> PeerId:
        peer = await super()._add(name, role, *more, **settings)
        one = self.peers[name]
        if name in HERE:
            self.there.add(peer)
            one.around = replace(one.around, home=self.home)
        elif name == "trainer-0":
            one.around = replace(one.around, siblings=self.there)
        return peer


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
        swarm = kind(root, hosts=hosts, trainers=2, **SHAPE)
        await swarm.run(timeout_s=120.0)
        digests.append([record["digests"] for record in swarm.history()])
        if isinstance(swarm, OneMachine):
            await swarm.device.close()
            assert swarm.home.residents.moves > STAGES
            assert list((root / "state").iterdir()) == []  # files without a name
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) == SHAPE["run"]["steps"] + 1
    assert most == RESIDENT

"""Swarms whose hosts are on machines with every part: one device a machine, on which its stages take turns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.simulate.local_swarm import LocalSwarm
from swarm.device import Device, Seat, TakingTurns
from swarm.ids import PeerId
from swarm.optim.swapped_part import Home

NAME = re.compile(r"(host|trainer)-(\d+)")


class OnMachines(LocalSwarm):
    """Mix it into a swarm. Of ``machines`` each has a trainer and a host of every stage; who is left has one of its
    own."""

    machines = 1

    def home_of(self, machine: int, root: Path) -> Home | None:
        """Return where the stages of a machine are; None: all on its device."""
        return Home(directory=root / f"state-{machine}")

    def machine_of(self, name: str) -> int | None:
        """Return the machine of a peer; None for one of its own."""
        found, stages = NAME.fullmatch(name), self.manifest.split.stages
        if found is None:
            return None
        machine = int(found[2]) // stages if found[1] == "host" else int(found[2])
        return machine if machine < self.machines else None

    async def open(self) -> None:
        """See :meth:`LocalSwarm.open`."""
        self.turns = defaultdict[int, TakingTurns](TakingTurns)
        self.homes: dict[int, Home | None] = {n: self.home_of(n, self.root) for n in range(self.machines)}
        self._there = defaultdict[int, set[PeerId]](set)
        self._shared: dict[int, Device] = {}
        await super().open()

    def _device(self, name: str) -> Device:
        make: Callable[[str], Device] = super()._device
        if (machine := self.machine_of(name)) is None:
            return make(name)
        if machine not in self._shared:
            self._shared[machine] = make(name)
        device = self._shared[machine]
        on_turn = self.homes[machine] is not None and name.startswith("host")
        return Seat(device, self.turns[machine], name) if on_turn else device

    async def _add(self, name: str, role: Any, *more: Any, **settings: Any) -> PeerId:
        machine = self.machine_of(name)
        if machine is not None and role == "stage":  # one of each
            settings["stage"] = int(name.rpartition("-")[2]) % self.manifest.split.stages
        peer = await super()._add(name, role, *more, **settings)
        if machine is not None:
            one = self.peers[name]
            self._there[machine].add(peer)
            home = self.homes[machine] if role == "stage" else None
            one.around = replace(one.around, home=home, siblings=self._there[machine])
        return peer

"""One run of the benchmark ``solo``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

from peers.simulate.local_swarm import LocalSwarm
from peers.simulate.sim_swarm import SimSwarm
from swarm.averaging.deadline import UNMEASURED_BYTES_PER_S
from swarm.events import StepClosed
from swarm.optim.swapped_part import Home
from swarm.residency import RESIDENT, Residents
from swarm.sim.links import Fate, Traffic
from tests.benchmarks._wan_cells import MICROBATCHES, REPLICAS, Cell
from tests.benchmarks._wan_swarm import WanSwarm, weights
from tests.harness.machines import OnMachines

STAGES, WARM_UP = 4, 1
LARGE = {"vocab_size": 300, "dim": 256, "layers": 8, "heads": 4, "context": 128}


def play(root: Path, *, kind: str, steps: int, of: int) -> dict[str, Any]:
    """Play one run to its end.

    Args:
        root: An empty directory.
        kind: ``swapped``, ``resident`` or ``graphs``; ``same``: what stages compute in turns beside what a pipeline
            does; ``pipeline`` or ``alone``: machines on thin links, which hold one stage each, or all.
        steps: How many; the first is not counted.
        of: Microbatches a step; on thin links the part in MB.

    Returns:
        ``rate``: microbatches a second; of ``same`` ``max_abs_diff``.
    """
    if kind == "same":
        return {"max_abs_diff": _difference(root, steps, of)}
    return {"rate": _on_thin_links(root, kind, steps, of) if kind in _THIN else _here(root, kind, steps, of)}


class _Swapped(OnMachines):
    most = RESIDENT

    def home_of(self, machine: int, root: Path) -> Home | None:
        """See :meth:`OnMachines.home_of`."""
        return Home(residents=Residents(self.most), directory=root / "state")


class _Resident(_Swapped):
    most = STAGES


class _Graphs(OnMachines):
    def home_of(self, machine: int, root: Path) -> Home | None:
        """See :meth:`OnMachines.home_of`."""
        return None


def _run(root: Path, kind: type[LocalSwarm], steps: int, microbatches: int, **more: Any) -> LocalSwarm:
    root.mkdir(exist_ok=True)
    swarm = kind(
        root,
        hosts=STAGES,
        max_in_flight=microbatches,
        split={"stages": STAGES},
        run={"steps": steps, **more.pop("run", {})},
        batch={"microbatch_size": 2, "microbatches_per_step": microbatches},
        **more,
    )
    asyncio.run(swarm.run(timeout_s=600.0))
    return swarm


def _here(root: Path, kind: str, steps: int, microbatches: int) -> float:
    kinds = {"swapped": _Swapped, "resident": _Resident, "graphs": _Graphs}
    swarm = _run(root, kinds[kind], steps, microbatches, model=LARGE)
    closed = {event.step: event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed)}
    counted = [closed[step] for step in range(WARM_UP + 1, steps + 1)]
    return microbatches * len(counted) / sum(counted)


def _difference(root: Path, steps: int, microbatches: int) -> float:
    """Return 0.0 where all weights of all steps have the same digests, else infinity: digests say no more."""
    exact = {"reproducible": True}
    runs = [_run(root / kind.__name__, kind, steps, microbatches, run=exact) for kind in (LocalSwarm, _Swapped)]
    found = [[record["digests"] for record in swarm.history()] for swarm in runs]
    return 0.0 if found[0] == found[1] else float("inf")


# --- on thin links ----------------------------------------------------------------------------------------------------


class _OnLinks(OnMachines, SimSwarm):
    """Machines with every part, each with one link for all of its members, which is not between these."""

    machines = STAGES * REPLICAS

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.network.traffic = _BetweenMachines(self)

    def home_of(self, machine: int, root: Path) -> Home | None:
        """See :meth:`OnMachines.home_of`."""
        return Home()


class _BetweenMachines(Traffic):
    def __init__(self, swarm: _OnLinks) -> None:
        super().__init__(swarm.network.traffic.links)
        self._swarm = swarm

    def fate(self, source: str, target: str, size: int, now: float, *, in_line: bool | None = None) -> Fate:
        """See :meth:`Traffic.fate`."""
        one, other = (name if (at := self._swarm.machine_of(name)) is None else f"{at}" for name in (source, target))
        return Fate(0.0) if one == other else super().fate(one, other, size, now, in_line=in_line)


class _Alone(WanSwarm):
    kind = _OnLinks
    hosts, trainers = STAGES * _OnLinks.machines, _OnLinks.machines


_THIN: dict[str, type[WanSwarm]] = {"pipeline": WanSwarm, "alone": _Alone}


def _on_thin_links(root: Path, kind: str, steps: int, part_mb: int) -> float:
    """As many devices with stages in both, and the same links; a pipeline's trainers have machines of their own."""
    cell = Cell(mbit=50, rtt=100, activation_mb=8, part_mb=part_mb)
    swarm = _THIN[kind](root, cell, steps=steps, seed=1, overrides={})
    heavier = max(weights(cell, swarm.swarm.manifest).averages.values())  # than what the product sees
    with mock.patch("swarm.averaging.deadline.UNMEASURED_BYTES_PER_S", UNMEASURED_BYTES_PER_S / heavier):
        swarm.play()
    seconds = swarm.seconds()
    return MICROBATCHES * (steps - WARM_UP) / sum(seconds[step] for step in range(WARM_UP + 1, steps + 1))

"""One run of the benchmark ``solo``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from peers.simulate.local_swarm import LocalSwarm
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import StepClosed
from swarm.membership.rules import rules_of
from swarm.optim.swapped_part import Home
from swarm.residency import RESIDENT, Residents
from swarm.sim.links import Fate, Links, Traffic
from swarm.sim.loop import run_world
from tests.benchmarks._wan_cells import MICROBATCHES, REPLICAS, STAGES, Cell
from tests.benchmarks._wan_swarm import FORWARD_SHARE, LONGEST_S, MODEL, WanSwarm, weighed, weights
from tests.harness.machines import OnMachines

DEVICES = STAGES * REPLICAS
"""Of the pipeline's stage hosts."""
MACHINES = 2
"""That are played; their parts weigh what makes each carry what it would among DEVICES of them, and they have their
share of a step."""
WEIGHT = ((DEVICES - 1) / DEVICES) / ((MACHINES - 1) / MACHINES)
SHARE = MICROBATCHES // DEVICES
"""Of a step for each machine."""
WARM_UP = 1
LARGE = {"vocab_size": 300, "dim": 256, "layers": 8, "heads": 4, "context": 128}


def play(root: Path, *, kind: str, steps: int, of: int) -> dict[str, Any]:
    """Play one run to its end.

    Args:
        root: An empty directory.
        kind: ``pipeline`` or ``alone``, in virtual time; ``swapped``, ``resident`` or ``graphs``, in real time;
            ``same``: what stages compute in turns beside what a pipeline does.
        steps: How many; the first is not counted, nor, in virtual time, the last.
        of: In virtual time the part's MB; in real time microbatches a step.

    Returns:
        ``rate``: microbatches a second and device; of ``same`` ``max_abs_diff``.
    """
    if kind == "same":
        return {"max_abs_diff": _difference(root, steps, of)}
    if kind in ("pipeline", "alone"):
        return {"rate": _far_apart(root, kind, steps, of)}
    return {"rate": _here(root, kind, steps, of)}


# --- in virtual time -------------------------------------------------------------------------------------------------


class _Far(OnMachines, SimSwarm):
    machines = MACHINES


class _MachineTraffic(Traffic):
    """Peers of a machine share its link, and need none among themselves."""

    swarm: _Far

    def fate(self, source: str, target: str, size: int, now: float, *, in_line: bool | None = None) -> Fate:
        """See :meth:`Traffic.fate`."""
        at = [self._of(source), self._of(target)]
        return Fate(0.0) if at[0] == at[1] else super().fate(at[0], at[1], size, now, in_line=in_line)

    def _of(self, name: str) -> str:
        machine = self.swarm.machine_of(name)
        return name if machine is None else f"machine-{machine}"


def _far_apart(root: Path, kind: str, steps: int, part_mb: int) -> float:
    each = part_mb if kind == "pipeline" else round(WEIGHT * part_mb)
    cell = Cell(mbit=50, rtt=100, activation_mb=8, part_mb=each)
    if kind == "pipeline":
        played = WanSwarm(root, cell, steps=steps, seed=1, overrides={})
        played.play()
        seconds = played.seconds()
    else:
        swarm = _alone(root, cell, steps)
        closed = swarm.peers["bootstrap"].events.of(StepClosed)
        seconds = {event.step: event.seconds for event in closed}
    counted = [seconds[step] for step in range(WARM_UP + 1, steps)]
    return SHARE * len(counted) / sum(counted)


def _alone(root: Path, cell: Cell, steps: int) -> _Far:
    forward_s = FORWARD_SHARE * cell.compute_s
    traffic = _MachineTraffic(Links.parse(cell.links | {"seed": 1}))
    swarm = _Far(
        root,
        hosts=STAGES * MACHINES,
        trainers=MACHINES,
        stage_s={"forward": forward_s, "backward": cell.compute_s - forward_s},
        run={"steps": steps, "seed": 1},
        model=MODEL,
        split={"stages": STAGES},
        batch={"microbatch_size": 1, "microbatches_per_step": SHARE * MACHINES},
    )
    traffic.swarm = swarm
    swarm.network.traffic = traffic
    heavy = swarm.network.weights = weights(cell, swarm.manifest)

    def as_heavy(manifest: Any) -> Any:
        rules = rules_of(manifest)
        return replace(rules, codecs=weighed(rules.codecs, cell, heavy))

    with mock.patch("swarm.membership.run.rules_of", as_heavy):
        run_world(swarm.run(timeout_s=LONGEST_S))
    return swarm


# --- in real time ----------------------------------------------------------------------------------------------------


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

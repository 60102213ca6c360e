"""One run of the benchmark ``solo``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from peers.simulate.local_swarm import LocalSwarm
from swarm.events import StepClosed
from swarm.optim.swapped_part import Home
from swarm.residency import RESIDENT, Residents
from tests.harness.machines import OnMachines

STAGES, WARM_UP = 4, 1
LARGE = {"vocab_size": 300, "dim": 256, "layers": 8, "heads": 4, "context": 128}


def play(root: Path, *, kind: str, steps: int, of: int) -> dict[str, Any]:
    """Play one run to its end.

    Args:
        root: An empty directory.
        kind: ``swapped``, ``resident`` or ``graphs``; ``same``: what stages compute in turns beside what a pipeline
            does.
        steps: How many; the first is not counted.
        of: Microbatches a step.

    Returns:
        ``rate``: microbatches a second; of ``same`` ``max_abs_diff``.
    """
    if kind == "same":
        return {"max_abs_diff": _difference(root, steps, of)}
    return {"rate": _here(root, kind, steps, of)}


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

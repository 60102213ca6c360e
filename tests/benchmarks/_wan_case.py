"""One run of the benchmark ``wan``: a mode in a cell, with a seed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks._wan_cells import MICROBATCHES, OVERRIDES, REPLICAS, Cell, bound
from tests.benchmarks._wan_swarm import WanSwarm
from tests.benchmarks._wan_timeline import shares

WARM_UP = 3
"""Steps that are not counted: trainers find out how many journeys to keep under way."""


def play(root: Path, *, mode: str, cell: Mapping[str, int], seed: int, steps: int) -> dict[str, Any]:
    """Play one run to its end.

    Args:
        root: An empty directory.
        mode: One of ``_wan_cells.MODES``.
        cell: The fields of its :class:`~tests.benchmarks._wan_cells.Cell`.
        seed: Of the run and its links.
        steps: How many are played; those after the first WARM_UP are counted, if there are more, but for the last, in
            which nothing is fed ahead.

    Returns:
        Its figures, ready for JSON. Equal arguments give equal ones, but for ``cpu_s``.
    """
    began, setting = time.process_time(), Cell(**cell)
    counted = range(min(WARM_UP, steps - 2) + 1, steps)
    swarm = WanSwarm(root, setting, steps=steps, seed=seed, overrides=OVERRIDES[mode])
    swarm.play()
    seconds = swarm.seconds()
    parts = {kind: round(share, 4) for kind, share in shares(swarm.host_steps(counted)).items()}
    took_s = sum(seconds[step] for step in counted)
    util = len(counted) * MICROBATCHES * setting.compute_s / REPLICAS / took_s
    return {
        "mode": mode,
        "cell": setting.name,
        "seed": seed,
        "step_s": round(took_s / len(counted), 3),
        "util": round(util, 4),
        "share_of_bound": round(util / bound(setting, mode), 4),
        **parts,
        **swarm.judged(),
        "early": round(swarm.early(counted), 4),
        "cpu_s": round(time.process_time() - began, 1),
    }

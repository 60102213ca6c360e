"""Small snapshots for the tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from swarm.ids import PartName, stage_part
from swarm.models.layout import FlatLayout
from swarm.state.snapshot import Snapshot

STAGE = stage_part(0)
LAYOUT = FlatLayout.from_shapes([("a", (3, 5)), ("b", (7,))])


def snapshot(*, step: int = 0, part: PartName = STAGE, layout: FlatLayout = LAYOUT, seed: int = 0) -> Snapshot:
    """Random numbers in the slots, zeros in the gaps."""
    generator, vectors = torch.Generator().manual_seed(seed), []
    for _ in range(3):
        flat = torch.zeros(layout.elements)
        for view in layout.views(flat).values():
            view.copy_(torch.randn(view.shape, generator=generator))
        vectors.append(flat)
    params, exp_avg, exp_avg_sq = vectors
    return Snapshot(part=part, step=step, layout=layout, params=params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def changed(**fields: Any) -> Snapshot:
    """:func:`snapshot` with other fields."""
    return dataclasses.replace(snapshot(), **fields)


async def inline(work: Callable[..., Any], *args: Any) -> Any:
    """Runs on the loop what else runs in a thread."""
    return work(*args)


class StillClock:
    """Time that moves when told, and when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now

    def wall(self) -> float:
        """See :class:`swarm.clock.Clock`."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """See :class:`swarm.clock.Clock`."""
        self.now += seconds

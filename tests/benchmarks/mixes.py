"""How much of what unlike replicas can do a swarm gets out of them: random mixes of speeds, links and regions."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tests.benchmarks.runner import Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._mixes_play import Mix, MixFigures

MIXES = {Size.SMOKE: 3, Size.DEFAULT: 50, Size.FULL: 200}
UNTIL_S, FROM_S = 100.0, 40.0
"""Virtual seconds that are played, and after which they count: averages have settled then."""
MEAN_TARGET, WORST_TARGET = 0.97, 0.93
KEYS = ("mixes_mean", "mixes_mean_target", "mixes_worst", "mixes_worst_target", "far_share", "mixes")


async def run(size: Size) -> Result:
    """Microbatches a second of each mix over the bound: the slowest stage's replicas all busy, or their links."""
    import asyncio

    from tests.benchmarks._mixes_play import drawn

    mixes = [drawn(seed) for seed in range(1, MIXES[size] + 1)]
    until, since = (30.0, 10.0) if size is Size.SMOKE else (UNTIL_S, FROM_S)
    found = [await asyncio.to_thread(_played, mix, until, since) for mix in mixes]
    shares = [one.share for one in found]
    return Result(
        columns=("mix", "stages", "replicas", "trainers", "boundary_mb", "bound_s", "share", "far_share", "under_way"),
        rows=[
            [mix.seed, mix.stages, len(mix.hosts), len(mix.trainers), mix.boundary_bytes / 1e6, *map(_short, figures)]
            for mix, one in zip(mixes, found, strict=True)
            for figures in [(mix.bound, one.share, one.far, one.under_way)]
        ],
        summary={
            "mixes_mean": round(statistics.fmean(shares), 4),
            "mixes_mean_target": MEAN_TARGET,
            "mixes_worst": round(min(shares), 4),
            "mixes_worst_target": WORST_TARGET,
            "far_share": round(statistics.fmean(one.far for one in found), 3),
            "mixes": len(mixes),
        },
        notes=(
            "bound_s: microbatches a second of the slowest stage, of each replica the slower of computing and sending; "
            "share: what was reached of it; under_way: journeys of all trainers",
            f"the product's wiring and flight control alone, on one heap: no steps, no deaths, no codecs; {until:g} "
            f"virtual seconds, of which those after {since:g} count",
        ),
    )


def _played(mix: Mix, until: float, since: float) -> MixFigures:
    from tests.benchmarks._mixes_play import MixPlay

    return MixPlay(mix).run(until_s=until, from_s=since)


def _short(figure: float) -> float:
    return round(figure, 4)

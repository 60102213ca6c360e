"""How many journeys a trainer keeps in flight: enough to keep the slowest stage busy, no more."""

from __future__ import annotations

import math
from collections.abc import Mapping

MIN_IN_FLIGHT = 2
MAX_IN_FLIGHT = 32


def journeys_in_flight(
    round_trip_s: float | None, stage_s: Mapping[int, float], replicas: Mapping[int, int], trainers: int
) -> tuple[int, str]:
    """Little's law: a stage of r replicas that computes t seconds on a microbatch serves r/t per second; shared by all
    trainers, this trainer's part of the slowest stage's rate times its round trip is what must be under way.

    ``stage_s`` is a stage's forward and backward together; ``round_trip_s`` is the median time of a whole journey
    *without* queueing, None while unknown.
    Returns (journeys, reason), between MIN_IN_FLIGHT and MAX_IN_FLIGHT.
    """
    if round_trip_s is None or not stage_s:
        return MIN_IN_FLIGHT * 2, "nothing measured yet"
    slowest = max(stage_s, key=lambda stage: stage_s[stage] / replicas[stage])
    rate = replicas[slowest] / max(stage_s[slowest], 1e-6) / max(trainers, 1)
    wanted = math.ceil(round_trip_s * rate) + 1
    bounded = min(MAX_IN_FLIGHT, max(MIN_IN_FLIGHT, wanted))
    return bounded, f"stage {slowest} serves {rate:.1f} microbatches/s for a round trip of {round_trip_s:.3f} s"

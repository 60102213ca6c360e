"""How many journeys a trainer keeps in flight: enough to keep the slowest stage busy, no more."""

from __future__ import annotations

import math
from collections.abc import Mapping

MIN_IN_FLIGHT = 2
MAX_IN_FLIGHT = 32
WAITING = 3.0
"""Journeys that wait at a busy replica, on average, for each that it computes. Journeys do not arrive evenly: with none
to spare every third of a replica's seconds is idle. On 3 stages of 4 simulated replicas (`goodput` without churn) two
made 0.90 of what they can do, three 0.91; a step's filling, emptying and closing leave 0.95."""


def journeys_in_flight(
    round_trip_s: float | None, stage_s: Mapping[int, float], replicas: Mapping[int, int], trainers: int
) -> tuple[int, str]:
    """Little's law: a stage of r replicas that computes t seconds on a microbatch serves r/t per second; shared by all
    trainers, this trainer's part of the slowest stage's rate times its round trip is what must be under way; and
    WAITING times what is being computed waits, so that replicas need not.

    ``stage_s`` is a stage's forward and backward together; ``round_trip_s`` is the median time of a whole journey
    *without* queueing, None while unknown.
    Returns (journeys, reason), between MIN_IN_FLIGHT and MAX_IN_FLIGHT.
    """
    if round_trip_s is None or not stage_s:
        return MIN_IN_FLIGHT * 2, "nothing measured yet"
    slowest = max(stage_s, key=lambda stage: stage_s[stage] / replicas[stage])
    rate = replicas[slowest] / max(stage_s[slowest], 1e-6) / max(trainers, 1)
    waiting_s = WAITING * sum(stage_s.values())
    wanted = math.ceil((round_trip_s + waiting_s) * rate) + 1
    bounded = min(MAX_IN_FLIGHT, max(MIN_IN_FLIGHT, wanted))
    return bounded, f"stage {slowest} serves {rate:.1f} microbatches/s for a round trip of {round_trip_s:.3f} s"

"""Bound how long a part's averaging may take, by the bytes that it has to move and the links that were measured. Pure.

What members say of links is only a claim, so a deadline follows a slow link to a bound: a member that calls itself, or
the others of a small part, as good as cut off gains some times what it would have had anyway, and never more than
:data:`LONGEST_S`. Who is dead is found by the health watch and by broken connections, long before any deadline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high
from typing import NamedTuple

MARGIN = 2.0
"""A round may take so many times what its bytes take: the link carries other things, and others begin later."""
UNMEASURED_BYTES_PER_S = 1_250_000
"""Of a link over which nothing large has gone yet: 10 Mbit/s. With the margins two members close their first round over
links of 3 Mbit/s and more, and over thinner ones where it takes no longer than any question may."""
SLOWER = 8
"""A link counts as at most so many times as slow as the middle one of its part, and as an unmeasured one."""
LONGEST_S = 3600.0
"""Of any round, unless every question may take longer."""


class RoundDeadline(NamedTuple):
    """How long a part's averaging may take, and why."""

    seconds: float
    reason: str


def round_deadline(
    part_bytes: int, rates: Sequence[int], *, ordinary_s: float, one_reduces: bool = False
) -> RoundDeadline:
    """Return how long the leader of a step waits for the averaging of a part; all members compute the same but for
    ``ordinary_s``, which bounds it from below.

    With K members no strategy that spreads the work, and no schedule, has one of them move more than 2·⌈log₂ K⌉ times
    the part in a direction: a star or a ring 2, a grid 2 in each of its rounds, a butterfly 1 at each level.

    Args:
        part_bytes: Of the part's sum.
        rates: Bytes a second of each replica's link, as the last record has them; 0 where nothing was measured.
        ordinary_s: What any question may take.
        one_reduces: One member reduces for all, which moves the part K - 1 times.
    """
    members = len(rates)
    if members < 2 or part_bytes <= 0:
        return RoundDeadline(ordinary_s, "there is nothing to move")
    known = [rate or UNMEASURED_BYTES_PER_S for rate in rates]
    believed = max(min(known), median_high(known) / SLOWER, UNMEASURED_BYTES_PER_S / SLOWER)
    times = max(2 * math.ceil(math.log2(members)), members - 1 if one_reduces else 0)
    needed_s = MARGIN * times * part_bytes / believed
    said = f"{part_bytes} bytes up to {times} times at {believed:.0f} bytes/s, and as long again: {needed_s:.3g} s"
    if needed_s <= ordinary_s:
        return RoundDeadline(ordinary_s, f"{said}, less than any question may take")
    if needed_s > LONGEST_S:
        return RoundDeadline(max(LONGEST_S, ordinary_s), f"{said}, more than any round may take")
    return RoundDeadline(needed_s, said)


def rate_needed(
    part_bytes: int, others: Sequence[int], own: float, *, ordinary_s: float, one_reduces: bool = False
) -> int:
    """Return how many bytes a second a member that keeps to ``own`` would have to move for its part to be averaged in
    time; 0 where ``own`` is enough, as far as can be told. ``others`` are the rates of the part's other replicas, as
    for :func:`round_deadline`: of a member much slower than they are a deadline knows nothing (:data:`SLOWER`).

    Of any strategy in which members share the work each sends nearly twice the part among many, once among two.
    """
    if not others:
        return 0
    members = len(others) + 1
    moved = 2 * part_bytes * (members - 1) / members
    rates = [*others, max(1, int(own))]
    allowed_s = round_deadline(part_bytes, rates, ordinary_s=ordinary_s, one_reduces=one_reduces).seconds
    return math.ceil(moved / allowed_s) if moved > own * allowed_s else 0

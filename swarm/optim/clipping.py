"""Bound how far one step may go: each part's mean by itself first, then the whole model's by one factor; and what one
microbatch may bring to it. Pure.

One factor for all (Pascanu et al., arXiv 1211.5063) lets one corrupt mean of a part stop all others: a norm of
1e30 there scales everybody else's gradient to nothing. So a part whose norm is far above what is usual among the parts
of the same step is capped before the norms are added up. What is usual is taken from the step itself, and from nothing
that a peer would have to remember: all who know the parts' norms, as a joiner does, find the same, in the first step
too, and nobody can lead it away over many steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from swarm.ids import PartName, stage_of

CLIP_EPSILON = 1e-6
"""Keeps the division defined for a zero norm; the same as ``torch.nn.utils.clip_grad_norm_`` uses."""

FAR_OUT = 64.0
"""So many times the lower median of the stages' norms is no honest part's. (Measured, in small models of one to four
stages: at most 12.)"""

SMALLEST = 2.0**-126
"""The smallest normal float32. A factor below it leaves nothing of the mean, and processors differ in what they make of
smaller numbers."""


Lengths = tuple[float, float]
"""L2 norms of a microbatch: of its gradient of a part's parameters, and of the gradient that comes to the part for it;
0 where there is none."""

FASTEST = 2.0
"""What is usual of a microbatch moves by such a factor a step at most."""

LONGEST = 1e100
"""No finite float32 gradient of a part is as long."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """What is done to the means of a step: ``norm`` is that of the whole model with each part capped, ``clip`` the
    factor for all, and ``caps`` are those of the parts that are capped: none in an honest step."""

    norm: float
    clip: float
    caps: Mapping[PartName, float]


def clip_factor(norm: float, clip_norm: float) -> float:
    """One factor for the whole model: at most 1."""
    return min(1.0, clip_norm / (norm + CLIP_EPSILON))


def clip_parts(sq_norms: Mapping[PartName, float], clip_norm: float) -> Clipping:
    """Cap the parts that are far out, and clip all together. ``sq_norms`` are squared L2 norms, finite, and are added
    up in the order of the names, so that everybody gets the same bits.

    A part far out is scaled to what is usual, or to what it would be clipped to if it were alone: whichever is larger.
    So where the *others* are the liars, with norms of next to nothing, it loses no more than the clip factor takes
    anyway; and where it is the liar, the others are clipped as if its norm were like theirs, or ``clip_norm``. All
    parts of a stage count as one: of several that share its microbatches each may have seen few, and be short for that.
    """
    usual, total, caps = _usual_norm(sq_norms), 0.0, {}
    for part, square in sorted(sq_norms.items()):
        norm = math.sqrt(square)
        if norm > FAR_OUT * usual and (kept := max(usual, min(norm, clip_norm))) < norm:
            caps[part] = kept / norm
            square = kept * kept
        total += square
    norm = math.sqrt(total)
    return Clipping(norm, clip_factor(norm, clip_norm), caps)


def _usual_norm(sq_norms: Mapping[PartName, float]) -> float:
    stages = dict[PartName | int, float]()
    for part, square in sorted(sq_norms.items()):
        stage = stage_of(part)
        one = part if stage is None else stage
        stages[one] = stages.get(one, 0.0) + square
    squares = (stages if len(stages) > 1 else sq_norms).values()
    return median_low([math.sqrt(square) for square in squares if square > 0.0] or [0.0])


def usual_lengths(before: Lengths, said: Iterable[Lengths]) -> Lengths:
    """Return what is usual of a part's microbatches, given what was and what its replicas found, each the median of its
    own. Of these the lower middle counts; where nobody has found any, what was."""
    found = list(said)
    return _usual(before[0], [one for one, _ in found]), _usual(before[1], [one for _, one in found])


def _usual(before: float, said: Iterable[float]) -> float:
    now = median_low([length for length in said if length] or [before])
    return min(max(now, before / FASTEST), before * FASTEST) if before else now


def shrunk(length: float, most: float) -> float:
    """Return what a gradient of this length is multiplied with so that it is no longer than ``most``: at most 1."""
    return 1.0 if length <= most else most / length


def factor(clip: float, cap: float) -> float:
    """Return what a part's mean is multiplied with, ``cap`` being its own: the product, and 0 where that is no normal
    float32."""
    product = clip * cap
    return product if product >= SMALLEST else 0.0

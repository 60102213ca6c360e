"""What a plan is set beside: one machine alone, its layers swapped in and out, rows cut into slices, and layers cut
across devices of one peer. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from swarm.planning.predict import BACKWARD, PROCESS_BYTES, UPDATE_S, StepForecast
from swarm.planning.workload import PeerClass, Workload

HOST_LINK = 24e9
"""Bytes a second between a host's memory and its device: PCIe 4.0 with 16 lanes."""
WEIGHT_BYTES = 4
SLICES = 4
"""Of a row, that are reckoned with."""
FULL_PIPELINE = 4
"""So many microbatches for each stage keep a pipeline's share of idle time small (GPipe: Huang et al., arXiv
1811.06965, §3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneForecast:
    """One machine with the whole model. ``way`` is ``whole``, ``swap`` for one whose device holds some layers at a time
    (ATOM: arXiv 2403.10504), or ``none``. ``crossing`` is its computing of a layer over a boundary's time on the link:
    c ÷ tx; ``hidden`` what of swapping computing hides, g·c ÷ swap; ``less_sent`` whether a step of a pipeline sends
    more than averaging the whole model does: 4A·m > 8(P_model − P_stage)."""

    name: str
    way: str
    step_s: float
    crossing: float
    hidden: float
    less_sent: bool

    @property
    def worth_it(self) -> bool:
        """Return whether both conditions hold under which a pipeline loses against machines with the whole model."""
        return self.way != "none" and self.crossing < min(1.0, self.hidden) and self.less_sent


def alone(work: Workload, one: PeerClass, plan: StepForecast) -> AloneForecast:
    """Forecast a step of one machine of a class that does all of it, all variants included, and exchanges nothing."""
    tokens, path, whole = work.rows * work.context, work.whole, reduce(add, (part.needs for part in plan.parts))
    compute_s = BACKWARD * tokens * path.flops / one.flops + UPDATE_S * whole.parameters
    count, rows = plan.microbatches, plan.layout.rows
    graph = rows * max(path.thrifty, work.layer.graph)  # checkpointing, one microbatch at a time
    host = one.memory if one.host_memory is None else one.host_memory
    fits_host = whole.held + PROCESS_BYTES + (graph if one.host_memory is None else 0) <= host
    fits_device = one.host_memory is None or whole.apart + graph <= one.memory
    swap_s = 3 * WEIGHT_BYTES * whole.parameters / HOST_LINK  # in, in again for the backward, its gradients out
    way = "whole" if fits_host and fits_device else "swap" if fits_host else "none"
    layer_s = work.layer.flops * rows * work.context / one.flops
    layer_swap_s = WEIGHT_BYTES * work.layer.parameters / HOST_LINK
    stage = max(part.needs.parameters for part in plan.parts)
    return AloneForecast(
        name=one.name,
        way=way,
        step_s=math.inf if way == "none" else max(compute_s, swap_s) if way == "swap" else compute_s,
        crossing=layer_s / (rows * work.activation_bytes / one.slower_way),
        hidden=count * layer_s / layer_swap_s if layer_swap_s else math.inf,
        less_sent=2 * rows * (work.activation_bytes + work.gradient_bytes) * count > 8 * (whole.parameters - stage),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceForecast:
    """What cutting rows into slices that follow each other through the stages would save (TeraPipe: Li et al., arXiv
    2102.07988: T = Σt + (K − 1)·max t). ``under_way`` microbatches pass a replica of the slowest part in a step; it
    pays below ``enough``, 4K."""

    under_way: int
    enough: int
    saves_s: float

    @property
    def worth_it(self) -> bool:
        """Return whether it would save time."""
        return self.under_way < self.enough and self.saves_s > 0.0


def slices(plan: StepForecast) -> SliceForecast:
    """Reckon with :data:`SLICES` of a row in one plan: of the filling all but the first slice's is saved."""
    stages = len(plan.layout.stages)
    slowest = min(range(len(plan.parts)), key=lambda at: plan.parts[at].rate)
    replicas = max(1, sum(plan.layout.places[slowest]))
    return SliceForecast(
        under_way=math.ceil(plan.microbatches / replicas),
        enough=FULL_PIPELINE * stages,
        saves_s=plan.filling_s * (1 - 1 / SLICES),
    )


DEVICES = 2
"""Of one peer, that are reckoned with."""
LAYER_CROSSINGS = 4
"""Hidden states that go to another device or come from it in one pass through a layer: to attention and feed-forward,
and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForecast:
    """What cutting each layer across :data:`DEVICES` of a peer gives at the slowest stage: seconds of a microbatch on
    one device, and on several, of which ``between_s`` are for what goes from one to the other. Cut by layers, as stages
    of their own, the same devices take ``whole_s`` ÷ DEVICES each, and send a hidden state once."""

    stage: str
    layers: int
    whole_s: float
    tensor_s: float
    between_s: float

    @property
    def worth_it(self) -> bool:
        """Return whether it saves time where no layers are left to cut between."""
        return self.layers == 1 and self.tensor_s < self.whole_s


def tensors(work: Workload, classes: Sequence[PeerClass], plan: StepForecast) -> TensorForecast | None:
    """Reckon with :data:`DEVICES` such devices in place of each one at the slowest stage, on one machine; None where
    that stage computes on no device apart from its host."""
    again, rows = plan.layout.recompute, plan.layout.rows
    at = min(range(len(plan.parts) - 1), key=lambda at: plan.parts[at].rate)  # the last one is what trainers hold
    apart = [
        one
        for one, number in zip(classes, plan.layout.places[at], strict=True)
        if number and one.host_memory is not None
    ]
    if not apart:
        return None
    part, passes = plan.parts[at], 3 if again else 2
    whole_s = (BACKWARD + again) * part.needs.flops * rows * work.context / min(one.flops for one in apart)
    crossing = passes * LAYER_CROSSINGS * (DEVICES - 1) * part.layers * rows * work.layer.thrifty
    between_s = crossing / HOST_LINK
    return TensorForecast(stage=part.name, layers=part.layers, whole_s=whole_s,
                          tensor_s=whole_s / DEVICES + between_s, between_s=between_s)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesForecast:
    """What all links carry in a step, beside what they would if each stage had one part and the same hosts."""

    step_bytes: float
    plain_bytes: float

    @property
    def over_plain(self) -> float:
        """Return how many times as much it is."""
        return self.step_bytes / self.plain_bytes


def carried(work: Workload, plan: StepForecast) -> BytesForecast:
    """Reckon with what crosses boundaries, which is the same whatever variants and sharing there are, and with what
    replicas of a part send each other in averaging."""
    stages = len(plan.layout.stages)
    crossing = work.rows * (work.activation_bytes + work.gradient_bytes) * (stages - 1 if work.hosted else stages + 1)
    each, averaged = 2 * work.averaged_bytes, 0.0
    hosts, sizes = Counter[int](), dict[int, float]()
    for part, here in zip(plan.parts, map(sum, plan.layout.places), strict=True):
        averaged += each * part.needs.parameters * max(0, here - 1)
        hosts[part.stage] += here
        sizes[part.stage] = part.needs.parameters
    groups = {stage: stages if work.shared and stage < stages else 1 for stage in hosts}
    plain = sum(each * sizes[stage] * max(0, hosts[stage] - groups[stage]) for stage in hosts)
    return BytesForecast(step_bytes=crossing + averaged, plain_bytes=crossing + plain)


def used_classes(classes: Sequence[PeerClass], plan: StepForecast) -> list[tuple[PeerClass, int]]:
    """Return the classes of which peers have a place, and how many."""
    used = (sum(here[kind] for here in plan.layout.places) for kind in range(len(classes)))
    return [(one, number) for one, number in zip(classes, used, strict=True) if number]


def mfu(work: Workload, classes: Sequence[PeerClass], plan: StepForecast, flops: float) -> tuple[float, bool]:
    """Return the share of what the plan's devices can do that goes into so many operations a token, and whether that is
    what makers say of all of them; else, of those of whom it is not known, what they attain in a block."""
    used = used_classes(classes, plan)
    peak = sum(number * (one.peak_flops or one.flops) for one, number in used)
    return plan.tokens_s * flops / peak, all(one.peak_flops is not None for one, _ in used)

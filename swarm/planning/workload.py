"""What is planned for: the work of one step, part by part, and the machines that may do it, as plain numbers.

Layers are taken to be alike. Memory counts as the product's own functions have it (:mod:`swarm.planning.costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from swarm.ids import shared_part, stage_part
from swarm.planning.costs import most_in_flight

TRAINERS = "trainers"
"""What trainers hold, as a part."""


@dataclass(frozen=True, slots=True)
class PartNeeds:
    """What a layer, an embedding, a head, or what is made of them needs; sums are of what lies in one part.

    Attributes:
        flops: Of a forward, for each token of a row.
        parameters: That are trained.
        held: Bytes that training it takes beside graphs and payloads, wherever they lie.
        apart: Those of them on a device that is apart from the host.
        graph: Bytes that the forward of one row leaves for its backward.
        thrifty: The same with activation checkpointing.
    """

    flops: float = 0.0
    parameters: float = 0.0
    held: float = 0.0
    apart: float = 0.0
    graph: float = 0.0
    thrifty: float = 0.0

    def __add__(self, other: PartNeeds) -> PartNeeds:
        """Return what both take in one part."""
        return PartNeeds(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: int) -> PartNeeds:
        """Return what so many alike take."""
        return PartNeeds(*(number * each for each in astuple(self)))


@dataclass(frozen=True, slots=True)
class PartLoad:
    """A part with the layers of a ``stage``, which for what trainers hold is the number of stages. Of a step's
    microbatches ``load`` pass it: a share where it is a variant, as many times all where stages share it."""

    name: str
    stage: int
    load: float = 1.0


@lru_cache(maxsize=1024)
def part_loads(stages: int, loads: tuple[tuple[float, ...], ...], shared: bool) -> tuple[PartLoad, ...]:
    """Return the parts of so many stages in the order of columns, and last what trainers hold: one a stage, or variants
    with these ``loads``, or one that all stages share."""
    each = [PartLoad(shared_part(stages), 0, float(stages))] if shared else [
        PartLoad(stage_part(stage, variant, len(here)), stage, load)
        for stage, here in enumerate(loads or ((1.0,),) * stages)
        for variant, load in enumerate(here)
    ]  # fmt: skip
    return (*each, PartLoad(TRAINERS, stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of a run, whatever cut it has.

    Attributes:
        layers: Blocks to cut into stages.
        layer: Of one block.
        embedding, head: Of the ends.
        hosted: Whether the ends lie on the first and last stage; else trainers hold both.
        context: Tokens in a row.
        rows: Of a step, whatever microbatches they are cut into.
        rows_asked: Of a microbatch, as the manifest has it.
        activation_bytes, gradient_bytes: What crosses a boundary for one row, encoded.
        logits_bytes: Of the head's work on one row; ``most_logits_bytes`` of that on all.
        averaged_bytes: What a parameter's sum takes, one way, in the mean of a step's rounds.
        copy_bytes: A parameter's, at who keeps a copy; ``copies`` of each stage.
        retention_bytes: The budget for payloads.
        palm_flops, causal_flops: Of forward and backward for one token of the whole model, by two ways to count.
        loads: By stage, which share of microbatches passes each of its variants; empty: stages have no variants, and
            there may be any number of them.
        alike: Where all stages have as many layers, since they share them always or at first, of how many that is a
            multiple; 0: they may have any number.
        shared: Whether one part is what all stages share.
    """

    layers: int
    layer: PartNeeds
    embedding: PartNeeds
    head: PartNeeds
    hosted: bool
    context: int
    rows: int
    rows_asked: int
    activation_bytes: float
    gradient_bytes: float
    logits_bytes: float = 0.0
    most_logits_bytes: float = 0.0
    averaged_bytes: float = 4.0
    copies: int = 2
    copy_bytes: float = 12.0
    retention_bytes: float = 1 << 30
    palm_flops: float = 0.0
    causal_flops: float = 0.0
    loads: tuple[tuple[float, ...], ...] = ()
    alike: int = 0
    shared: bool = False

    def parts(self, stages: int) -> tuple[PartLoad, ...]:
        """Return the parts of so many stages, the last of them what trainers hold."""
        return part_loads(stages, self.loads, self.shared)

    def cuts(self, numbers: Sequence[int], peers: int) -> list[int]:
        """Return those of these numbers of stages into which the model may be cut, with a peer for each part."""
        return [
            stages
            for stages in numbers
            if stages <= self.layers
            and (not self.loads or stages == len(self.loads))
            and (not self.alike or (stages > 1 and self.layers % (stages * self.alike) == 0))
            and len(self.parts(stages)) <= peers
        ]

    def part(self, stages: int, index: int, layers: int) -> PartNeeds:
        """Return the needs of stage ``index`` of ``stages`` with so many layers; of what trainers hold, for the index
        behind the last stage."""
        if index == stages:
            return PartNeeds() if self.hosted else self.embedding + self.head
        needs = self.layer.times(layers)
        if self.hosted and index == 0:
            needs += self.embedding
        if self.hosted and index == stages - 1:
            needs += self.head
        return needs

    def crossing(self, stages: int, at: int) -> float:
        """Return the bytes of one row that come into part ``at``, that of the trainers behind the last stage, or leave
        it, whichever is more. With hosted ends token ids cross the first boundary, next to nothing, and nothing the
        last."""
        before, behind = at, (at + 1) % (stages + 1)
        crossed = [float(not (self.hosted and boundary in (0, stages))) for boundary in (before, behind)]
        forth, back = self.activation_bytes, self.gradient_bytes
        return max(crossed[0] * forth + crossed[1] * back, crossed[1] * forth + crossed[0] * back)

    def in_flight(self, rows: int) -> int:
        """Return the most journeys of a trainer under way, each of a microbatch of so many rows."""
        return most_in_flight(rows * (self.activation_bytes + self.gradient_bytes), self.retention_bytes)

    @property
    def whole(self) -> PartNeeds:
        """Return the needs of the whole model in one place."""
        return self.layer.times(self.layers) + self.embedding + self.head

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.rows * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerClass:
    """Peers that are alike.

    Attributes:
        name: What people call them.
        count: How many there are.
        flops: Operations a second that each attains in forward and backward of a block.
        memory: Bytes that each has, of its device where that is apart from the host.
        host_memory: Bytes of the host of a device that is apart; None: it is the same memory.
        down, up: Bytes a second of its link.
        round_trip_s: To other peers.
        stay_s: How long one stays, on average; None: as long as the run.
        peak_flops: What its maker says it can do, for MFU; None: not known.
        together_flops: What all of the class have together, where they share a machine; None: they share nothing.
    """

    name: str
    count: int
    flops: float
    memory: float
    host_memory: float | None = None
    down: float = 125e6
    up: float = 125e6
    round_trip_s: float = 0.001
    stay_s: float | None = None
    peak_flops: float | None = None
    together_flops: float | None = None

    @property
    def slower_way(self) -> float:
        """Return bytes a second of the slower direction."""
        return min(self.down, self.up)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """A choice of all that a plan may choose.

    Attributes:
        stages: Layers of each stage, in order.
        places: For each stage, and last for what trainers do, how many peers of each class work there.
        rows: Of a microbatch.
        recompute: Whether stages compute activations again in the backward.
    """

    stages: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    rows: int
    recompute: bool = False

    @property
    def peers(self) -> int:
        """Return how many peers have a place."""
        return sum(map(sum, self.places))

    @property
    def trainers(self) -> int:
        """Return how many of them are trainers."""
        return sum(self.places[-1])

"""The memory that training a part takes at a peer: whether it is there, and how many graphs fit into what is left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, Protocol

from swarm.columns import columns_of
from swarm.config import Manifest
from swarm.consensus.roster import Roster
from swarm.device import Device
from swarm.disk import free_bytes, size_text
from swarm.errors import StateError
from swarm.ids import PartName
from swarm.membership.rules import spec_of, update_of
from swarm.models.layout import full_vectors
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec
from swarm.optim.part import TrainedPart
from swarm.optim.swapped_part import Home
from swarm.planning.costs import (
    RESIDUAL_BYTES,
    USUAL_IN_FLIGHT,
    MemoryKind,
    apart_bytes,
    bytes_by_kind,
    graph_bytes,
    graphs_that_fit,
    graphs_under_way,
    needs_checkpointing,
)

logger = logging.getLogger(__name__)

Checkpointing = Literal["auto", "on", "off"]
"""Whether layers compute their activations again in the backward: ``auto`` where memory is short."""

DEFERRED_BYTES = 1 << 30
"""At most so much holds what backwards left to do for the gradients of weights."""

MORE_MEMORY = "Join where there is more, allow this peer more where that is limited, or found a run with more stages."


class MemoryContext(Protocol):
    """A run, and the device on which a part of it is to be trained."""

    @property
    def manifest(self) -> Manifest:
        """The run's."""

    @property
    def device(self) -> Device:
        """With the memory that is free."""

    @property
    def home(self) -> Home | None:
        """Where parts are that take turns on it; None: all stay there."""


def lacking_memory(around: MemoryContext, name: PartName, *, here: int = 0, here_apart: int = 0) -> str:
    """Return what a part takes that this peer's memory does not hold, or its device's; "" for a part that fits. So many
    bytes of it are ``here``, or are let go for it, and on a device apart from the host so many. Blocking: some
    milliseconds."""
    manifest, device, spec = around.manifest, around.device.torch_device, spec_of(around.manifest, name)
    home = around.home
    takes = sum(part_bytes(manifest, spec, apart=device.type != "cpu").values())
    if home is not None and home.directory is not None:
        wants = _wants_of_disk(around, spec, home.directory)
    elif device.type == "cpu":
        wants = [(takes - here, around.device.free_memory(), "memory")]
    else:
        exact, overlap = manifest.run.reproducible, manifest.speed.overlaps
        number = len(around.device.torch_devices)
        apart = apart_bytes(manifest.model, spec, exact=exact, overlap=overlap, devices=number)
        on_host = takes - here_apart if device.type == "mps" else takes - apart  # Apple's GPU has no memory of its own
        wants = [(on_host - here, around.device.free_host_memory(), "memory")]
        wants.append((apart - here_apart, around.device.free_memory(), f"memory of {device}"))
    for needed, free, what in wants:
        if needed > free:
            more = " more" if here or here_apart else ""
            return f"training {name} takes {size_text(needed)}{more}, and {size_text(free)} of {what} are free here"
    return ""


def _wants_of_disk(around: MemoryContext, spec: PartSpec, directory: Path) -> list[tuple[int, int, str]]:
    """Return what a part takes, and what is free of it, where its state and the sum of its step are in a directory:
    there, and where it is computed with. In the memory of a machine without an accelerator two parts are at a time."""
    manifest, device = around.manifest, around.device.torch_device
    kinds = part_bytes(manifest, spec)
    stored = kinds["weights"] + kinds["optimizer"] + kinds["gradients"]
    here = apart_bytes(manifest.model, spec, exact=manifest.run.reproducible, overlap=False, devices=1)
    memory = (2 * here, "memory") if device.type == "cpu" else (here, f"memory of {device}")
    return [
        (memory[0], around.device.free_memory(), memory[1]),
        (stored, free_bytes(directory), f"the disk of {directory}"),
    ]


def check_memory(around: MemoryContext, name: PartName) -> None:
    """Raises StateError for a part that this peer's memory does not hold. Blocking: some milliseconds."""
    if reason := lacking_memory(around, name):
        raise StateError(f"{reason}. {MORE_MEMORY}")


def part_bytes(manifest: Manifest, spec: PartSpec, *, apart: bool = False) -> dict[MemoryKind, int]:
    """Return what training a part takes in this run besides its activations, at most, by kind; see
    :func:`~swarm.planning.costs.bytes_by_kind`. Strips have weights of their own, as on a device that is ``apart``."""
    model, local = manifest.model, manifest.averaging.mode == "local"
    apart = apart or spec.tensor > 1
    vectors, exact = full_vectors(update_of(manifest).vectors), manifest.run.reproducible
    cost = family_of(model).cost(spec, model.context)
    overlap = manifest.speed.overlaps
    each = bytes_by_kind(model, vectors=vectors, exact=exact, local=local, apart=apart, overlap=overlap)
    if manifest.averaging.feeds_back:
        each["gradients"] += RESIDUAL_BYTES
        each["round"] += RESIDUAL_BYTES
    return {kind: size * cost.parameters for kind, size in each.items()} | {"frozen": cost.frozen_held}


def part_training_bytes(manifest: Manifest, spec: PartSpec) -> int:
    """All of them together."""
    return sum(part_bytes(manifest, spec).values())


class GraphMemory:
    """How many graphs a stage may have at a time as the roster changes, of how many bytes, and whether they fit into
    the memory that is left, where its owner does not say how they are kept. What is left is looked up once, before
    there are any. Cost: a part is built without weights, milliseconds. ``journeys`` are the most of one trainer."""

    def __init__(self, around: MemoryContext, part: TrainedPart, choice: Checkpointing, *, journeys: int) -> None:
        manifest, device = around.manifest, around.device.torch_device
        times = len(columns_of(part.spec.name))  # so often a microbatch passes what stages share
        self._part, self._microbatches, self._on = part, times * manifest.step_microbatches, False
        self._choice, self._under_way = choice, 1
        self._usual, self._most = times * min(USUAL_IN_FLIGHT, journeys), times * journeys
        rows = manifest.batch.microbatch_size
        self._graph = graph_bytes(manifest.model, part.spec, rows)
        self._thrifty = graph_bytes(manifest.model, part.spec, rows, checkpointing=True)
        state = 4 * full_vectors(update_of(manifest).vectors) * part.layout.elements
        # The state is there; the rest of what training takes on the host is allocated later, on a GPU it is there, too.
        later = 0 if device.type == "cuda" else max(0, part_training_bytes(manifest, part.spec) - state)
        self._left = max(0, around.device.free_memory() - later)

    @property
    def fits(self) -> int:
        """Return how many graphs may be held as they are kept now."""
        return graphs_that_fit(self.expected[1], self._left)

    @property
    def expected(self) -> tuple[int, int]:
        """Return how many graphs there may be at a time, and the bytes of one as they are kept now."""
        return self._under_way, self._thrifty if self._on else self._graph

    def deferrable(self) -> int:
        """Return how many bytes gradients of weights that are computed later may hold: half of what graphs leave, at
        most DEFERRED_BYTES."""
        under_way, graph = self.expected
        return max(0, min(DEFERRED_BYTES, (self._left - under_way * graph) // 2))

    def follow(self, roster: Roster) -> None:
        """Have the part checkpoint activations from now on where this roster may bring it more graphs than fit."""
        name, before = self._part.spec.name, self._on
        usual, most = (
            graphs_under_way(self._microbatches, len(roster.replicas(name)), each * len(roster.trainers))
            for each in (self._usual, self._most)
        )
        if self._part.spec.head:  # its backward follows each forward at once
            usual = most = 1
        short = needs_checkpointing(self._graph, usual, self._left)
        self._on = short if self._choice == "auto" else self._choice == "on"
        self._under_way = under_way = max(usual, min(most, self.fits))
        self._part.checkpoint_activations(self._on)
        if self._on != before and self._choice == "auto":
            how = "are computed again in the backward" if self._on else "are kept for the backward again"
            figures = f"{under_way} graphs of {size_text(self._graph)}, {size_text(self._left)} are left"
            logger.info("%s: activations %s: %s", name, how, figures)

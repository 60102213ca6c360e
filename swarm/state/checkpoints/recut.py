"""Cut a checkpoint into other parts, bit for bit, with about one part in memory at a time.

Tensors have the whole model's names in every part, and in each of the optimizer's vectors: so a part of another cut is
made of the same tensors, copied from wherever they lie. What shows that nothing was lost or
changed is a digest of the whole model that no cut is part of (:class:`WholeModel`): of the old files, and of the new
ones as they were read back from the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import StateError
from swarm.ids import PartName
from swarm.models.layout import FlatLayout
from swarm.state.checkpoints.files import REMEDY, CheckpointManifest, part_path
from swarm.state.checkpoints.format import PartFile, opened
from swarm.state.checkpoints.parts import load_part, write_part
from swarm.state.snapshot import Snapshot

_WHOLE_FORMAT = "swarm-whole/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """What a complete step holds, every byte of it verified.

    Attributes:
        digest: Hex sha256 over name, shape and content of each tensor in each vector, sorted by name: the same however
            the model is cut.
        vectors: The names of the vectors of the state, the parameters first.
        shapes: Of every tensor of the model, by name.
        held_by: The part that each tensor lies in.
    """

    digest: str
    vectors: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    held_by: Mapping[str, PartName]


def whole_model(root: Path, record: CheckpointManifest) -> WholeModel:
    """Read a complete step once, a part at a time: its memory is that of the largest part.

    Raises StateError naming the file that is missing or damaged, and for parts that are not of one model: they keep
    different vectors, or hold a tensor twice.
    """
    kept, shapes, held_by = dict[PartName, tuple[str, ...]](), dict[str, tuple[int, ...]](), dict[str, PartName]()
    found: list[tuple[str, str, str]] = []
    for part in map(PartName, record.parts):
        layout, hashes = _read_part(root, record, part)
        kept[part] = layout.vectors
        found += hashes
        for slot in layout.slots:
            if slot.name in held_by:
                twice = f"{held_by[slot.name]} and {part} of step {record.step} both hold {slot.name}"
                raise StateError(f"{twice}: which of the two counts is not said")
            shapes[slot.name], held_by[slot.name] = slot.shape, part
    if len(set(kept.values())) != 1:
        said = "; ".join(f"{part}: {', '.join(vectors)}" for part, vectors in kept.items())
        raise StateError(f"the parts of step {record.step} keep different vectors ({said or 'there are none'})")
    whole = json.dumps([_WHOLE_FORMAT, sorted(shapes.items()), sorted(found)], separators=(",", ":"))
    return WholeModel(
        digest=hashlib.sha256(whole.encode()).hexdigest(),
        vectors=next(iter(kept.values())),
        shapes=shapes,
        held_by=held_by,
    )


def _read_part(root: Path, record: CheckpointManifest, part: PartName) -> tuple[FlatLayout, list[tuple[str, str, str]]]:
    """A part's layout, and (name, vector, sha256 of the content) of its tensors. The state is let go before the next
    part's is read."""
    snapshot, found = load_part(root, record.step, part, expected_digest=record.parts[part]), []
    for vector, buffer in zip(snapshot.layout.vectors, snapshot.buffers(), strict=True):
        for slot in snapshot.layout.kept_in(vector).slots:
            content = hashlib.sha256(buffer[4 * slot.offset : 4 * (slot.offset + slot.elements)])
            found.append((slot.name, vector, content.hexdigest()))
    return snapshot.layout, found


def recut(
    root: Path, record: CheckpointManifest, into: Path, run: str, layouts: Mapping[PartName, FlatLayout]
) -> tuple[CheckpointManifest, str]:
    """Write the parts of another cut of a complete step; return what they are, and the digest of the whole model.

    Two passes over the old files and one over the new ones; memory of the largest part, old or new. ``record.json`` is
    not written: what proves a record is not known here.

    Args:
        root: The directory of checkpoints that has the step.
        record: What the step's parts must be.
        into: Another directory of checkpoints, for the new parts.
        run: The run that these are of.
        layouts: Where each new part's tensors lie in it; its vectors are those that the run's optimizer keeps.

    Raises:
        StateError: The old files are not as the record says, the layouts are not of the same model or of an optimizer
            with the same state, the disk refuses, or what it gives back is not what was written.
    """
    before = whole_model(root, record)
    _check_cut(before, record, layouts)
    parts: dict[str, str] = {}
    for part, layout in layouts.items():  # no state outlives its turn: there is memory for one
        path = write_part(into, _filled(part, layout, root, record.step, before), {"run": run})
        parts[part] = PartFile.read(path).state.digest
    made = CheckpointManifest(run=run, step=record.step, parts=parts)
    after = whole_model(into, made)
    if after.digest != before.digest:
        raise StateError(
            f"the whole model has digest {before.digest[:12]}… in {root} and {after.digest[:12]}… in {into}, after it "
            f"was cut anew: the files changed meanwhile, or this machine makes mistakes. {REMEDY}"
        )
    return made, after.digest


def _check_cut(before: WholeModel, record: CheckpointManifest, layouts: Mapping[PartName, FlatLayout]) -> None:
    """Check whether every tensor of the old parts has one place in the new ones. Raises StateError."""
    places: dict[str, PartName] = {}
    for part, layout in layouts.items():
        if layout.vectors != before.vectors:
            raise StateError(
                f"step {record.step} keeps {', '.join(before.vectors)} of each weight, and the optimizer of the run "
                f"{', '.join(layout.vectors)}: they are not of one optimizer"
            )
        for slot in layout.slots:
            there = before.shapes.get(slot.name)
            if slot.name in places or there != slot.shape:
                why = f"it is in {places[slot.name]}, too" if slot.name in places else f"the checkpoint has {there}"
                raise StateError(f"{part} would hold {slot.name} {slot.shape}, but {why}: this model is not cut so")
            places[slot.name] = part
    if lost := sorted(before.shapes.keys() - places.keys()):
        held = before.held_by[lost[0]]
        raise StateError(f"no part would hold {lost[0]}, which {held} of the checkpoint has: this model is not cut so")


def _filled(part: PartName, layout: FlatLayout, root: Path, step: int, before: WholeModel) -> Snapshot:
    """A new part: each tensor, in every vector, from the old part that has it."""
    snapshot, sources = Snapshot.blank(part, step, layout), dict[PartName, set[str]]()
    for name in layout.names:
        sources.setdefault(before.held_by[name], set()).add(name)
    for source, names in sources.items():
        path = part_path(root, step, source)
        try:
            file = PartFile.read(path)
            with opened(path, os.O_RDONLY) as descriptor:
                for vector, buffer in enumerate(snapshot.buffers()):
                    for slot in layout.kept_in(layout.vectors[vector]).slots:
                        if slot.name in names:
                            place = buffer[4 * slot.offset : 4 * (slot.offset + slot.elements)]
                            file.read_tensor(descriptor, vector, slot.name, place)
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}. {REMEDY}") from error
    return snapshot

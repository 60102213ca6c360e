"""The tensors of a checkpoint: a part written to its file, read back, and verified to the last bit.

Which files there are, and the record that says what they must be, is ``files.py``; its names that users of checkpoints
need are here as well. Blocking, for a worker thread.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from swarm.disk import write_whole
from swarm.errors import StateError
from swarm.ids import PartName
from swarm.models.layout import FlatLayout
from swarm.state.checkpoints.files import (
    REMEDY,
    CheckpointManifest,
    HeldStep,
    check_header,
    flaw,
    held,
    latest,
    part_path,
    read_manifest,
    refused_by_disk,
    step_directory,
    steps,
    write_manifest,
)
from swarm.state.checkpoints.format import PartFile
from swarm.state.download import Wanted
from swarm.state.snapshot import Snapshot, hashes_of, root_of

__all__ = [
    "CheckpointManifest",
    "HeldStep",
    "flaw",
    "held",
    "latest",
    "load_file",
    "load_part",
    "load_part_weights",
    "load_weights",
    "part_path",
    "read_manifest",
    "step_directory",
    "steps",
    "verify_part",
    "write_manifest",
    "write_part",
]


def write_part(root: Path, snapshot: Snapshot, meta: Mapping[str, str], *, expected_digest: str | None = None) -> Path:
    """Store a part; returns its file. ``meta`` (the run) goes into the file's metadata under its own keys.

    Replaces a file of the same part and step, all at once. Raises StateError when the state has not the expected
    digest, and when the disk refuses; nothing is left behind then, and the file that was there stays. Costs a hash and
    one pass over the disk; no copy of the state is made.
    """
    path, buffers = part_path(root, snapshot.step, snapshot.part), snapshot.buffers()
    hashes = hashes_of(buffers)
    found = root_of(snapshot.part, snapshot.layout, hashes)
    if expected_digest is not None and found != expected_digest:
        raise StateError(
            f"{path}: this peer's {snapshot.part} has digest {found[:12]}…, the record says "
            f"{expected_digest[:12]}…: it was not written. Restart this peer, so that it downloads its part anew."
        )
    state = Wanted(part=snapshot.part, step=snapshot.step, digest=found, layout=snapshot.layout)
    pieces: list[bytes | memoryview] = [PartFile(state, hashes, meta).header]
    pieces += _tensors(snapshot.layout, buffers)
    try:
        write_whole(path, pieces)
    except OSError as error:
        raise refused_by_disk(path, error) from error
    return path


def load_part(root: Path, step: int, part: PartName, *, expected_digest: str | None = None) -> Snapshot:
    """A part as it was stored, its digest verified, also against ``expected_digest`` when given.

    Raises StateError naming file, cause and what to do. Costs the part's memory and no more.
    """
    path = part_path(root, step, part)
    snapshot, digest = load_file(path)
    if (snapshot.part, snapshot.step) != (part, step):
        raise StateError(f"{path}: it holds {snapshot.part} after step {snapshot.step}. {REMEDY}")
    if expected_digest is not None and digest != expected_digest:
        raise StateError(f"{path}: digest {digest[:12]}… is not {expected_digest[:12]}…. {REMEDY}")
    return snapshot


def load_file(path: Path) -> tuple[Snapshot, str]:
    """(state, digest) of a part's file, whatever part it is; the state has that digest. Raises StateError, also when
    the disk fails while it is read. Read, not mapped: a failing disk is then an error and not the end of the process.
    """
    file = PartFile.read(path)
    snapshot = Snapshot.blank(file.state.part, file.state.step, file.state.layout)
    _read_vectors(path, file, snapshot.buffers())
    return snapshot, file.state.digest


def load_part_weights(root: Path, record: CheckpointManifest, part: PartName) -> dict[str, Tensor]:
    """A part's parameters by name, verified against the record, without the optimizer's moments, which are not read:
    a third of the time and memory of :func:`load_part`. Raises StateError naming the file and what is wrong."""
    path, expected = part_path(root, record.step, part), record.parts[part]
    file = PartFile.read(path)
    if file.state.digest != expected:
        raise StateError(f"{path}: digest {file.state.digest[:12]}… is not {expected[:12]}…. {REMEDY}")
    params = torch.zeros(file.state.layout.elements, dtype=torch.float32)
    _read_vectors(path, file, [params.view(torch.uint8).numpy().data])
    return file.state.layout.views(params)


def load_weights(root: Path, step: int) -> dict[str, Tensor]:
    """The whole model's parameters by name, out of all parts of a complete step. Raises StateError as
    :func:`load_part_weights`."""
    weights: dict[str, Tensor] = {}
    record = read_manifest(root, step)
    for part in record.parts:
        weights |= load_part_weights(root, record, PartName(part))
    return weights


def verify_part(root: Path, record: CheckpointManifest, part: PartName) -> int:
    """Check every byte of a part against the record; returns how many there are. Raises StateError naming the file."""
    expected = record.parts[part]
    header = check_header(part_path(root, record.step, part), record, part, expected)
    load_part(root, record.step, part, expected_digest=expected)
    return header.size


def _read_vectors(path: Path, file: PartFile, buffers: Sequence[memoryview]) -> None:
    """Fill buffers with the first vectors of a file, as many as there are, and check the hashes of their chunks."""
    try:
        with path.open("rb", buffering=0) as source:
            source.seek(file.begins)
            for tensor in _tensors(file.state.layout, buffers):
                _fill(source, tensor)
        found = hashes_of(buffers)
        if found != file.hashes[: len(found)]:
            raise StateError("the content does not match the digest written with it")
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}. {REMEDY}") from error
    except StateError as error:
        raise StateError(f"{path}: {error}. {REMEDY}") from error


def _tensors(layout: FlatLayout, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of each tensor in the first vectors of a state, as many as there are buffers."""
    for vector, buffer in zip(layout.vectors, buffers, strict=False):
        for slot in layout.kept_in(vector).slots:
            yield buffer[4 * slot.offset : 4 * (slot.offset + slot.elements)]


def _fill(source: io.FileIO, into: memoryview) -> None:
    while into:
        got = source.readinto(into)
        if not got:
            raise StateError("it ends too early")
        into = into[got:]

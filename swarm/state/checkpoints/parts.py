"""The tensors of a checkpoint: a part written to its file, read back, and verified to the last bit.

Which files there are, and the record that says what they must be, is ``checkpoint_files.py``; its names that users of
checkpoints need are here as well. Blocking, for a worker thread.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from swarm.disk import write_whole
from swarm.errors import StateError
from swarm.ids import PartName
from swarm.state.checkpoints.files import (
    REMEDY,
    CheckpointManifest,
    HeldStep,
    PartHeader,
    check_header,
    flaw,
    held,
    latest,
    part_path,
    read_header,
    read_manifest,
    refused_by_disk,
    step_directory,
    steps,
    write_manifest,
)
from swarm.state.snapshot import Snapshot, from_tensors, to_tensors

__all__ = [
    "CheckpointManifest",
    "HeldStep",
    "flaw",
    "held",
    "latest",
    "load_file",
    "load_part",
    "load_weights",
    "part_path",
    "read_manifest",
    "step_directory",
    "steps",
    "verify_part",
    "write_manifest",
    "write_part",
]

_ALIGNMENT = 8


def write_part(root: Path, snapshot: Snapshot, meta: Mapping[str, str], *, expected_digest: str | None = None) -> Path:
    """Store a part; returns its file. ``meta`` (the run) goes into the file's metadata under its own keys.

    Replaces a file of the same part and step, all at once. Raises StateError when the state has not the expected
    digest, and when the disk refuses; nothing is left behind then, and the file that was there stays. Costs a hash and
    one pass over the disk; no copy of the state is made.
    """
    path = part_path(root, snapshot.step, snapshot.part)
    tensors, metadata = to_tensors(snapshot)
    if expected_digest is not None and metadata["digest"] != expected_digest:
        raise StateError(
            f"{path}: this peer's {snapshot.part} has digest {metadata['digest'][:12]}…, the record says "
            f"{expected_digest[:12]}…: it was not written. Restart this peer, so that it downloads its part anew."
        )
    own = {"part": str(snapshot.part), "step": str(snapshot.step)}
    pieces: list[bytes | memoryview] = [_header(tensors, {**meta, **own, **metadata})]
    pieces += [memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data) for tensor in tensors.values()]
    try:
        write_whole(path, pieces)
    except OSError as error:
        raise refused_by_disk(path, error) from error
    return path


def load_part(root: Path, step: int, part: PartName, *, expected_digest: str | None = None) -> Snapshot:
    """A part as it was stored, its digest verified, also against ``expected_digest`` when given.

    Raises StateError naming file, cause and what to do. Costs twice the part's memory for a moment.
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
    header = read_header(path)
    try:
        tensors = dict(_tensors(path, header))
        snapshot = from_tensors(tensors, header.metadata)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}. {REMEDY}") from error
    except (StateError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise StateError(f"{path}: {error}. {REMEDY}") from error
    return snapshot, header.metadata["digest"]


def load_weights(root: Path, step: int) -> dict[str, Tensor]:
    """The whole model's parameters by name, out of all parts of a complete step. Raises StateError as load_part."""
    weights: dict[str, Tensor] = {}
    for part, expected in read_manifest(root, step).parts.items():
        weights |= load_part(root, step, PartName(part), expected_digest=expected).weights
    return weights


def verify_part(root: Path, record: CheckpointManifest, part: PartName) -> int:
    """Check every byte of a part against the record; returns how many there are. Raises StateError naming the file."""
    expected = record.parts[part]
    header = check_header(part_path(root, record.step, part), record, part, expected)
    load_part(root, record.step, part, expected_digest=expected)
    return header.size


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Of a safetensors file: its length, then JSON, padded so that the tensors begin at a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begins = 0
    for name, tensor in tensors.items():
        ends = begins + 4 * tensor.numel()
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begins, ends]}
        begins = ends
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _tensors(path: Path, header: PartHeader) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, each behind the one before; sizes are checked before anything is allocated. Raises
    StateError and OSError."""
    begun = 0
    with path.open("rb", buffering=0) as file:
        for name, entry in header.header.items():
            if name == "__metadata__":
                continue
            begins, ends = map(int, entry["data_offsets"])
            shape = [int(side) for side in entry["shape"]]
            size = 4 * torch.Size(shape).numel()
            if (
                entry["dtype"] != "F32"
                or not begun == begins <= ends <= header.size - header.begins
                or ends - begins != size
            ):
                raise StateError(f"{name}: {entry['dtype']} {shape} in bytes {begins} to {ends}")
            begun = ends
            data = bytearray(size)
            _read_whole(file, header.begins + begins, memoryview(data))
            yield name, torch.frombuffer(data, dtype=torch.float32).view(shape) if size else torch.zeros(shape)


def _read_whole(file: io.FileIO, offset: int, into: memoryview) -> None:
    file.seek(offset)
    while into:
        got = file.readinto(into)
        if not got:
            raise StateError("it ends too early")
        into = into[got:]

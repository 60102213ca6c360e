"""List the checkpoints in a directory and their defects, from names, records and headers, without the tensors.

Per step one directory, in it a safetensors file per part and ``record.json``, which says by digest what the parts are.
A machine holds the parts that its peers trained, so a step may lack some; with all of them it is complete. Imports no
torch. Finds missing, torn and exchanged files; only loading (``parts.py``) finds a changed byte in a tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm.disk import alone, write_whole
from swarm.errors import Advice, StateError
from swarm.ids import PartName
from swarm.parsing import parse_json
from swarm.schema import Count, DigestField, PartField, Section

RECORD = "record.json"
MAX_RECORD_BYTES = 16 << 20
"""A close record has 4 MiB on the wire at most, and stands here as JSON with its proof."""
SMALL_HEADER_BYTES, BYTES_A_HEADER_BYTE = 1 << 20, 1024
"""A part's header may have so many bytes, and one more for so many of the file: it holds 64 characters for each chunk
of a mebibyte, and some 600 bytes for each parameter."""
FORMAT = "swarm-part/3"
"""Of parts' files: what their metadata says, see ``format.py``."""
REMEDY = Advice.DAMAGED_STEP

_STEP = re.compile(r"step-([0-9]{8,})")
_SUFFIX = ".safetensors"
_SUM = "sha256"


class CheckpointManifest(Section):
    """``record.json``: a step's parts by digest. ``detail`` is the writer's own JSON (the close record and its proof).

    In the file stands next to it the sha256 of all that, so that a changed character is found."""

    run: DigestField
    step: Count
    parts: dict[PartField, DigestField]
    detail: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of a part's file: its JSON, the offset of the tensors, the file's size."""

    header: Mapping[str, Any]
    begins: int
    size: int

    @property
    def metadata(self) -> Mapping[str, str]:
        """The writer's own words: run, part, step, digest, format."""
        found = self.header.get("__metadata__", {})
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStep:
    """The files of one step: ``parts`` are whole and match the record, with their bytes; ``missing`` are not there;
    ``troubles`` describes the defects, file by file. ``begun`` is the time, in seconds of the wall clock, at which an
    unfinished write began; its writer is still at it, or died."""

    step: int
    record: CheckpointManifest | None
    parts: Mapping[PartName, int]
    missing: tuple[PartName, ...]
    troubles: tuple[str, ...]
    begun: float | None = None

    @property
    def complete(self) -> bool:
        """True if every part is there."""
        return self.complete_but(())

    def complete_but(self, without: Container[str]) -> bool:
        """Return whether every part is there but for these."""
        return self.record is not None and not self.troubles and all(part in without for part in self.missing)


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of a step under a checkpoint root."""
    return root / f"step-{step:08d}"


def part_path(root: Path, step: int, part: PartName) -> Path:
    """Return the path of a part's file of a step."""
    return step_directory(root, step) / f"{part}{_SUFFIX}"


def steps(root: Path) -> tuple[int, ...]:
    """All steps with a directory, complete or not, ascending; empty without a root."""
    try:
        names = os.listdir(root)  # not pathlib: it would look first, and fail when another peer takes it away meanwhile
    except (FileNotFoundError, NotADirectoryError):
        return ()
    found = (step_called(name) for name in names if (root / name).is_dir())
    return tuple(sorted(step for step in found if step is not None))


def step_called(name: str) -> int | None:
    """The step whose directory has this name; None for any other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def write_manifest(root: Path, manifest: CheckpointManifest) -> Path:
    """Say what a step's parts are; one that says otherwise is replaced. Returns the file. Raises StateError when the
    disk refuses; what was there stays then."""
    path = step_directory(root, manifest.step) / RECORD
    try:
        with alone(path, wait=True):
            write_whole(path, [encode_manifest(manifest)])
    except OSError as error:
        raise refused_by_disk(path, error) from error
    return path


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The bytes of ``record.json``."""
    body = manifest.model_dump(mode="json")
    return (json.dumps(body | {_SUM: _sum(body)}, indent=1, ensure_ascii=True) + "\n").encode()


def decode_manifest(data: bytes, origin: str) -> CheckpointManifest:
    """Decode the result of :func:`encode_manifest`; ``origin`` names it in errors. Raises StateError for anything
    else."""
    try:
        document = parse_json(data)
        claimed = document.pop(_SUM)
        manifest = CheckpointManifest.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise StateError(f"{origin}: {error.errors(include_url=False)[0]['msg']}. {REMEDY}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise StateError(f"{origin}: not a checkpoint's record ({error}). {REMEDY}") from error
    if claimed != _sum(document):
        raise StateError(f"{origin}: its content does not match its checksum. {REMEDY}")
    return manifest


def read_manifest(root: Path, step: int) -> CheckpointManifest:
    """A step's manifest. Raises StateError when it is missing or unreadable."""
    path = step_directory(root, step) / RECORD
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise StateError(f"{path}: larger than any record. {REMEDY}")
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}. The step was not completed. {REMEDY}") from error
    manifest = decode_manifest(data, str(path))
    if manifest.step != step:
        raise StateError(f"{path}: it says step {manifest.step}. {REMEDY}")
    return manifest


def read_header(path: Path) -> PartHeader:
    """A part's header, and that the file is as long as it says. Raises StateError naming the file and what is wrong."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(SMALL_HEADER_BYTES + size // BYTES_A_HEADER_BYTE, size - 8):
                raise StateError(f"{path}: torn: {size} bytes with a header of {length}. {REMEDY}")
            header = parse_json(file.read(length))
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}. {REMEDY}") from error
    except ValueError as error:
        raise StateError(f"{path}: its header is no JSON ({error}). {REMEDY}") from error
    ends = _ends(header)
    if ends is None or 8 + length + ends != size:
        raise StateError(f"{path}: torn: {size} bytes, its header says otherwise. {REMEDY}")
    return PartHeader(header, 8 + length, size)


def held(root: Path, step: int) -> HeldStep:
    """Return the files of a step and their defects. Reads the record and each file's header."""
    directory = step_directory(root, step)
    names = _names(directory)
    begun = max(filter(None, (_changed(directory / name) for name in names if name.startswith("."))), default=None)
    try:
        record = read_manifest(root, step)
    except StateError as error:
        wrong = (str(error),) if not all(name.startswith(".") for name in names) else ()
        return HeldStep(step=step, record=None, parts={}, missing=(), troubles=wrong, begun=begun)
    parts: dict[PartName, int] = {}
    missing, troubles = [], []
    for name, expected in record.parts.items():
        part = PartName(name)
        path = part_path(root, step, part)
        if not path.exists():
            missing.append(part)
            continue
        try:
            parts[part] = check_header(path, record, part, expected).size
        except StateError as error:
            troubles.append(str(error))
    return HeldStep(
        step=step, record=record, parts=parts, missing=tuple(missing), troubles=tuple(troubles), begun=begun
    )


def clear_bare(root: Path, step: int) -> None:
    """Take away a step's directory in which nothing was saved: it is empty, or holds its record only. Never raises.

    Another replica may begin to write there meanwhile. It claims its part before it looks for the record: so either the
    claim is seen here, and the record put back, or it finds none, and writes it."""
    directory = step_directory(root, step)
    record, gone = directory / RECORD, directory / f".{RECORD}.gone"
    with contextlib.suppress(OSError):
        if os.listdir(directory) == [RECORD]:
            os.rename(record, gone)
            if os.listdir(directory) == [gone.name]:
                os.unlink(gone)
            else:
                os.rename(gone, record)
        os.rmdir(directory)


def check_header(path: Path, record: CheckpointManifest, part: PartName, expected: str) -> PartHeader:
    """A part's header, and that it is the one that the record means. Raises StateError as :func:`read_header`."""
    header = read_header(path)
    said = header.metadata
    if said.get("format") != FORMAT:
        raise StateError(f"{path}: format {said.get('format')!r} is not {FORMAT!r}. {REMEDY}")
    if said.get("run") != record.run:
        raise StateError(f"{path}: it is of run {str(said.get('run'))[:12]}, not {record.run[:12]}. {REMEDY}")
    if (said.get("part"), said.get("step")) != (part, str(record.step)):
        raise StateError(f"{path}: it holds {said.get('part')} after step {said.get('step')}. {REMEDY}")
    if said.get("digest") != expected:
        raise StateError(f"{path}: digest {str(said.get('digest'))[:12]}… is not {expected[:12]}…. {REMEDY}")
    return header


def flaw(root: Path, step: int, without: Container[str] = ()) -> str | None:
    """Return why a step cannot be loaded, ``without`` these parts of it, or None. Finds missing, torn and exchanged
    files; loading finds altered bytes."""
    found = held(root, step)
    if found.troubles:
        return found.troubles[0]
    if found.record is None:
        return f"{step_directory(root, step)}: nothing of it was saved. {REMEDY}"
    if missing := [part for part in found.missing if part not in without]:
        return f"{part_path(root, step, missing[0])}: it is not there. {REMEDY}"
    return None


def latest(root: Path, without: Container[str] = ()) -> int | None:
    """The newest step without a :func:`flaw`, or None."""
    return next((step for step in reversed(steps(root)) if flaw(root, step, without) is None), None)


def refused_by_disk(path: Path, error: OSError) -> StateError:
    """The error for a file that could not be written."""
    cause = error.strerror or str(error)
    return StateError(f"{path}: {cause}. Free some space, or choose another directory for checkpoints.")


def _names(directory: Path) -> list[str]:
    """Return the names in a directory; none if it cannot be read, or is gone: another peer of the machine
    may take it away at any moment."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # finished just now
        return None


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _ends(header: object) -> int | None:
    """Return the end of the last tensor; None if this is no header."""
    if not isinstance(header, dict):
        return None
    try:
        return max((int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"), default=0)
    except (LookupError, TypeError, ValueError, OverflowError):  # the last for a number like 1e999
        return None

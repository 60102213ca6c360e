"""Checkpoints on disk: per step one directory with a safetensors file for every part, and ``record.json`` last.

A file is written beside its final name, synced, and renamed, so a name that exists is whole; a step counts as soon as
its ``record.json`` is there. Synchronous, for a worker thread: costs a hash and one pass over the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm.errors import StateError
from swarm.ids import PartName
from swarm.schema import Count, DigestField, PartField, Section
from swarm.state.snapshot import Snapshot, from_tensors, to_tensors

RECORD = "record.json"
_STEP = re.compile(r"step-(\d{8,})")
_REMEDY = "Remove that step's directory to fall back to the step before, or copy the file from another peer."


class CheckpointManifest(Section):
    """``record.json``: a step's parts by digest. ``detail`` is the writer's own JSON (the close record)."""

    run: DigestField
    step: Count
    parts: dict[PartField, DigestField]
    detail: dict[str, Any] = {}


def step_directory(root: Path, step: int) -> Path:
    """Where a step lies under a checkpoint root."""
    return root / f"step-{step:08d}"


def write_part(root: Path, snapshot: Snapshot, meta: Mapping[str, str]) -> Path:
    """Store a part; returns its file. ``meta`` (run, peer …) goes into the file's metadata under its own keys.

    Replaces a file of the same part and step. Raises StateError when the disk refuses; nothing is left behind then.
    """
    tensors, metadata = to_tensors(snapshot)
    path = _part_path(root, snapshot.step, snapshot.part)
    _write(path, lambda temporary: save_file(tensors, temporary, metadata={**meta, **metadata}))
    return path


def write_manifest(root: Path, manifest: CheckpointManifest) -> Path:
    """Declare a step complete, once all its parts are there. Raises StateError when one is missing or torn."""
    for part in manifest.parts:
        _check_file(_part_path(root, manifest.step, PartName(part)))
    path = step_directory(root, manifest.step) / RECORD
    text = manifest.model_dump_json(indent=1)
    _write(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))
    return path


def read_manifest(root: Path, step: int) -> CheckpointManifest:
    """A step's manifest. Raises StateError when it is missing or unreadable."""
    path = step_directory(root, step) / RECORD
    try:
        manifest = CheckpointManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}. The step was not completed. {_REMEDY}") from error
    except ValidationError as error:
        raise StateError(f"{path}: {error.errors(include_url=False)[0]['msg']}. {_REMEDY}") from error
    if manifest.step != step:
        raise StateError(f"{path}: it says step {manifest.step}. {_REMEDY}")
    return manifest


def load_part(root: Path, step: int, part: PartName, *, expected_digest: str | None = None) -> Snapshot:
    """A part as it was stored, its digest verified, also against ``expected_digest`` when given.

    Raises StateError naming file, cause and what to do. Costs twice the part's memory for a moment.
    """
    path = _part_path(root, step, part)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        snapshot = from_tensors(tensors, metadata)
    except (OSError, SafetensorError, StateError) as error:
        raise StateError(f"{path}: {error}. {_REMEDY}") from error
    if (snapshot.part, snapshot.step) != (part, step):
        raise StateError(f"{path}: it holds {snapshot.part} after step {snapshot.step}. {_REMEDY}")
    if expected_digest is not None and metadata["digest"] != expected_digest:
        raise StateError(f"{path}: digest {metadata['digest'][:12]}… is not {expected_digest[:12]}…. {_REMEDY}")
    return snapshot


def load_weights(root: Path, step: int) -> dict[str, Tensor]:
    """The whole model's parameters by name, out of all parts of a complete step. Raises StateError as load_part."""
    weights: dict[str, Tensor] = {}
    for part, expected in read_manifest(root, step).parts.items():
        weights |= load_part(root, step, PartName(part), expected_digest=expected).weights
    return weights


def steps(root: Path) -> tuple[int, ...]:
    """All steps with a directory, complete or not, ascending; empty without a root."""
    if not root.is_dir():
        return ()
    matches = (_STEP.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def flaw(root: Path, step: int) -> str | None:
    """Why a step cannot be loaded, or None. Finds missing and torn files, cheaply; loading finds altered bytes."""
    try:
        for part in read_manifest(root, step).parts:
            _check_file(_part_path(root, step, PartName(part)))
    except StateError as error:
        return str(error)
    return None


def latest(root: Path) -> int | None:
    """The newest step without a :func:`flaw`, or None."""
    return next((step for step in reversed(steps(root)) if flaw(root, step) is None), None)


def _part_path(root: Path, step: int, part: PartName) -> Path:
    return step_directory(root, step) / f"{part}.safetensors"


def _check_file(path: Path) -> None:
    """Opening compares the header with the file's length, so it finds a torn file."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: {error}. {_REMEDY}") from error


def _write(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
        _sync(path.parent.parent)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: {error}. Free some space, or choose another directory for checkpoints.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checking every byte of a run's checkpoints, and that each is what its close record says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from peers.console.interrupt import check
from peers.console.lasting import Told, tells_nobody
from peers.console.words import CommandError, command_name, reason_of, with_commands
from peers.exit_codes import EXIT_USAGE
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest, load_manifest
from swarm.errors import ConfigError, StateError
from swarm.ids import PartName, RunId
from swarm.state.checkpoints.files import RECORD, held, part_path, read_manifest, step_directory, steps
from swarm.state.checkpoints.parts import verify_part
from swarm.state.checkpoints.proof import proof_in


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """A step after every byte of it was looked at: ``parts`` are good, of ``of`` that its record names. ``proof`` is
    ``decided``, ``unproven``, or "" for a bad record; ``ended``: this record ended the run; ``bad`` says what is wrong,
    beginning with the file's path. Where nothing was saved all of it is empty."""

    step: int
    bytes: int
    parts: tuple[PartName, ...]
    of: int
    proof: str
    missing: tuple[PartName, ...]
    bad: tuple[str, ...]
    ended: bool = False

    @property
    def good(self) -> bool:
        """True if it is complete, and right to the last bit."""
        return bool(self.parts) and not self.missing and not self.bad


def check_step(directory: RunDirectory, run: RunId, step: int, told: Told = tells_nobody) -> CheckedStep:
    """Read a step whole: the record and its signatures, every part against its digest. Costs a part's state in memory,
    twice for a moment. What is wrong is in the answer. ``told`` is told how many bytes are read, and of how many."""
    root = directory.checkpoints
    where = step_directory(root, step) / RECORD
    try:
        record = read_manifest(root, step)
    except StateError:
        bad_record = tuple(map(with_commands, held(root, step).troubles))
        return CheckedStep(step=step, bytes=0, parts=(), of=0, proof="", missing=(), bad=bad_record)
    proof, ended, bad = "", False, []
    try:
        found = proof_in(record, run)
        proof, ended = found.standing(), found.record.ended
    except StateError as error:
        bad.append(f"{where}: {reason_of(error)}")
    missing, good, size = [], [], 0
    files = {part: part_path(root, step, part) for part in map(PartName, record.parts)}
    total = sum(file.stat().st_size for file in files.values() if file.exists())
    for part, file in files.items():
        check()
        if not file.exists():
            missing.append(part)
            continue
        told(f"step {step}", size, total)
        try:
            size += verify_part(root, record, part)
            good.append(part)
        except StateError as error:
            bad.append(reason_of(error))
    return CheckedStep(
        step=step,
        bytes=size,
        parts=tuple(good),
        of=len(record.parts),
        proof=proof,
        missing=tuple(missing),
        bad=tuple(bad),
        ended=ended,
    )


def check_run(directory: RunDirectory, step: int | None = None) -> tuple[Manifest, list[CheckedStep]]:
    """Check all of a run's checkpoints, or one. Raises ConfigError when there is none such, and for a manifest that
    cannot be used."""
    manifest = load_manifest(directory.manifest)
    present = chosen_steps(directory, step)
    return manifest, [check_step(directory, manifest.run_id, one) for one in present]


def chosen_steps(directory: RunDirectory, step: int | None) -> Sequence[int]:
    """The step asked for, or all there are. Raises ConfigError when there is none such."""
    present = steps(directory.checkpoints)
    if not present:
        raise CommandError(
            f"the run in {directory.root} has no checkpoint (yet)",
            check=str(directory.checkpoints),
            next_=f"see what other runs have: {command_name()} ckpt ls",
            exit_code=EXIT_USAGE,
        )
    if step is not None and step not in present:
        raise ConfigError("--step", step, f"one of {', '.join(map(str, present))}", "Leave it out to check all.")
    return present if step is None else (step,)


def named_files(directory: RunDirectory, manifest: Manifest) -> dict[str, bytes]:
    """The files that a run's manifest names, as they lie there. Raises StateError for a missing or another one."""
    return {name: named_file(directory, manifest, name) for name in manifest.named_files}


def named_file(directory: RunDirectory, manifest: Manifest, name: str) -> bytes:
    """One of them. Raises StateError when it is missing or another."""
    path = directory.file(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}. Copy it from another peer of the run.") from error
    if hashlib.sha256(data).hexdigest() != manifest.named_files[name]:
        raise StateError(f"{path}: not the {name} of this run. Copy it from another peer of the run.")
    return data

"""When this peer writes its part to disk: at the genesis, every so many steps, and when it ends.

All peers of a machine may share a directory: of the replicas of a part there, the first that claims a step writes it,
and whoever writes the last part of a step also declares the step complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from peers.manifest_file import write_manifest as write_run_manifest
from peers.run_directory import RunDirectory
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.errors import StateError
from swarm.events import CheckpointWritten, EventSink
from swarm.ids import PartName
from swarm.optimization.records import CloseRecord
from swarm.state.checkpoint import (
    CheckpointManifest,
    flaw,
    latest,
    step_directory,
    steps,
    write_manifest,
    write_part,
)
from swarm.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

PER_RUN = 10
"""Checkpoints of a run that does not say how often."""


def run_directory_of(pattern: Path, manifest: Manifest) -> RunDirectory:
    """The directory of a run: ``{run}`` in the pattern stands for its name and the beginning of its id."""
    return RunDirectory(Path(str(pattern).replace("{run}", f"{manifest.run.name}-{manifest.run_id[:12]}")))


def keep_run(directory: RunDirectory, manifest: Manifest, tokenizer: bytes) -> None:
    """Have manifest and tokenizer there, which it takes to use the checkpoints. What is there already stays: another
    peer wrote the same. Blocking. Raises StateError when the disk refuses."""
    try:
        directory.root.mkdir(parents=True, exist_ok=True)
        if not directory.tokenizer.exists():
            temporary = directory.root / f".tokenizer-{os.getpid()}"
            temporary.write_bytes(tokenizer)
            os.replace(temporary, directory.tokenizer)
        with contextlib.suppress(FileExistsError):
            write_run_manifest(manifest, directory.manifest)
    except OSError as error:
        raise StateError(f"{directory.root}: {error.strerror}. Check space and permissions.") from error


def superseded(present: Sequence[int], complete: int | None, kept: int | None) -> list[int]:
    """The steps of which checkpoints may go: all but the newest ``kept``, the newest complete one and the genesis.
    Pure."""
    if kept is None:
        return []
    return [step for step in sorted(present)[:-kept] if step not in (0, complete)]


class CheckpointWriter:
    """Writes one peer's part beside the training. A full disk costs the checkpoint, never the run."""

    def __init__(
        self, root: Path, every: int | None, last_step: int, *, kept: int | None, events: EventSink, clock: Clock
    ) -> None:
        self._root, self._last_step, self._kept = root, last_step, kept
        self._every = every or max(1, last_step // PER_RUN)
        self._events, self._clock = events, clock

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` is to be kept."""
        return step in (0, self._last_step) or step % self._every == 0

    async def write(self, snapshot: Snapshot, record: CloseRecord) -> None:
        """Store the part off the event loop, and the step's manifest when every part is there."""
        started = self._clock.monotonic()
        try:
            path = await asyncio.to_thread(self._write, snapshot, record)
        except (StateError, OSError) as error:
            logger.error("checkpoint of step %d was not written: %s", record.step, error)
            return
        if path is not None:
            seconds = self._clock.monotonic() - started
            self._events.emit(
                CheckpointWritten(part=snapshot.part, step=snapshot.step, path=str(path), seconds=seconds)
            )

    def _write(self, snapshot: Snapshot, record: CloseRecord) -> Path | None:
        with _claimed(step_directory(self._root, snapshot.step), snapshot.part) as ours:
            if not ours:
                return None
            path = write_part(self._root, snapshot, {"run": record.run})
            self._complete(record)
        for step in superseded(steps(self._root), latest(self._root), self._kept):
            shutil.rmtree(step_directory(self._root, step), ignore_errors=True)
        return path

    def _complete(self, record: CloseRecord) -> None:
        manifest = CheckpointManifest(
            run=record.run,
            step=record.step,
            parts={PartName(part): digest for part, digest in record.digests.items()},
            detail=record.model_dump(mode="json"),
        )
        try:
            write_manifest(self._root, manifest)
        except StateError:
            logger.debug("step %d still lacks a part: %s", record.step, flaw(self._root, record.step))


@contextlib.contextmanager
def _claimed(directory: Path, part: PartName) -> Iterator[bool]:
    """Whether this peer is the one on this machine that writes the part. A claim stays when its owner dies: then that
    step lacks the part, and the next has it."""
    directory.mkdir(parents=True, exist_ok=True)
    claim = directory / f".{part}.claim"
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        yield False
        return
    yield True

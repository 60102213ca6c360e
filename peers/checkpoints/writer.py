"""Write this peer's part to disk: at the genesis, at intervals of steps, and when it ends.

All peers of a run write after the same steps, whatever else some of them write, so that their parts fit together. All
peers of a machine may share a directory: of the replicas of a part there, one writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.console.words import with_commands
from peers.frozen import note_use
from peers.home.run_directory import RunDirectory
from peers.manifest_file import write_manifest as write_run_manifest
from swarm.clock import Clock
from swarm.config import Manifest, load_manifest
from swarm.consensus.proof import Proof
from swarm.consensus.records import CloseRecord, Decision
from swarm.disk import alone, write_whole
from swarm.errors import ConfigError, OtherWire, StateError
from swarm.events import CheckpointFailed, CheckpointsSetAside, CheckpointWritten, EventSink
from swarm.ids import PartName
from swarm.state.checkpoints.files import (
    clear_bare,
    held,
    latest,
    part_path,
    read_manifest,
    refused_by_disk,
    step_directory,
    write_manifest,
)
from swarm.state.checkpoints.parts import write_part
from swarm.state.checkpoints.proof import manifest_with, stray
from swarm.state.checkpoints.rotation import aside_directory, rotate, set_aside
from swarm.state.frozen import FrozenStore
from swarm.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

PER_RUN = 10
"""Checkpoints that every peer of a run writes."""
MAX_WAITING = 2
"""States that may wait for a slow disk, each pinned in memory; further ones are left out, and an event says so."""

OTHERS_S, OTHERS_LOOK_S = 30.0, 0.2
"""How long a peer leaves the last state of its part to another on this machine that is at it; how often it looks."""
COPY_OTHERS_S = 10.0
"""As long as that for the copy of another's part, whose owner may be killed while he writes it."""


def run_directory_of(pattern: Path, manifest: Manifest) -> RunDirectory:
    """The directory of a run: ``{run}`` in the pattern stands for its name and the beginning of its id."""
    return RunDirectory(Path(str(pattern).replace("{run}", f"{manifest.run.name}-{manifest.run_id[:12]}")))


def keep_run(
    directory: RunDirectory, manifest: Manifest, files: Mapping[str, bytes], frozen: FrozenStore | None = None
) -> None:
    """Have the manifest and the files that it names there, whole, which it takes to use the checkpoints. What is there
    already stays, another peer wrote the same, unless it cannot be used. The store of ``frozen`` weights learns who
    needs them, where the directory is no place where one looks for that. Blocking: some syncs of the disk where
    something is missing. Raises StateError when the disk refuses, and for a file of such a name where no run is kept
    yet, OtherWire for the directory of a run of another wire version."""
    try:
        for name, digest in manifest.named_files.items():
            path = directory.file(name)
            if _is_file(path, digest):
                continue
            if path.exists() and not directory.manifest.exists():
                raise StateError(
                    f"{path}: this file is not the run's, and was not changed. Move it, or name another directory."
                )
            with alone(path, wait=True):
                write_whole(path, [files[name]])
        if not _is_manifest(directory.manifest):
            with alone(directory.manifest, wait=True):
                write_run_manifest(manifest, directory.manifest)
        note_use(directory, manifest, frozen)
    except OSError as error:
        raise StateError(f"{directory.root}: {error.strerror}. Check space and permissions.") from error


def _is_file(path: Path, digest: str) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _is_manifest(path: Path) -> bool:
    try:
        load_manifest(path)
    except OtherWire:
        raise  # it is the manifest of a run of before: nobody writes over that
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Periods:
    """The steps after which a peer keeps its part: the multiples of ``shared``, which all peers of a run keep, and of
    its ``own``."""

    shared: int
    own: int

    @classmethod
    def of(cls, steps: int, own: int | None) -> Periods:
        """Return those of a peer in a run of so many steps, with a period of its own or without."""
        shared = max(1, steps // PER_RUN)
        return cls(shared, own or shared)

    def due(self, step: int) -> bool:
        """Return whether the state after ``step`` is to be kept."""
        return 0 in (step % self.shared, step % self.own)


class CheckpointWriter:
    """Writes one peer's part besides the training. A disk that refuses costs the checkpoint, never the run: what was
    there stays, and an event says why.

    Tell it every decision with :meth:`heard`, so that each checkpoint lies with what proves it.
    """

    def __init__(
        self, root: Path, periods: Periods, last_step: int, *, kept: int | None, events: EventSink, clock: Clock
    ) -> None:
        self._root, self._last_step, self._kept = root, last_step, kept
        self._periods = periods
        self._events, self._clock = events, clock
        self._newest: Proof | None = None
        self._one_by_one = asyncio.Lock()
        self._waiting = 0
        self._unkept: tuple[CheckpointFailed, str] | None = None

    def due(self, step: int) -> bool:
        """Return whether the state after ``step`` is to be kept."""
        return step == self._last_step or self._periods.due(step)

    def heard(self, decision: Decision) -> None:
        """A record was decided. Costs no more than its hash."""
        self._newest = Proof.of(decision, None if self._newest is None else self._newest.record)

    async def set_aside(self, there: Iterable[int], newest: CloseRecord) -> None:
        """The run goes on from this record: of ``there``, the steps that lay here before, those that are not of its
        history do not count any more. A disk that refuses leaves them where they are, where rotation passes over them.
        """
        try:
            async with self._one_by_one:
                gone = await asyncio.to_thread(self._set_aside, there, newest)
        except OSError as error:
            logger.warning("checkpoints beyond step %d could not be set aside: %s", newest.step, error)
            return
        if gone:
            where = str(aside_directory(self._root))
            self._events.emit(CheckpointsSetAside(steps=tuple(gone), step=newest.step, path=where))

    def _set_aside(self, there: Iterable[int], newest: CloseRecord) -> list[int]:
        return set_aside(self._root, stray((held(self._root, step) for step in there), newest))

    async def write(self, snapshot: Snapshot, record: CloseRecord, *, last: bool = False) -> None:
        """Store the part off the event loop, beside its record. One after the other; a disk that is more than
        MAX_WAITING checkpoints behind is given no more, but for the ``last`` one, see :meth:`unkept`. Cancelled, it
        leaves the thread to finish its file."""
        try:
            if self._waiting >= MAX_WAITING and not last:
                raise StateError(f"{self._waiting} earlier checkpoints are still being written")
            await self._store(snapshot, record, OTHERS_S if last else 0.0)
        except (StateError, OSError) as error:
            failed = await self._failed(snapshot, with_commands(str(error)))
            if last:
                self._unkept = failed, record.digests.get(snapshot.part, "")

    async def write_copy(self, snapshot: Snapshot, record: CloseRecord) -> None:
        """Store another's part as :meth:`write` does, with whose state the run is over. A disk that refuses is no
        failure of this peer's: the log says so."""
        try:
            await self._store(snapshot, record, COPY_OTHERS_S)
        except (StateError, OSError) as error:
            logger.info("the copy of %s of step %d was not written: %s", snapshot.part, snapshot.step, error)

    async def write_now(self, snapshot: Snapshot, record: CloseRecord) -> str:
        """Store the part as :meth:`write` does, whatever is due; returns why the disk refused, "" once it is there."""
        try:
            await self._store(snapshot, record, COPY_OTHERS_S)
        except (StateError, OSError) as error:
            return (await self._failed(snapshot, with_commands(str(error)))).reason
        return ""

    def unkept(self) -> CheckpointFailed | None:
        """The last state of all, when it was not written by this peer and is not here from another, as it was decided.
        Reads a few small files."""
        if self._unkept is None:
            return None
        failed, expected = self._unkept
        return None if self._has(failed.step, failed.part, expected) else failed

    async def _store(self, snapshot: Snapshot, record: CloseRecord, others_s: float) -> None:
        """A part that another peer on this machine is writing is left to it: for ``others_s``, with 0 for good. Raises
        StateError or OSError when the disk refuses."""
        proof = self._newest
        if proof is None or proof.record.hash() != record.hash():
            proof = Proof(record=record)
        self._waiting += 1
        started = self._clock.monotonic()
        try:
            async with self._one_by_one:
                path = await asyncio.to_thread(self._write, snapshot, proof)
                if others_s and path is None:
                    path = await self._insist(snapshot, proof, others_s)
        except (StateError, OSError):
            await asyncio.to_thread(clear_bare, self._root, snapshot.step)
            raise
        finally:
            self._waiting -= 1
        if path is not None:
            seconds = self._clock.monotonic() - started
            self._events.emit(
                CheckpointWritten(part=snapshot.part, step=snapshot.step, path=str(path), seconds=seconds)
            )

    async def _failed(self, snapshot: Snapshot, reason: str) -> CheckpointFailed:
        logger.info("checkpoint of step %d was not written: %s", snapshot.step, reason)
        kept: int | None = None
        with contextlib.suppress(OSError):
            kept = await asyncio.to_thread(latest, self._root)
        failed = CheckpointFailed(part=snapshot.part, step=snapshot.step, reason=reason, kept=kept)
        self._events.emit(failed)
        return failed

    async def _insist(self, snapshot: Snapshot, proof: Proof, others_s: float) -> Path | None:
        """Another peer on this machine writes the part, or has. It must have, or we do: it may fail, or be killed. Who
        is not done in time may stand still for ever: the part is written beside, and the last to be done stays."""
        until, expected = self._clock.monotonic() + others_s, proof.record.digests[snapshot.part]
        while not await asyncio.to_thread(self._has, snapshot.step, snapshot.part, expected):
            beside = self._clock.monotonic() >= until
            if not beside:
                await self._clock.sleep(OTHERS_LOOK_S)
            path = await asyncio.to_thread(self._write, snapshot, proof, beside=beside)
            if path is not None:
                return path
        return None

    def _write(self, snapshot: Snapshot, proof: Proof, *, beside: bool = False) -> Path | None:
        """The part's file; None when another peer on this machine has written it, or is at it unless ``beside``."""
        root, step, part = self._root, snapshot.step, snapshot.part
        path, expected = part_path(root, step, part), proof.record.digests.get(part)
        if expected is None:
            raise StateError(f"the record of step {step} names no {part}")
        try:
            with alone(path, wait=False) as ours:
                if not (ours or beside) or self._has(step, part, expected):
                    return None
                self._record(proof)
                write_part(root, snapshot, {"run": proof.record.run}, expected_digest=expected)
        except OSError as error:
            raise refused_by_disk(path, error) from error
        rotate(root, self._kept, step, self._periods.shared, self.due)
        return path

    def _has(self, step: int, part: PartName, expected: str) -> bool:
        found = held(self._root, step)
        return part in found.parts and found.record is not None and found.record.parts.get(part) == expected

    def _record(self, proof: Proof) -> None:
        """Before the part, so that no part ever lies there without what it must be. Of two that name the same parts
        the one that proves it stays."""
        wanted = manifest_with(proof)
        if step_directory(self._root, wanted.step).is_dir():
            with contextlib.suppress(StateError):
                there = read_manifest(self._root, wanted.step)
                same = (there.run, there.parts) == (wanted.run, wanted.parts)
                if same and (there.detail.get("acceptances") or not proof.acceptances):
                    return
        write_manifest(self._root, wanted)

"""The chain of close records: what this peer knows was decided."""

from __future__ import annotations

import json
import os
from pathlib import Path

from swarm.errors import ConfigError, OutOfSync
from swarm.optimization.records import NO_RECORD, CloseRecord


class History:
    """Append-only. Each record names the hash of the one before; a record that does not fit is refused.

    With a path every record is also in a JSONL file, synced, before :meth:`append` returns. Raises ConfigError when
    that file exists: one home, one run.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None and path.exists():
            raise ConfigError(
                "home", str(path.parent), "a directory without a run's history", "Give this peer a new home."
            )
        self._path = path
        self._head: CloseRecord | None = None
        self._hash = NO_RECORD

    @property
    def head(self) -> CloseRecord:
        """The newest record. Raises OutOfSync before the genesis."""
        if self._head is None:
            raise OutOfSync("the run has not started: there is no genesis record yet")
        return self._head

    @property
    def head_hash(self) -> str:
        """Hash of the newest record, NO_RECORD before the genesis."""
        return self._hash

    @property
    def next_step(self) -> int:
        """The step that the next record closes; 0 is the genesis."""
        return 0 if self._head is None else self._head.step + 1

    def begin(self, record: CloseRecord) -> None:
        """Start the chain at a record that was verified otherwise: for who joins a run in progress, and anew when it
        fell too far behind. What was before is forgotten, in the file too, so that it is one chain. Raises OutOfSync
        for a record that contradicts our newest one or is older, OSError as :meth:`append`."""
        if self._head is not None:
            older, same = record.step < self._head.step, record.step == self._head.step
            if older or record.run != self._head.run or (same and record.hash() != self._hash):
                raise OutOfSync(
                    f"the record of step {record.step} is not of the history that we know to {self._head.step}"
                )
        self._write(record, "w")

    def check(self, record: CloseRecord) -> None:
        """Raises OutOfSync when the record cannot follow."""
        if record.step != self.next_step:
            raise OutOfSync(f"a record of step {record.step} came where step {self.next_step} is next")
        if record.previous != self._hash:
            raise OutOfSync(
                f"the record of step {record.step} follows {record.previous[:12]}, ours is {self._hash[:12]}"
            )
        if self._head is not None and record.run != self._head.run:
            raise OutOfSync("the record belongs to another run")

    def append(self, record: CloseRecord) -> None:
        """Add a decided record. Blocks for a disk's sync. Raises OSError, with nothing added, when the disk refuses."""
        self.check(record)
        self._write(record, "a")

    def _write(self, record: CloseRecord, mode: str) -> None:
        if self._path is not None:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(record.model_dump(mode="json"), separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self._head, self._hash = record, record.hash()

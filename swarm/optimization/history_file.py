"""The file of a history: one line a record, as ``history.jsonl`` in a peer's home.

A line is the record's own fields and, under ``decision``, the term in which it was decided with the signatures of those
who accepted it, so that others can verify the chain later. It counts from its line end on: whatever ends the process or
the machine, what can be read is a prefix of the chain.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from swarm.errors import StateError
from swarm.optimization.records import CloseRecord
from swarm.schema import Count, Message, PeerIdField
from swarm.state.checkpoint_disk import sync_directory

MAX_LINE_BYTES = 64 << 20
"""More than any record that fits a message takes as JSON, with everybody's signature."""


class _Proof(Message):
    term: Count = 0
    acceptances: Annotated[
        dict[PeerIdField, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]], Field(max_length=20_000)
    ]


class _Written(CloseRecord):
    decision: _Proof | None = None


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """A decided record as it is kept: the term in which it was decided, and the signatures of those who accepted it
    (None where they were not kept)."""

    record: CloseRecord
    acceptances: Mapping[str, bytes] | None = None
    term: int = 0

    def encode(self) -> bytes:
        """The line, with its end."""
        value = self.record.model_dump(mode="json")
        if self.acceptances is not None:
            signed = {peer: signature.hex() for peer, signature in sorted(self.acceptances.items())}
            value["decision"] = {"term": self.term, "acceptances": signed}
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> HistoryLine:
        """The inverse. Raises ValueError, with what is wrong in one line, for what no peer has written."""
        try:
            written = _Written.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from error
        # Every value was checked just now, and the record's hash must not see what lies beside it.
        record = CloseRecord.model_construct(
            written.model_fields_set - {"decision"},
            **{name: getattr(written, name) for name in CloseRecord.model_fields},
        )
        if written.decision is None:
            return HistoryLine(record, None, record.term)
        signatures = {peer: bytes.fromhex(signature) for peer, signature in written.decision.acceptances.items()}
        return HistoryLine(record, signatures, written.decision.term)


class HistoryReader:
    """The lines of a history file as it is when reading begins, the oldest first. ``torn`` says, when all were read,
    whether an unfinished line lies behind them: one that is being written, or during which the machine went down.

    Iterating raises StateError, naming path and line, at a line that no peer has written, and OSError for a file that
    cannot be read. One record is in memory at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.torn = path, False

    def __iter__(self) -> Generator[HistoryLine, None, None]:
        with self.path.open("rb") as file:
            left, number = os.fstat(file.fileno()).st_size, 0
            while left > 0:
                line = file.readline(min(left, MAX_LINE_BYTES))
                left, number = left - len(line), number + 1
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE_BYTES:
                        raise StateError(f"{self.path}, line {number}: longer than any record")
                    self.torn = True
                    return
                try:
                    yield HistoryLine.decode(line)
                except ValueError as error:
                    raise StateError(f"{self.path}, line {number}: not a close record: {error}") from error


class HistoryWriter:
    """Appends lines to a file of its own, which it makes with the first one. Blocks for a disk's sync."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes, self._inode = 0, (0, 0)

    @property
    def begun(self) -> bool:
        """Whether a line was written."""
        return self._bytes > 0

    def write(self, line: HistoryLine) -> None:
        """Add a line; it is on the disk when this returns. What lies there before the first line is written over.

        Raises OSError, with nothing added, when the disk refuses, and when the file is no longer the one written here:
        removed, cut, or another's.
        """
        data = line.encode()
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if self._bytes else os.O_CREAT)
        descriptor = os.open(self._path, flags, 0o644)
        try:
            self._check(descriptor)
            try:
                _write_at(descriptor, self._bytes, data)
                if not self._bytes:
                    sync_directory(self._path.parent)
            except OSError:
                # If this fails too, the next write does it, and until then a reader passes over half a line.
                with suppress(OSError):
                    os.ftruncate(descriptor, self._bytes)
                raise
        finally:
            os.close(descriptor)
        self._bytes += len(data)

    def _check(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        inode = (found.st_dev, found.st_ino)
        if self._bytes and (inode != self._inode or found.st_size < self._bytes):
            raise OSError(errno.ESTALE, "it was cut, or exchanged for another file", str(self._path))
        self._inode = inode


def set_aside(path: Path) -> Path:
    """Keep a history under the next number beside it. Raises OSError."""
    kept = path.with_name(f"{path.stem}-{max(map(_number, earlier(path)), default=0) + 1}{path.suffix}")
    os.rename(path, kept)
    return kept


def earlier(path: Path) -> list[Path]:
    """The numbered files beside a history: what was in it before, the oldest first."""
    found = [file for file in path.parent.glob(f"{path.stem}-*{path.suffix}") if _number(file)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    """Of ``history-3.jsonl`` 3; 0 for a file that is not one of those."""
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isascii() and text.isdigit() else 0


def _write_at(descriptor: int, at: int, data: bytes) -> None:
    """Have the file end with ``data``, from ``at`` on."""
    os.ftruncate(descriptor, at)
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written
    os.fsync(descriptor)

"""The chain of close records: what this peer knows was decided, by whom, and the file it is kept in.

The file, ``history.jsonl`` in a peer's home, has one line a record: the record's own fields and, under ``decision``,
the term in which it was decided with the signatures of those who accepted it, so that others can verify the chain
later. A line counts from its line end on: whatever ends the process or the machine, what can be read is a prefix of the
chain.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.disk import sync_directory
from swarm.errors import Advice, ConfigError, OutOfSync, StateError
from swarm.schema import Count, Message, PeerIdField

logger = logging.getLogger(__name__)

MAX_UNWRITTEN = 256
"""How many records are kept in memory for a disk that takes none."""


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A decided record that is not on the disk yet; ``anew``: a chain begins with it."""

    line: HistoryLine
    anew: bool


class History:
    """Append-only. Each record names the hash of the one before; a record that does not fit is refused.

    With a path every record is also in that file, synced, before :meth:`append` returns, unless the disk refuses: then
    ``trouble`` is told why, the chain goes on in memory, and the next record is written behind all that are missing, in
    order, or, when more than MAX_UNWRITTEN are, as the first of a chain that begins anew; so no file has a gap.
    ``trouble`` is told "" when all is written. A file that an earlier life of this peer left there is kept under a
    number (``history-1.jsonl``, …) when the first record comes, and the chain begins anew; so it is when steps are left
    out. Raises ConfigError when it is of another run than ``run`` (None: than
    the first record), or cannot be read.
    """

    def __init__(
        self, path: Path | None = None, run: str | None = None, trouble: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._path, self._run, self._trouble = path, run, trouble
        self._unwritten: deque[_Unwritten] = deque()
        self._head: CloseRecord | None = None
        self._hash = NO_RECORD
        self._writer: HistoryWriter | None = None
        self._left = None if path is None else _run_in(path)
        if run is not None and path is not None:
            self._check_home(path, run)

    @property
    def head(self) -> CloseRecord:
        """The newest record. Raises OutOfSync before the first."""
        if self._head is None:
            raise OutOfSync("there is no record of the run here yet")
        return self._head

    @property
    def head_hash(self) -> str:
        """Hash of the newest record, NO_RECORD before the first."""
        return self._hash

    @property
    def next_step(self) -> int:
        """The step that the next record closes; 0 before the first."""
        return 0 if self._head is None else self._head.step + 1

    def begin(self, record: CloseRecord, acceptances: Mapping[str, bytes] | None = None, term: int = 0) -> None:
        """Start the chain at a record that was verified otherwise: for who joins a run in progress, and anew when it
        fell too far behind. What was before is forgotten, and its file numbered: a file is one chain. Our newest record
        changes nothing. Raises OutOfSync for a record that contradicts our newest one or is older, else as
        :meth:`append`."""
        if self._head is not None:
            older, same = record.age < self._head.age, record.age == self._head.age
            if older or record.run != self._head.run or (same and record.hash() != self._hash):
                raise OutOfSync(
                    f"the record of step {record.step} is not of the history that we know to {self._head.step}"
                )
            if same:
                return
        self._check_run(record)
        self._write(HistoryLine(record, acceptances, term), anew=True)

    def check(self, record: CloseRecord) -> None:
        """Raises OutOfSync when the record cannot follow. The first is the genesis, or the founding record of a run
        that is resumed, which may be of any step."""
        self._check_run(record)
        if self._head is None and record.founding and record.step > 0:
            if record.previous == NO_RECORD:
                raise OutOfSync(f"the founding record of step {record.step} names no checkpoint's record before it")
            return
        if self._head is not None and self._head.ended:
            raise OutOfSync(f"the run was ended with step {self._head.step}: nothing follows it")
        if record.decides != self.next_step:
            raise OutOfSync(f"a record of step {record.decides} came where step {self.next_step} is next")
        if self._head is not None and record.returns != self._head.returns + bool(record.repeats):
            raise OutOfSync(f"the record of step {record.step} counts {record.returns} returns of the run to before")
        if record.previous != self._hash:
            raise OutOfSync(
                f"the record of step {record.step} follows {record.previous[:12]}, ours is {self._hash[:12]}"
            )

    def append(self, record: CloseRecord, acceptances: Mapping[str, bytes] | None = None, term: int = 0) -> None:
        """Add a decided record, with the signatures of those who accepted it in ``term``. Blocks for a disk's sync.
        Raises OutOfSync as :meth:`check`, and ConfigError as the constructor where ``run`` was not known then."""
        self.check(record)
        self._write(HistoryLine(record, acceptances, term), anew=self._head is None)

    def rewind(self, record: CloseRecord) -> None:
        """Go back to a record before the newest: what was since did not count. The file is numbered as it is, and the
        next record begins another. Raises OSError, with all as it was."""
        if self._path is not None:
            self._set_aside(self._path)
            self._unwritten.clear()
        self._head, self._hash = record, record.hash()

    async def add(self, record: CloseRecord, acceptances: Mapping[str, bytes] | None = None, term: int = 0) -> None:
        """As :meth:`append`, while the event loop goes on: a disk that stalls must not make this peer silent. Nothing
        else may be written meanwhile; the record is the newest when this returns. Cancelled, it may be on the disk, and
        is not known here."""
        self.check(record)
        line, path = HistoryLine(record, acceptances, term), self._path
        if path is not None:
            self._enqueue(path, line, anew=self._head is None)
            self._trouble(await asyncio.to_thread(self._catch_up, path))
        self._head, self._hash = record, record.hash()

    async def go_on(self, record: CloseRecord, acceptances: Mapping[str, bytes] | None = None, term: int = 0) -> None:
        """As :meth:`add` where the record is the next one, else as :meth:`begin`."""
        if 0 < self.next_step == record.step:
            await self.add(record, acceptances, term)
        else:
            self.begin(record, acceptances, term)

    def _check_run(self, record: CloseRecord) -> None:
        run = self._run if self._head is None else self._head.run
        if run is not None and record.run != run:
            raise OutOfSync("the record belongs to another run")

    def _check_home(self, path: Path, run: str) -> None:
        if self._left is not None and self._left != run:
            raise ConfigError(
                "home", str(path.parent), f"a home of run {run[:12]}, and its history is of {self._left[:12]}",
                Advice.OTHER_HOME,
            )  # fmt: skip

    def _write(self, line: HistoryLine, *, anew: bool) -> None:
        if self._path is not None:
            self._enqueue(self._path, line, anew=anew)
            self._trouble(self._catch_up(self._path))
        self._head, self._hash = line.record, line.record.hash()

    def _enqueue(self, path: Path, line: HistoryLine, *, anew: bool) -> None:
        anew = anew or (self._writer is None and not self._unwritten)  # after a rewind
        if anew:
            self._check_home(path, line.record.run)
        self._unwritten.append(_Unwritten(line, anew))

    def _catch_up(self, path: Path) -> str:
        """Write what is not written yet, as far as the disk takes it; returns why it takes no more, "" when it took
        all. Blocks for a sync a record."""
        if len(self._unwritten) > MAX_UNWRITTEN:
            newest = self._unwritten.pop()
            self._unwritten = deque([_Unwritten(newest.line, anew=True)])
        try:
            while self._unwritten:
                self._write_one(path, self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            logger.error(
                "cannot write to %s the record of step %d: %s", path, self._unwritten[0].line.record.step, error
            )
            return error.strerror or str(error)
        return ""

    def _write_one(self, path: Path, unwritten: _Unwritten) -> None:
        if unwritten.anew:
            self._set_aside(path)
            self._writer = HistoryWriter(path)
        assert self._writer is not None  # noqa: S101 - the first record is always one with which a chain begins
        self._writer.write(unwritten.line)

    def _set_aside(self, path: Path) -> None:
        if self._left is not None or (self._writer is not None and self._writer.begun):
            with suppress(FileNotFoundError):
                logger.info("what was in %s is kept in %s", path, set_aside(path).name)
        self._left = self._writer = None


def _run_in(path: Path) -> str | None:
    """The run whose history lies there; None for no file, and for one without a whole record. Reads one line and the
    last byte. Raises ConfigError for what is no history."""
    remedy = "Move it away, or give this peer a new home."
    try:
        reader = HistoryReader(path)
        with closing(iter(reader)) as lines:
            first = next(lines, None)
        torn = reader.torn or (first is not None and not _ends_whole(path))
    except FileNotFoundError:
        return None
    except (OSError, StateError) as error:
        raise ConfigError("home", str(path.parent), f"a home whose history can be read; {error}", remedy) from error
    if torn:
        logger.warning("ignored the half record at the end of %s: the peer stopped while it wrote it", path)
    return None if first is None else first.record.run


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# --- history file ----------------------------------------------------------------------------------------------------


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
        # Every value was checked just now, and the record's hash must not see what lies next to it.
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
        """True if a line was written."""
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
    """Keep a history under the next number next to it. Raises OSError."""
    kept = path.with_name(f"{path.stem}-{max(map(_number, earlier(path)), default=0) + 1}{path.suffix}")
    os.rename(path, kept)
    return kept


def earlier(path: Path) -> list[Path]:
    """The numbered files next to a history: what was in it before, the oldest first."""
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

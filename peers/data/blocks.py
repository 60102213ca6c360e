"""Files of text as blocks of about a mebibyte: what one process tokenises at a time.

Reading is quick beside tokenising, so that one process reads for all: it decompresses, and cuts where a record ends.
Text has none: a file of it is one document, and its blocks come with what is around them, for their tokens to be those
of the whole. Nothing is looked at here that a block's tokeniser can look at (:mod:`peers.data.records`). Where the cuts
are depends on the file's contents alone: a build that goes on after a kill finds the blocks that it had done.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from data_shards.privacy import Private
from data_shards.tokenize import AROUND
from peers.console.words import another_path, command_name
from peers.data.files import SourceFile
from peers.data.keys import ALPACA, CHAT_FIELDS, MEDIA, PAIR, PREFERENCES, READ, TEXT_FIELD
from swarm.errors import ConfigError

BLOCK_BYTES = 1 << 20
AROUND_BYTES = 4 * AROUND
"""Of text before and after a block, at least: a character has at most four."""
LONGEST_RECORD = 16 << 20
ROWS_AT_ONCE = 256
_UNREAD_KEPT = 1024

Flaw = tuple[int, str]
"""A record that cannot be used: its line (of tables, the row), and why."""


@dataclass(frozen=True, slots=True, repr=False)
class TextBlock(Private):
    """A part of a file. ``line`` is the number of the first line in it, ``lines`` of each where some are left out.

    ``before`` and ``after`` are what is around a part of text; where there is nothing, the text begins or ends.
    ``flaws`` are records that could not be read at all. ``read`` is how much of the file has been, in bytes on disk.
    ``unread`` are the columns of a table that are not in it.
    """

    file: str
    kind: Literal["text", "jsonl"]
    body: bytes
    line: int
    lines: tuple[int, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    read: int = 0
    unread: tuple[str, ...] = ()
    before: bytes = b""
    after: bytes = b""

    @property
    def digest(self) -> str:
        """Of what documents are made of it, hex."""
        sizes = len(self.before), len(self.after)
        said = json.dumps([self.kind, self.line, self.lines, self.flaws, self.unread, sizes]).encode()
        found = hashlib.blake2b(said, digest_size=16)
        for part in (self.before, self.body, self.after):
            found.update(part)
        return found.hexdigest()

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.body)} bytes of a file"


def blocks_of(file: SourceFile, key: str, field: str | None = None) -> Iterator[TextBlock]:
    """The blocks of one file.

    Args:
        file: The file.
        key: What errors call the option that named it.
        field: The column or key that has the text; dots lead into what is nested. None: what is customary.

    Raises:
        ConfigError: It cannot be read at all, or has no such column.
    """
    try:
        if file.kind in ("parquet", "arrow"):
            yield from _columns(file, key, field)
            return
        with file.path.open("rb") as raw, _unpacked(file, raw, key) as stream:
            if file.kind in ("csv", "tsv"):
                yield from _table(file, key, field, raw, stream)
            else:
                yield from _plain(file, raw, stream)
    except OSError as error:
        cause = (error.strerror or str(error) or "unreadable").lower()
        raise ConfigError(key, str(file.path), "a readable text file", another_path(file.path), why=cause) from None


def extra_missing(key: str, value: str, package: str) -> ConfigError:
    """The error for a kind of file whose package is not installed."""
    remedy = "Install it: pip install 'swarm-trainer[data]', or make setup in a clone."
    return ConfigError(key, value, f"the package {package} to read it with", remedy, why="it is not installed here")


# --- bytes -----------------------------------------------------------------------------------------------------------


_BROKEN = (EOFError, zlib.error)


@contextlib.contextmanager
def _unpacked(file: SourceFile, raw: BinaryIO, key: str) -> Iterator[BinaryIO]:
    if file.packed == "gzip":
        import gzip

        with gzip.open(raw) as stream:
            yield cast(BinaryIO, stream)
    elif file.packed == "zstd":
        try:
            import zstandard
        except ImportError:
            raise extra_missing(key, str(file.path), "zstandard") from None
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False) as stream:
            yield cast(BinaryIO, _Readable(stream, zstandard.ZstdError))
    else:
        yield raw


class _Readable(io.RawIOBase):
    """A reader of zstd whose errors are those that others have."""

    def __init__(self, stream: Any, error: type[Exception]) -> None:
        self._stream, self._error = stream, error

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._stream.read(size))
        except self._error:
            raise EOFError("it is damaged") from None

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _plain(file: SourceFile, raw: BinaryIO, stream: BinaryIO) -> Iterator[TextBlock]:
    """Blocks of whole lines, as far as those of text are not too long."""
    kind: Literal["text", "jsonl"] = "text" if file.kind == "text" else "jsonl"
    name, line, before, rest, skipping = str(file.path), 1, b"", b"", False
    while True:
        flaws: tuple[Flaw, ...] = ()
        try:
            more = stream.read(BLOCK_BYTES)
        except (*_BROKEN, OSError) as error:
            if not file.packed:
                raise
            more, flaws = b"", ((line + rest.count(b"\n"), f"the rest cannot be unpacked: {error}"),)
        ended = not more
        if skipping:  # in a line that is too long
            end = more.find(b"\n") + 1
            skipping = not end
            more = more[end:] if end else b""
            line += bool(end)
        rest += more
        while kind == "text" and len(rest) > BLOCK_BYTES + 2 * AROUND_BYTES:
            cut = _line_end(rest, BLOCK_BYTES // 2, BLOCK_BYTES)
            body, rest = rest[:cut], rest[cut:]
            after = rest[: _line_end(rest, AROUND_BYTES, 2 * AROUND_BYTES)]
            yield TextBlock(name, kind, body, line, before=before, after=after, read=raw.tell())
            line += body.count(b"\n")
            before += body
            if (size := len(before)) > 2 * AROUND_BYTES:
                before = before[_line_end(before, size - 2 * AROUND_BYTES, size - AROUND_BYTES) :]
        cut = len(rest) if ended else rest.rfind(b"\n") + 1 if kind == "jsonl" and len(rest) >= BLOCK_BYTES else 0
        if kind == "jsonl" and not cut and len(rest) > LONGEST_RECORD:
            flaws = (*flaws, (line, f"it is longer than {LONGEST_RECORD >> 20} MiB"))
            rest, skipping = b"", True
        if cut or flaws:
            body, rest = rest[:cut], rest[cut:]
            yield TextBlock(name, kind, body, line, before=before, flaws=flaws, read=raw.tell())
            line += body.count(b"\n")
        if ended:
            return


def _line_end(data: bytes, least: int, most: int) -> int:
    """The last place from ``least`` to ``most`` where a line ends, else the last that is not within a character."""
    if end := data.rfind(b"\n", least - 1, most) + 1:
        return end
    while most > least and data[most] & 0xC0 == 0x80:
        most -= 1
    return most


# --- tables: each row becomes a line of JSON -------------------------------------------------------------------------


def _gathered(
    name: str, rows: Iterator[tuple[int, str | None, str, int]], unread: tuple[str, ...]
) -> Iterator[TextBlock]:
    """Blocks of rows (number, JSON or None, flaw, bytes read)."""
    lines: list[int] = []
    texts: list[bytes] = []
    flaws: list[Flaw] = []
    size = read = 0
    for number, text, flaw, read in rows:
        if text is None:
            flaws.append((number, flaw))
            continue
        lines.append(number)
        texts.append(text.encode())
        size += len(text)
        if size >= BLOCK_BYTES:
            yield TextBlock(name, "jsonl", b"\n".join(texts), lines[0], tuple(lines), tuple(flaws), read, unread)
            lines, texts, flaws, size = [], [], [], 0
    if texts or flaws:
        first = lines[0] if lines else 1
        yield TextBlock(name, "jsonl", b"\n".join(texts), first, tuple(lines), tuple(flaws), read, unread)


def _table(file: SourceFile, key: str, field: str | None, raw: BinaryIO, stream: BinaryIO) -> Iterator[TextBlock]:
    csv.field_size_limit(LONGEST_RECORD)
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), BLOCK_BYTES) if file.packed == "zstd" else stream
    text = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter="\t" if file.kind == "tsv" else ",")
    try:
        header = next(reader, [])
    except (csv.Error, *_BROKEN) as error:
        why = f"its first line cannot be read: {error}"
        raise ConfigError(key, str(file.path), "a table", another_path(file.path), why=why) from None
    wanted, unread = _chosen(file, key, header, field)
    at = {header.index(name): name for name in wanted}

    def rows() -> Iterator[tuple[int, str | None, str, int]]:
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield line, None, f"it is no row: {error}", raw.tell()
                continue
            except (*_BROKEN, OSError) as error:
                yield line, None, f"the rest cannot be unpacked: {error}", raw.tell()
                return
            if row is None:
                return
            if not row:
                continue
            if len(row) <= max(at):
                yield line, None, f"it has {len(row)} columns, the first line {len(header)}", raw.tell()
            else:
                yield line, json.dumps({name: row[place] for place, name in at.items()}), "", raw.tell()

    try:
        yield from _gathered(str(file.path), rows(), unread)
    finally:
        text.detach()


def _columns(file: SourceFile, key: str, field: str | None) -> Iterator[TextBlock]:
    try:
        import pyarrow as pa
    except ImportError:
        raise extra_missing(key, str(file.path), "pyarrow") from None
    try:
        names, batches, total = _opened(file)
        wanted, unread = _chosen(file, key, names, field)

        def rows() -> Iterator[tuple[int, str | None, str, int]]:
            number = 0
            for batch in batches(wanted):
                columns = [_values(batch.column(name), there=name in MEDIA) for name in wanted]
                for values in zip(*columns, strict=True):
                    number += 1
                    read = file.bytes * number // max(total, number)
                    row = dict(zip(wanted, values, strict=True))
                    yield number, json.dumps(row, default=lambda _: None), "", read

        yield from _gathered(str(file.path), rows(), unread)
    except pa.ArrowException as error:
        why = f"it is damaged, or none: {str(error).splitlines()[0][:200]}"
        raise ConfigError(key, str(file.path), f"a {file.kind} file", another_path(file.path), why=why) from None


def _opened(file: SourceFile) -> tuple[list[str], Any, int]:
    """Names of the columns; a function from some to batches of them; rows, 0 where nobody knows."""
    import pyarrow as pa

    if file.kind == "parquet":
        import pyarrow.parquet as pq

        parquet = pq.ParquetFile(file.path, buffer_size=BLOCK_BYTES, pre_buffer=False)
        return (
            parquet.schema_arrow.names,
            lambda some: parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=some, use_threads=False),
            parquet.metadata.num_rows,
        )
    mapped = pa.memory_map(str(file.path))
    try:
        table = pa.ipc.open_file(mapped)
        return table.schema.names, lambda _: map(table.get_batch, range(table.num_record_batches)), 0
    except pa.ArrowInvalid:
        mapped.seek(0)
        stream = pa.ipc.open_stream(mapped)
        return stream.schema.names, lambda _: stream, 0


def _values(column: Any, *, there: bool) -> list[Any]:
    """What a column has, without the nulls that the other rows' keys make; or True where ``there`` is anything."""
    import pyarrow as pa

    if not there or pa.types.is_string(column.type):
        return [_without_nulls(value) for value in column.to_pylist()]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return [bool(length) or None for length in column.value_lengths().to_pylist()]
    return [valid or None for valid in column.is_valid().to_pylist()]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _chosen(file: SourceFile, key: str, names: Sequence[str], field: str | None) -> tuple[list[str], tuple[str, ...]]:
    """The columns of a table that are read, and the others."""
    text = TEXT_FIELD if field is None else field.partition(".")[0]
    kinds = (*((name,) for name in (*CHAT_FIELDS, TEXT_FIELD, *PREFERENCES)), PAIR, ALPACA[:2])
    if text in names or (field is None and any(set(kind) <= set(names) for kind in kinds)):
        wanted = [name for name in dict.fromkeys(names) if name == text or name in READ]
        return wanted, tuple(name for name in dict.fromkeys(names) if name not in wanted)[:_UNREAD_KEPT]
    there = ", ".join(name[:40] for name in names[:12]) or "no column"
    option = "join … --data-field" if key == "--data" else "data build … --field"
    remedy = f"Name the column: {command_name()} {option} NAME"
    raise ConfigError(key, str(file.path), f"a table with the column {text}", remedy, why=f"it has {there}")

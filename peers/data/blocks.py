"""Files of text as blocks of about a mebibyte: what one process tokenises at a time.

Reading is quick beside tokenising, so that one process reads for all: it decompresses, and cuts where a record ends.
Text has none: a file of it is one document, and its blocks come with what is around them, for their tokens to be those
of the whole. Lines that are no text are left out before it is cut. Nothing else is looked at here that a block's
tokeniser can look at (:mod:`peers.data.records`). Where the cuts are depends on the file's contents alone: a build that
goes on after a kill finds the blocks that it had done.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Literal

from data_shards.privacy import Private
from data_shards.tokenize import AROUND
from peers.console.words import another_path, command_name
from peers.data.delimited import DelimitedRows
from peers.data.files import SourceFile
from peers.data.flaws import NO_UTF8, NULS, Flaw
from peers.data.keys import ALPACA, CHAT_FIELDS, MEDIA, PAIR, PREFERENCES, READ, TEXT_FIELD
from peers.data.unpacking import Damage, unpacked_gzip, unpacked_zstd
from swarm.errors import ConfigError, install_command

BLOCK_BYTES = 1 << 20
AROUND_BYTES = 4 * AROUND
"""Of text before and after a block, at least: a character has at most four."""
LONGEST_RECORD = 16 << 20
ROWS_AT_ONCE = 256
_UNREAD_KEPT = 1024
FLAWS_AT_ONCE = 4096
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, repr=False)
class TextBlock(Private):
    """A part of a file. ``line`` is the number of the first line in it, ``lines`` of each where some are left out.

    ``before`` and ``after`` are what is around a part of text; where there is nothing, the text begins or ends.
    ``flaws`` are records, of text lines, that cannot be read at all, and are not in it. ``size`` is that of the part,
    unpacked, with its flaws, and ``read`` how much of the file has been, in bytes on disk. ``unread`` are the columns
    of a table that are not in it.
    """

    file: str
    kind: Literal["text", "jsonl"]
    body: bytes
    line: int
    lines: tuple[int, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    size: int = 0
    read: int = 0
    unread: tuple[str, ...] = ()
    before: bytes = b""
    after: bytes = b""

    @property
    def records(self) -> int:
        """Return how many records it has, of text lines, with those that cannot be used."""
        lines = self.body.count(b"\n") + (self.body[-1:] not in (b"\n", b""))
        if self.kind == "text":
            lines = len(self.body.splitlines())
        return lines + sum(flaw.records for flaw in self.flaws)

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
        with file.path.open("rb") as raw:
            pieces = _pieces(file, key, raw)
            if file.kind in ("csv", "tsv"):
                yield from _table(file, key, field, raw, pieces)
            else:
                yield from (_text if file.kind == "text" else _records)(file, raw, pieces)
    except OSError as error:
        cause = (error.strerror or str(error) or "unreadable").lower()
        raise ConfigError(key, str(file.path), "a readable text file", another_path(file.path), why=cause) from None


def extra_missing(key: str, value: str, package: str) -> ConfigError:
    """The error for a kind of file whose package is not installed."""
    remedy = f"Install it: {install_command('data')}"
    return ConfigError(key, value, f"the package {package} to read it with", remedy, why="it is not installed here")


# --- bytes -----------------------------------------------------------------------------------------------------------


def _pieces(file: SourceFile, key: str, raw: BinaryIO) -> Iterator[bytes | Damage]:
    """The bytes of a file, unpacked, :data:`BLOCK_BYTES` at a time, fewer at the end and before damage."""
    if not file.packed:
        yield from iter(lambda: raw.read(BLOCK_BYTES), b"")
        return
    waiting = bytearray()
    try:
        for more in unpacked_gzip(raw) if file.packed == "gzip" else unpacked_zstd(raw):
            damaged = isinstance(more, Damage)
            waiting += b"" if isinstance(more, Damage) else more
            while len(waiting) >= BLOCK_BYTES or (damaged and waiting):
                yield bytes(waiting[:BLOCK_BYTES])
                del waiting[:BLOCK_BYTES]
            if isinstance(more, Damage):
                yield more
    except ImportError:
        raise extra_missing(key, str(file.path), "zstandard") from None
    if waiting:
        yield bytes(waiting)


def _text(file: SourceFile, raw: BinaryIO, pieces: Iterator[bytes | Damage]) -> Iterator[TextBlock]:
    """Blocks of a text without its flaws, of whole lines as far as these are not too long."""
    line, before, text = 1, b"", bytearray()
    bad: list[tuple[int, Flaw]] = []  # and where in the text

    def block(cut: int) -> TextBlock:
        nonlocal line, before, bad
        body = bytes(text[:cut])
        del text[:cut]
        after = bytes(text[: _line_end(text, AROUND_BYTES, 2 * AROUND_BYTES)]) if text else b""
        flaws = tuple(flaw for place, flaw in bad if place <= cut)
        bad = [(place - cut, flaw) for place, flaw in bad if place > cut]
        made = TextBlock(
            file=str(file.path),
            kind="text",
            body=body,
            line=line,
            flaws=flaws,
            size=len(body) + sum(flaw.size for flaw in flaws),
            read=raw.tell(),
            before=before,
            after=after,
        )
        line += body.count(b"\n") + sum(flaw.records for flaw in flaws)
        before += body
        if (size := len(before)) > 2 * AROUND_BYTES:
            before = before[_line_end(before, size - 2 * AROUND_BYTES, size - AROUND_BYTES) :]
        return made

    for found in _lines_of_text(pieces):
        if not isinstance(found, Flaw):
            text += found
        elif len(bad) < FLAWS_AT_ONCE:
            bad.append((len(text), found))
        else:
            place, last = bad[-1]
            bad[-1] = place, last._replace(size=last.size + found.size, records=last.records + found.records)
        while len(text) > BLOCK_BYTES + 2 * AROUND_BYTES:
            yield block(_line_end(text, BLOCK_BYTES // 2, BLOCK_BYTES))
    if text or bad:
        yield block(len(text))


def _lines_of_text(pieces: Iterator[bytes | Damage]) -> Iterator[bytes | Flaw]:
    """Lines that are text, several together, and in their place those that are none: no UTF-8, or with NUL bytes. Of a
    line that is longer than a block each part is judged by itself.

    They are left out before the text is cut: blocks, and what is around them, are parts of the same text.
    """
    line, rest = 1, b""  # of a line
    for more in itertools.chain(pieces, (b"",)):
        if isinstance(more, Damage):
            yield Flaw(line, more.why, len(rest) + more.size)
            line, rest = line + 1, b""
            continue
        rest += more
        cut = rest.rfind(b"\n") + 1 if more else len(rest)
        if not cut and len(rest) > BLOCK_BYTES:
            cut = _line_end(rest, len(rest) - 4, len(rest) - 1)
        whole, rest = rest[:cut], rest[cut:]
        for part in whole.splitlines(keepends=True) if _no_text(whole) else (whole,):
            why = _no_text(part)
            yield Flaw(line, why, len(part)) if why else part
            line += part.count(b"\n")


def _no_text(data: bytes) -> str:
    """Return why it is none; "" where it is."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return NO_UTF8
    return NULS if b"\x00" in data else ""


def _records(file: SourceFile, raw: BinaryIO, pieces: Iterator[bytes | Damage]) -> Iterator[TextBlock]:
    """Blocks of whole lines, of a record each."""
    line, rest, passed = 1, b"", 0  # so much of a line that is too long
    for more in itertools.chain(pieces, (b"",)):
        flaws: list[Flaw] = []
        new = b"" if isinstance(more, Damage) else more
        if passed:
            end = new.find(b"\n") + 1
            passed += end or len(new)
            if new and not end:
                continue
            flaws.append(Flaw(line, f"it is longer than {LONGEST_RECORD >> 20} MiB", passed))
            line, new, passed = line + bool(end), new[end:], 0
        rest += new
        if isinstance(more, Damage):
            cut = _whole(rest)
            flaws.append(Flaw(line + rest.count(b"\n", 0, cut), more.why, len(rest) - cut + more.size))
            body, rest = rest[:cut], b""
        else:
            cut = len(rest) if not more else rest.rfind(b"\n") + 1 if len(rest) >= BLOCK_BYTES else 0
            body, rest = rest[:cut], rest[cut:]
        if body or flaws:
            size = len(body) + sum(flaw.size for flaw in flaws)
            yield TextBlock(str(file.path), "jsonl", body, line, flaws=tuple(flaws), size=size, read=raw.tell())
            line += body.count(b"\n") + isinstance(more, Damage)
        if len(rest) > LONGEST_RECORD and b"\n" not in rest:
            passed, rest = len(rest), b""


def _whole(data: bytes) -> int:
    """Return where the last whole line before damage ends. A record that lacks but the line's end is one."""
    end = data.rfind(b"\n") + 1
    with contextlib.suppress(ValueError, RecursionError):
        return len(data) if isinstance(json.loads(data[end:]), dict) else end
    return end


def _line_end(data: bytes | bytearray, least: int, most: int) -> int:
    """The last place from ``least`` to ``most`` where a line ends, else the last that is not within a character."""
    if end := data.rfind(b"\n", least - 1, most) + 1:
        return end
    while most > least and data[most] & 0xC0 == 0x80:
        most -= 1
    return most


# --- tables: each row becomes a line of JSON -------------------------------------------------------------------------


_Row = tuple[int, str | Flaw, int, int]
"""Its number, its JSON or what is wrong with it, its size, and how much of the file has been read."""


def _gathered(name: str, rows: Iterator[_Row], unread: tuple[str, ...]) -> Iterator[TextBlock]:
    """Blocks of rows."""
    lines: list[int] = []
    texts: list[bytes] = []
    flaws: list[Flaw] = []
    size = length = read = 0

    def block() -> TextBlock:
        first = lines[0] if lines else flaws[0].line
        body = b"\n".join(texts)
        return TextBlock(name, "jsonl", body, first, tuple(lines), tuple(flaws), size, read, unread)

    for number, found, its_size, so_far in rows:
        read = so_far
        size += its_size
        if isinstance(found, Flaw):
            flaws.append(found)
        else:
            lines.append(number)
            texts.append(found.encode())
            length += len(found)
        if length >= BLOCK_BYTES or len(flaws) >= FLAWS_AT_ONCE:
            yield block()
            lines, texts, flaws, size, length = [], [], [], 0, 0
    if texts or flaws:
        yield block()


def _table(
    file: SourceFile, key: str, field: str | None, raw: BinaryIO, pieces: Iterator[bytes | Damage]
) -> Iterator[TextBlock]:
    found = iter(DelimitedRows(pieces, "\t" if file.kind == "tsv" else ","))
    _, header, _ = next(found, (1, [], 0))
    if isinstance(header, Flaw):
        why = f"its first line cannot be read: {header.why}"
        raise ConfigError(key, str(file.path), "a table", another_path(file.path), why=why)
    wanted, unread = _chosen(file, key, header, field)
    at = {name: header.index(name) for name in wanted}

    def rows() -> Iterator[_Row]:
        for line, row, size in found:
            if isinstance(row, Flaw):
                yield line, row, size, raw.tell()
                continue
            record = {name: row[place] for name, place in at.items()}
            bad = [name for name, value in record.items() if not value.isascii() and SURROGATE.search(value)]
            if bad:
                yield line, Flaw(line, f"its {bad[0]} is no UTF-8", size), size, raw.tell()
            else:
                yield line, json.dumps(record), size, raw.tell()

    yield from _gathered(str(file.path), rows(), unread)


def _columns(file: SourceFile, key: str, field: str | None) -> Iterator[TextBlock]:
    try:
        import pyarrow as pa
    except ImportError:
        raise extra_missing(key, str(file.path), "pyarrow") from None
    try:
        names, batches, total = _parquet(file) if file.kind == "parquet" else _arrow(file)
    except (pa.ArrowException, OSError) as error:
        why = f"it is damaged, or no {file.kind} file: {_damage(error)}"
        yield TextBlock(str(file.path), "jsonl", b"", 1, flaws=(Flaw(1, why, file.bytes),), size=file.bytes)
        return
    wanted, unread = _chosen(file, key, names, field)
    way = () if field is None else field.split(".")

    def rows() -> Iterator[_Row]:
        number = 1
        for batch in batches(wanted):
            read = file.bytes * number // max(total, number)
            if isinstance(batch, Flaw):
                yield number, batch._replace(line=number), batch.size, read
                number += batch.records
                continue
            columns = [_values(batch.column(name), way, there=name in MEDIA) for name in wanted]
            for values in zip(*columns, strict=True):
                if flaw := next((value for value in values if isinstance(value, Flaw)), None):
                    yield number, flaw._replace(line=number), flaw.size, read
                else:
                    text = json.dumps(dict(zip(wanted, values, strict=True)), default=lambda _: None)
                    yield number, text, len(text), read
                number += 1

    yield from _gathered(str(file.path), rows(), unread)


def _values(column: Any, way: Sequence[str], *, there: bool) -> list[Any]:
    """Return what a column has, without the nulls that the other rows' keys make but on the ``way`` to a field, and
    flaws in place of what is no text; or True where ``there`` is anything."""
    import pyarrow as pa

    if not there or pa.types.is_string(column.type):
        try:
            values = column.to_pylist()
        except UnicodeDecodeError:
            values = [_value(column, place) for place in range(len(column))]
        return [_without_nulls(value, way) for value in values]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return [bool(length) or None for length in column.value_lengths().to_pylist()]
    return [valid or None for valid in column.is_valid().to_pylist()]


def _without_nulls(value: Any, way: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner, way) for key, inner in value.items() if inner is not None or key in way}
    return [_without_nulls(inner, way) for inner in value] if isinstance(value, list) else value


def _value(column: Any, place: int) -> Any:
    try:
        return column[place].as_py()
    except UnicodeDecodeError:
        size = len(column[place].as_buffer()) if hasattr(column[place], "as_buffer") else column.slice(place, 1).nbytes
        return Flaw(0, "it is no UTF-8", size)


def _damage(error: Exception) -> str:
    """Return what pyarrow says is damaged. Raises the error where it is the disk's."""
    if getattr(error, "errno", None) is not None:
        raise error
    return str(error).splitlines()[0][:200]


_Opened = tuple[list[str], Callable[[list[str]], Iterator[Any]], int]
"""Names of the columns; what gives the batches of some, and flaws for those that cannot be read; rows, 0: unknown."""


def _parquet(file: SourceFile) -> _Opened:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file.path, buffer_size=BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True)

    def batches(wanted: list[str]) -> Iterator[Any]:
        for place in range(parquet.num_row_groups):
            group, done = parquet.metadata.row_group(place), 0
            try:
                for batch in parquet.iter_batches(ROWS_AT_ONCE, [place], wanted, use_threads=False):
                    yield batch
                    done += len(batch)
            except (pa.ArrowException, OSError) as error:
                columns = map(group.column, range(group.num_columns))
                size = sum(one.total_uncompressed_size for one in columns if one.path_in_schema.split(".")[0] in wanted)
                rows = group.num_rows - done
                yield Flaw(
                    0, f"row group {place + 1} is damaged: {_damage(error)}", size * rows // group.num_rows, rows
                )

    return parquet.schema_arrow.names, batches, parquet.metadata.num_rows


def _arrow(file: SourceFile) -> _Opened:
    import pyarrow as pa

    mapped = pa.memory_map(str(file.path))
    reads: Iterable[Callable[[], Any]]
    try:
        table = pa.ipc.open_file(mapped)
        number = table.num_record_batches
        reads = (partial(table.get_batch, place) for place in range(number))
    except pa.ArrowInvalid:  # a stream; a file whose end is missing is one behind its first eight bytes
        mapped.seek(0)
        mapped.seek(8 if mapped.read(6) == b"ARROW1" else 0)
        table, number = pa.ipc.open_stream(mapped), 0
        reads = itertools.repeat(table.read_next_batch)

    def batches(wanted: list[str]) -> Iterator[Any]:
        rows, flaw = 1, None
        for place, read in enumerate(reads):
            began = mapped.tell()
            try:
                batch = read()
                rows = max(rows, len(batch))
                _check(batch.select(wanted))
            except StopIteration:
                break
            except (pa.ArrowException, OSError) as error:
                if flaw and not number:  # nobody knows where in a stream the next one begins
                    size = file.bytes - began + flaw.size
                    flaw = flaw._replace(size=size)
                    break
                if flaw:
                    yield flaw
                size = file.bytes // number if number else mapped.tell() - began
                flaw = Flaw(0, f"batch {place + 1} is damaged: {_damage(error)}", size, rows)
                continue
            if flaw:
                yield flaw
                flaw = None
            yield batch
        if flaw:
            yield flaw

    return table.schema.names, batches, 0


def _check(batch: Any) -> None:
    """Raises ArrowInvalid for a batch that points outside itself."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):  # which costs its row alone
            raise


def _chosen(file: SourceFile, key: str, names: Sequence[str], field: str | None) -> tuple[list[str], tuple[str, ...]]:
    """The columns of a table that are read, and the others."""
    text = TEXT_FIELD if field is None else field.partition(".")[0]
    kinds = (*((name,) for name in (*CHAT_FIELDS, TEXT_FIELD, *PREFERENCES)), PAIR, ALPACA[:2])
    if text in names or (field is None and any(set(kind) <= set(names) for kind in kinds)):
        wanted = [name for name in dict.fromkeys(names) if name == text or name in READ]
        if twice := next((name for name in wanted if names.count(name) > 1), ""):
            why = f"it has {names.count(twice)} columns of the name {twice}"
            raise ConfigError(key, str(file.path), "a table whose columns have different names", "Rename one.", why=why)
        return wanted, tuple(name for name in dict.fromkeys(names) if name not in wanted)[:_UNREAD_KEPT]
    there = ", ".join(name[:40] for name in names[:12]) or "no column"
    option = "join … --data-field" if key == "--data" else "data build … --field"
    remedy = f"Name the column: {command_name()} {option} NAME"
    raise ConfigError(key, str(file.path), f"a table with the column {text}", remedy, why=f"it has {there}")

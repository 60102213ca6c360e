"""A flaw costs the line, row, row group or batch that it is in; what it costs is counted, and too much is refused."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_shards.build import document_text
from data_shards.tokenize import train_tokenizer
from peers.cli.app import run
from peers.commands import quickstart
from peers.commands.quickstart import QuickstartOptions
from peers.data import blocks
from peers.data.blocks import blocks_of
from peers.data.building import build_from_files
from peers.data.delimited import DelimitedRows
from peers.data.encoder import Encoding
from peers.data.files import source_files
from peers.data.flaws import FlawCount, LeftOut
from peers.data.records import Conversation, usable_in
from peers.data.unpacking import Damage, unpacked_gzip, unpacked_zstd
from peers.exit_codes import EXIT_OK, EXIT_USAGE
from swarm.errors import ConfigError

ROWS = 1200
MIDDLE = 700
KINDS = ("txt", "jsonl", "csv", "tsv")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = random.Random(3)
    words = ["owl,", "mouse", "“night”", '"moon"', "tab\tstop", "two\nlines", "it's", "'quoted'"]
    return [f"{n}: {' '.join(draw.choice(words) for _ in range(12))}." for n in range(ROWS)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 12)


def rows_of(kind: str, texts: list[str]) -> list[bytes]:
    """A file's rows, of a table the header first."""
    if kind == "txt":
        return [text.replace("\n", " ").encode() + b"\n" for text in texts]
    if kind == "jsonl":
        return [json.dumps({"n": n, "text": text}).encode() + b"\n" for n, text in enumerate(texts)]
    rows = []
    for row in [["n", "text"], *([str(n), text] for n, text in enumerate(texts))]:
        out = io.StringIO()
        csv.writer(out, delimiter="," if kind == "csv" else "\t", quoting=csv.QUOTE_NONNUMERIC).writerow(row)
        rows.append(out.getvalue().encode())
    return rows


def zstd(data: bytes) -> bytes:
    """With a block a kibibyte."""
    packer = zstandard.ZstdCompressor().compressobj()
    parts = [data[at : at + 1024] for at in range(0, len(data), 1024)]
    packed = [packer.compress(part) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for part in parts]
    return b"".join(packed) + packer.flush()


PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def read(path: Path) -> tuple[list[str], FlawCount]:
    """The documents of a file, and what is left out."""
    left_out, found = LeftOut("TEXT", allow_bad=True), []
    (file,) = source_files(path, "TEXT")
    for block in blocks_of(file, "TEXT"):
        found += usable_in(block, left_out)
    left_out.check(path, some=bool(found))
    assert not any(isinstance(document, Conversation) for document in found)
    return [str(document_text(document)) for document in found], left_out.total  # type: ignore[arg-type]


def expected(kind: str, texts: list[str]) -> list[str]:
    return [text.replace("\n", " ") for text in texts] if kind == "txt" else texts


def same(kind: str, found: list[str], texts: list[str]) -> bool:
    if kind != "txt":
        return found == texts
    return "".join(found).replace("\n", "") == "".join(expected(kind, texts))


def broken(kind: str, row: bytes) -> bytes:
    if kind == "txt":
        return row[:20] + b"\xe9" + row[20:]
    if kind == "jsonl":
        return row.replace(b'"}', b"}")
    return row.rstrip().removesuffix(b'"') + b"\r\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", PACKED)
def test_flaw_in_the_middle_costs_its_row_alone(tmp_path: Path, texts: list[str], kind: str, pack: str) -> None:
    rows = rows_of(kind, texts)
    place = MIDDLE + len(rows) - ROWS
    rows[place] = broken(kind, rows[place])
    path = tmp_path / f"a.{kind}{pack}"
    path.write_bytes(PACKED[pack](b"".join(rows)))
    found, left_out = read(path)
    assert same(kind, found, texts[:MIDDLE] + texts[MIDDLE + 1 :])
    assert (left_out.records, left_out.size) == (1, len(rows[place]))
    assert left_out.of_size == len(b"".join(rows[len(rows) - ROWS :]))
    assert left_out.flaws[0].line == b"".join(rows[:place]).count(b"\n") + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", PACKED)
def test_file_that_is_cut_gives_all_whole_rows(tmp_path: Path, texts: list[str], kind: str, pack: str) -> None:
    rows = rows_of(kind, texts)
    packed = PACKED[pack](b"".join(rows))
    packed = packed[: len(packed) * 9 // 10]
    path = tmp_path / f"a.{kind}{pack}"
    path.write_bytes(packed)
    unpack: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": zlib.decompressobj(31).decompress,
        ".zst": zstandard.ZstdDecompressor().decompressobj().decompress,
    }
    there = unpack[pack](packed)
    found, left_out = read(path)
    if kind == "txt" and not pack:  # nobody can know
        assert "".join(found).replace("\n", "").encode() == there.replace(b"\n", b"")
        return
    whole = max(n for n in range(len(rows)) if len(b"".join(rows[:n])) <= len(there))
    assert same(kind, found, texts[: whole - (len(rows) - ROWS)])
    lost = len(there) - len(b"".join(rows[:whole]))
    unpacked = packed_blocks(packed) if pack == ".zst" else len(packed)
    assert (left_out.records, left_out.size) == (1, lost + len(packed) - unpacked)


def packed_blocks(packed: bytes) -> int:
    """Where the last whole block of a frame of zstd ends, by the block headers."""
    at = zstandard.frame_header_size(packed)
    while (end := at + 3 + (int.from_bytes(packed[at : at + 3], "little") >> 3)) <= len(packed) - 3:
        at = end
    return at


@pytest.mark.parametrize(
    ("row", "records"),
    [
        ('8,"he said "hi" to me"', 1),
        ('8,"he said "hi"\nand more\n\nof, it"', 1),
        ('8,"never closed', 1),
        ('8,"never closed\n"Hello", she said.\n', 1),
        ("8", 1),
        ("8\n9", 2),
        ("8,a,b", 1),
        ('8,"a "b""\n9,"a "b""', 2),
        ('"8,a', 1),
    ],
)
def test_row_that_is_none_costs_itself_and_what_belongs_to_it(tmp_path: Path, row: str, records: int) -> None:
    good = [f'{n},"Text {n}, ""quoted"",\nof two lines"' for n in range(40)]
    lines = "\n".join(["n,text", *good[:20], row, *good[20:]])
    (tmp_path / "a.csv").write_text(lines + "\n")
    found, left_out = read(tmp_path / "a.csv")
    assert found == [f'Text {n}, "quoted",\nof two lines' for n in range(40)]
    assert left_out.records == records
    assert left_out.size <= len(row) + 1
    assert left_out.flaws[0].line == 42


@given(data=st.data())
def test_whole_table_is_read_as_it_was_written(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 3))
    field = st.lists(st.sampled_from(['"', ",", "\n", "\r\n", "a", "é", "\u2028", "\x00", " "]), max_size=5).map(
        "".join
    )
    rows = data.draw(st.lists(st.lists(field, min_size=width, max_size=width), max_size=5))
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator=end).writerows([["h"] * width, *rows])
    written, size = out.getvalue().encode(), data.draw(st.integers(1, 9))
    found = list(DelimitedRows((written[at : at + size] for at in range(0, len(written), size)), ","))
    assert [row for _, row, _ in found] == [["h"] * width, *rows]
    assert sum(size for _, _, size in found) == len(written)


# --- damage in what is packed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [".gz", ".zst"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_member_costs_the_rest_of_itself(tmp_path: Path, texts: list[str], kind: str, pack: str) -> None:
    rows = rows_of(kind, texts)
    members = [PACKED[pack](b"".join(rows[at : at + 100])) for at in range(0, len(rows), 100)]
    damaged = bytearray(members[4])
    middle = len(damaged) // 2
    damaged[middle : middle + 64] = b"\xff" * 64
    members[4] = bytes(damaged)
    (tmp_path / f"a.{kind}{pack}").write_bytes(b"".join(members))
    found, left_out = read(tmp_path / f"a.{kind}{pack}")
    first, head = "\n".join(found), len(rows) - ROWS
    for n in (*range(400 - head), *range(500 - head, ROWS)):
        assert expected(kind, texts)[n] in first
    assert f"{450 - head}: " not in first
    assert left_out.records >= 1
    assert left_out.size > len(damaged) // 4


def test_damaged_text_is_not_called_another_encoding(tmp_path: Path, texts: list[str]) -> None:
    packed = zstd(b"".join(rows_of("txt", texts)))
    (tmp_path / "a.txt.zst").write_bytes(packed[:9000] + b"\xff" * 64 + packed[9064:])
    with pytest.raises(ConfigError, match="are bad") as caught:
        read_all(tmp_path / "a.txt.zst", allow_bad=False)
    assert "iconv" not in caught.value.remedy


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_checksum_that_differs_is_said(tmp_path: Path, texts: list[str], name: str) -> None:
    data = b"".join(rows_of("jsonl", texts))
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if name.endswith("zst") else gzip.compress
    packed = bytearray(pack(data))
    packed[-2 if name.endswith("zst") else -6] ^= 1
    (tmp_path / name).write_bytes(packed)
    found, left_out = read(tmp_path / name)
    assert found == texts
    assert left_out.size == len(data)
    assert "check" in left_out.flaws[0].why


@pytest.mark.parametrize(
    ("pack", "unpack", "plainly"),
    [
        (gzip.compress, unpacked_gzip, lambda: zlib.decompressobj(31)),
        (zstd, unpacked_zstd, lambda: zstandard.ZstdDecompressor().decompressobj()),
    ],
)
def test_file_that_is_cut_anywhere_gives_what_is_in_it(
    pack: Callable[[bytes], bytes],
    unpack: Callable[[BinaryIO], Iterator[bytes | Damage]],
    plainly: Callable[[], Any],
) -> None:
    packed = pack(random.Random(1).randbytes(3000) + bytes(9000))
    for end in range(1, len(packed), 7):
        *out, damage = unpack(io.BytesIO(packed[:end]))
        assert b"".join(out) == plainly().decompress(packed[:end])  # type: ignore[arg-type]
        assert isinstance(damage, Damage)


def test_members_may_be_padded_and_frames_skipped(tmp_path: Path, texts: list[str]) -> None:
    data = b"".join(rows_of("jsonl", texts))
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(data[:5000]) + bytes(600) + gzip.compress(data[5000:]) + bytes(9)
    )
    skipped = b"\x53\x2a\x4d\x18" + (70_000).to_bytes(4, "little") + bytes(70_000)
    (tmp_path / "a.jsonl.zst").write_bytes(skipped + zstd(data[:5000]) + skipped + zstd(data[5000:]))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert read(tmp_path / name) == (texts, FlawCount(ROWS, len(data)))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz", "a.parquet", "a.arrow"])
def test_file_of_another_kind_is_refused_by_what_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither of them, nor anything else " * 100)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / name)
    assert caught.value.value == str(tmp_path / name)
    assert "--field" not in caught.value.remedy


# --- tables in columns -----------------------------------------------------------------------------------------------


def test_damaged_row_group_costs_itself(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="zstd", use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(6).column(0)
    data = bytearray(path.read_bytes())
    middle = group.data_page_offset + (group.total_compressed_size // 2)
    data[middle : middle + 64] = b"\xff" * 64
    path.write_bytes(data)
    found, left_out = read(path)
    assert found == texts[:600] + texts[700:]
    assert (left_out.records, left_out.size) == (100, group.total_uncompressed_size)
    assert left_out.of_records == ROWS
    assert left_out.flaws[0].line == 601


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id,text\na,1,b\n")
    with pytest.raises(ConfigError, match="it has 2 columns of the name text"):
        list(blocks_of(source_files(tmp_path / "a.csv", "TEXT")[0], "TEXT"))


def test_disk_that_fails_is_no_damage(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pq, "ParquetFile", fail)
    with pytest.raises(ConfigError, match="a readable text file; input/output error"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_value_that_is_no_text_costs_its_row(tmp_path: Path, texts: list[str], name: str) -> None:
    values = [text.encode() for text in texts]
    values[MIDDLE] = b"caf\xe9"
    column = pa.array(values, pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), ROWS, column.buffers())})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    found, left_out = read(tmp_path / name)
    assert found == texts[:MIDDLE] + texts[MIDDLE + 1 :]
    assert (left_out.records, left_out.size, left_out.flaws[0].line) == (1, 4, MIDDLE + 1)


def arrow(path: Path, texts: list[str], compression: str | None, *, stream: bool) -> None:
    table = pa.table({"text": texts})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_damaged_batch_costs_itself(tmp_path: Path, texts: list[str], compression: str | None, stream: bool) -> None:
    path = tmp_path / "a.arrow"
    arrow(path, texts, compression, stream=stream)
    data = bytearray(path.read_bytes())
    if compression is None:  # its offsets
        place = data.index(texts[600].encode()) - 200
        data[place : place + 64] = b"\x7f" * 64
    else:
        begins = [at for at in range(0, len(data), 8) if data[at : at + 4] == b"\x28\xb5\x2f\xfd"]
        place = min(begins, key=lambda at: abs(at - len(data) // 2))
        data[place + 20 : place + 60] = b"\xff" * 40
    path.write_bytes(data)
    found, left_out = read(path)
    lost = [n for n in range(0, ROWS, 100) if texts[n] not in found]
    assert len(lost) == 1
    assert found == texts[: lost[0]] + texts[lost[0] + 100 :]
    assert (left_out.records, left_out.flaws[0].line) == (100, lost[0] + 1)
    assert left_out.size > 0


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_that_is_cut_gives_all_whole_batches(tmp_path: Path, texts: list[str], stream: bool) -> None:
    path = tmp_path / "a.arrow"
    arrow(path, texts, None, stream=stream)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 9 // 10])
    found, left_out = read(path)
    assert found == texts[:1000]
    assert left_out.flaws[0].line == 1001
    assert 0 < left_out.size < len(data) // 12


# --- how much is too much --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> bytes:
    return train_tokenizer(texts[:200], 300)


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_a_hundredth_stops_the_build(tmp_path: Path, texts: list[str], tokenizer: bytes, kind: str) -> None:
    encoding, path = Encoding(tokenizer=tokenizer, key="TEXT"), tmp_path / f"a.{kind}"
    rows = rows_of(kind, texts)
    rows[5:17] = [row[:8] + b"\n" if kind == "jsonl" else broken(kind, row) for row in rows[5:17]]
    path.write_bytes(b"".join(rows))
    build_from_files([path], tmp_path / "just", encoding, processes=1)
    rows[20] = broken(kind, rows[20])
    path.write_bytes(b"".join(rows))
    with pytest.raises(ConfigError, match=r"13 of 1,200 (records|lines).*--allow-bad") as caught:
        build_from_files([path], tmp_path / "shard", encoding, processes=1)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "shard").exists()
    report = build_from_files([path], tmp_path / "shard", encoding, allow_bad=True, processes=1)
    assert report.left_out.total.records == 13
    assert report.kept_tokens == report.shard.tokens, "what was done is kept"
    assert report.shard == build_from_files([path], tmp_path / "again", encoding, allow_bad=True, processes=1).shard


def test_quickstart_stops_and_leaves_nothing_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n')
    arguments = ["quickstart", "--text", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert run(arguments) == EXIT_USAGE
    assert "1 of 2 records (4 of 21 bytes) are bad" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    seen: list[QuickstartOptions] = []
    monkeypatch.setattr(quickstart, "quickstart", lambda options, clock: seen.append(options) or EXIT_OK)
    assert run([*arguments, "--allow-bad"]) == EXIT_OK
    assert seen[0].text.allow_bad


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_text_in_another_encoding_among_much_else_is_refused_by_name(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("nothing but ascii, line by line\n" * 100_000)
    (tmp_path / "b.txt").write_bytes("un café crème\n".encode(encoding) * 9)
    (tmp_path / "c.txt").write_text("more of it")
    with pytest.raises(ConfigError, match="iconv") as caught:
        read_all(tmp_path, allow_bad=False)
    assert caught.value.value == str(tmp_path / "b.txt")
    assert read_all(tmp_path, allow_bad=True).records >= 9


def read_all(path: Path, *, allow_bad: bool) -> FlawCount:
    left_out = LeftOut("TEXT", allow_bad=allow_bad)
    for file in source_files(path, "TEXT"):
        for block in blocks_of(file, "TEXT"):
            list(usable_in(block, left_out))
    left_out.check(path, some=True)
    return left_out.total

"""Shards of every kind of file, in parallel, and builds that go on after a kill."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer as BackendTokenizer

from data_shards import tokenize
from data_shards.journal import JOURNAL_FILE
from data_shards.manifest import TOKENS_FILE
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer, train_tokenizer
from peers.cli.app import run
from peers.data import blocks
from peers.data.blocks import TextBlock, blocks_of
from peers.data.building import BuildProgress, BuildReport, build_from_files
from peers.data.encoder import Encoding
from peers.data.files import source_files
from peers.data.keys import KeyCount
from peers.exit_codes import EXIT_OK, EXIT_USAGE
from swarm.errors import ConfigError, StateError
from tests.harness.rigs import tokenizers as rig

pytestmark = pytest.mark.usefixtures("encoded_here")
TEXTS = [f"Record {n}: the owl, “quoted”, sees\n{n * 7} mice." for n in range(40)]
SECRET = "xyzzyplugh"


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return train_tokenizer(TEXTS, 400)


def build(
    tokenizer: bytes, out: Path, *paths: Path, field: str | None = None, special: bool = False, **options: object
) -> BuildReport:
    encoding = Encoding(tokenizer=tokenizer, key="TEXT", field=field, special_in_text=special)
    return build_from_files(paths, out, encoding, **options)  # type: ignore[arg-type]


def read(tokenizer: bytes, path: Path) -> list[str]:
    shard, decoder = Shard.open(path), Tokenizer(tokenizer)
    bounds = [*shard.starts.tolist(), shard.manifest.tokens]
    return [decoder.decode(shard.tokens[a : b - 1].tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


# --- kinds of files --------------------------------------------------------------------------------------------------


def _jsonl(key: str = "text") -> bytes:
    return "\n".join(json.dumps({"n": n, key: text}) for n, text in enumerate(TEXTS)).encode()


def _csv(path: Path, delimiter: str = ",") -> bytes:
    import csv
    import io

    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([["n", "text"], *([str(n), text] for n, text in enumerate(TEXTS))])
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def _table() -> pa.Table:
    return pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})


def _arrow(path: Path, *, stream: bool) -> None:
    writer = (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, _table().schema)
    with writer:
        writer.write_table(_table(), max_chunksize=7)


WRITTEN = {
    "a.jsonl": lambda path: path.write_bytes(_jsonl()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(_jsonl()[:700]) + gzip.compress(_jsonl()[700:])),
    "a.ndjson.zst": lambda path: path.write_bytes(
        zstandard.compress(_jsonl()[:700]) + zstandard.compress(_jsonl()[700:])
    ),
    "a.csv": lambda path: path.write_bytes(_csv(path)),
    "a.tsv.gz": lambda path: path.write_bytes(gzip.compress(_csv(path, "\t"))),
    "a.csv.zst": lambda path: path.write_bytes(zstandard.compress(_csv(path))),
    "a.parquet": lambda path: pq.write_table(_table(), path, row_group_size=9),
    "a.arrow": lambda path: _arrow(path, stream=False),
    "b.arrow": lambda path: _arrow(path, stream=True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_records_of_any_kind_of_file_are_documents(tmp_path: Path, tokenizer: bytes, name: str) -> None:
    WRITTEN[name](tmp_path / name)
    report = build(tokenizer, tmp_path / "shard", tmp_path / name)
    assert read(tokenizer, tmp_path / "shard") == TEXTS
    assert report.left_out.lines() == []
    assert report.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_record_that_cannot_be_joined_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(["-" * 64, "one two"], 300)
    monkeypatch.setattr(tokenize, "_LARGEST_WHOLE", 40_000)
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 7000)
    rows = [{"text": "one"}, {"text": "a" + 60_000 * "-"}, {"text": "two"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="a record from here on is left out: .* goes on for too long"):
        build(tokenizer, tmp_path / "shard", tmp_path / "a.jsonl")
    encoding = Encoding(tokenizer, "TEXT")
    report = build_from_files([tmp_path / "a.jsonl"], tmp_path / "shard", encoding, allow_bad=True)
    assert report.left_out.total.records == 1
    assert read(tokenizer, tmp_path / "shard") == ["one", "two"]


def test_patterns_and_directories_stand_for_files(tmp_path: Path, tokenizer: bytes) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "deep/a.jsonl", "c.png"):
        (tmp_path / "in" / name).write_bytes(b'{"text": "of %s"}' % name.encode())
    assert [f.path.name for f in source_files(tmp_path / "in", "TEXT")] == ["b.jsonl", "a.jsonl"]
    assert [f.path.name for f in source_files(tmp_path / "in/**/*.jsonl", "TEXT")] == ["b.jsonl", "a.jsonl"]
    (tmp_path / "in" / "d.py").write_text("x = 1\n")
    report = build(tokenizer, tmp_path / "shard", tmp_path / "in")
    assert read(tokenizer, tmp_path / "shard") == ["of b.jsonl", "x = 1\n", "of deep/a.jsonl"]
    assert report.left_out.lines() == ["1 file of other kinds not read (.png 1)"]
    assert report.left_out.facts()["files_not_read"] == {".png": 1}
    with pytest.raises(ConfigError, match="none does"):
        source_files(tmp_path / "in/*.csv", "TEXT")


@pytest.mark.parametrize("field", ["story", "a.b", "a.b.c"])
def test_field_names_a_key_or_leads_into_what_is_nested(tmp_path: Path, tokenizer: bytes, field: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"story": "one", "a": {"b": "two"}}\n{"a.b.c": "three"}')
    build(tokenizer, tmp_path / "shard", tmp_path / "a.jsonl", field=field, allow_bad=True)
    assert read(tokenizer, tmp_path / "shard") == [{"story": "one", "a.b": "two", "a.b.c": "three"}[field]]


def test_nested_column_of_a_table(tmp_path: Path, tokenizer: bytes) -> None:
    pq.write_table(pa.table({"a": [{"b": "one"}, {"b": None}]}), tmp_path / "a.parquet")
    report = build(tokenizer, tmp_path / "shard", tmp_path / "a.parquet", field="a.b")
    assert read(tokenizer, tmp_path / "shard") == ["one"]
    assert report.left_out.lines() == [f"1 record without text: {tmp_path / 'a.parquet'}:2: its a.b is null"]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_table_without_the_column_says_which_there_are(tmp_path: Path, tokenizer: bytes, name: str) -> None:
    WRITTEN[name](tmp_path / name)
    with pytest.raises(ConfigError, match="the column story; it has n, text.*--field"):
        build(tokenizer, tmp_path / "shard", tmp_path / name, field="story")
    assert not (tmp_path / "shard").exists()


# --- records that cannot be used -------------------------------------------------------------------------------------

BAD = {
    b"{": "it is no JSON: Expecting property name",
    b"[1]": "it is no object, {…}, but a list",
    b'{"other": 1}': "it has no text; it has other",
    b'{"text": 5}': "its text is no text but a number",
    b'{"text": "\\ud800"}': "its text is no UTF-8",
    b'{"text": "caf\xe9"}': "it is no UTF-8",
    b"[" * 5000: "it is no JSON",
}
EMPTY = {
    b'{"text": null, "b": 1}': "its text is null",
    b'{"messages": null, "text": null}': "its text is null",
    b'{"text": "  "}': "its text is empty",
}


def test_records_that_cannot_be_used_are_counted_and_the_first_shown(tmp_path: Path, tokenizer: bytes) -> None:
    lines = [b'{"text": "good"}', b"", *BAD, b'{"text": "%s"}' % SECRET.encode()]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    left_out = build(tokenizer, tmp_path / "shard", tmp_path / "a.jsonl", allow_bad=True).left_out
    assert read(tokenizer, tmp_path / "shard") == ["good", SECRET]
    assert left_out.total.records == len(BAD)
    assert left_out.total.size == sum(len(record) + 1 for record in BAD)
    for place, (flaw, why) in enumerate(zip(left_out.first, BAD.values(), strict=False)):
        assert flaw.startswith(f"{tmp_path / 'a.jsonl'}:{place + 3}: {why}")
    assert len(left_out.first) == 5


def test_records_without_text_are_said_and_never_too_many(tmp_path: Path, tokenizer: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b'{"text": "good"}', *EMPTY]))
    report = build(tokenizer, tmp_path / "shard", tmp_path / "a.jsonl")
    assert report.left_out.lines() == [f"3 records without text: {tmp_path / 'a.jsonl'}:2: its text is null"]


@pytest.mark.parametrize("record", [*BAD, *EMPTY])
def test_file_of_bad_records_alone_says_what_is_wrong_with_the_first(
    tmp_path: Path, tokenizer: bytes, record: bytes
) -> None:
    (tmp_path / "a.jsonl").write_bytes(record)
    with pytest.raises(ConfigError) as caught:
        build(tokenizer, tmp_path / "shard", tmp_path / "a.jsonl")
    assert (BAD | EMPTY)[record] in caught.value.why
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_bad_rows_of_a_table_are_counted(tmp_path: Path, tokenizer: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(b'n,text\n1,"good\ntext"\n2\n3,caf\xe9\n4,more\n')
    left_out = build(tokenizer, tmp_path / "shard", tmp_path / "a.csv", allow_bad=True).left_out
    assert read(tokenizer, tmp_path / "shard") == ["good\ntext", "more"]
    assert [flaw.partition(".csv:")[2] for flaw in left_out.first] == [
        "4: it has 1 column, the first line 2",
        "5: its text is no UTF-8",
    ]
    assert left_out.total.size == len(b"2\n3,caf\xe9\n")


def test_line_that_is_too_long_is_left_out(tmp_path: Path, tokenizer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    monkeypatch.setattr(blocks, "LONGEST_RECORD", 200)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "' + "long" * 200 + '"}\n{"text": "two"}\n{"text": 1}')
    left_out = build(tokenizer, tmp_path / "shard", tmp_path / "a.jsonl", allow_bad=True).left_out
    assert read(tokenizer, tmp_path / "shard") == ["one", "two"]
    assert [flaw.partition(".jsonl:")[2][:12] for flaw in left_out.first] == ["2: it is lon", "4: its text "]
    assert left_out.total.size == len('{"text": "' + "long" * 200 + '"}\n{"text": 1}')


@pytest.mark.parametrize("size", [16, 64, 100])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_blocks_together_are_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, name: str) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
    monkeypatch.setattr(blocks, "AROUND_BYTES", 12)
    data = ("Wörter ohne Ende " * 20 + "\n\n" + "\n".join(TEXTS) + "\n" + "äöü" * 50).encode()
    (tmp_path / name).write_bytes(data)
    (file,) = source_files(tmp_path / name, "TEXT")
    found: list[TextBlock] = list(blocks_of(file, "TEXT"))
    assert b"".join(block.body for block in found) == data
    assert all(block.line == 1 + data[: data.index(block.body)].count(b"\n") for block in found if len(block.body) > 60)
    for number, block in enumerate(found):
        for part in (block.before, block.body, block.after):
            part.decode()
        if name == "a.txt":
            assert b"".join(one.body for one in found[:number]).endswith(block.before)
            assert b"".join(one.body for one in found[number + 1 :]).startswith(block.after)
            assert [len(part) < 12 for part in (block.before, block.after)] == [not number, block is found[-1]]


# --- files of text: one document each --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", rig.FAMILIES)
def test_file_of_text_is_one_document_with_the_tokens_of_the_whole_in_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 15)
    monkeypatch.setattr("peers.data.encoder._FEW_BYTES", 1 << 15)
    document, parts = rig.FAMILIES[family](), rig.texts(40_000)
    text = "".join(parts.values())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt").write_text("another")
    report = build(document, tmp_path / "shard", tmp_path / "a.txt", tmp_path / "b.txt", processes=2)
    backend, end = BackendTokenizer.from_str(document.decode()), Tokenizer(document).end_of_text
    expected = [[*backend.encode(one, add_special_tokens=False).ids, end] for one in (text, "another")]
    shard = Shard.open(tmp_path / "shard")
    assert shard.tokens.tolist() == expected[0] + expected[1]
    assert shard.starts.tolist() == [0, len(expected[0])]
    assert (report.text_bytes, report.marks) == (len(text.encode()) + 7, 1)
    assert report.altered == sum(
        backend.decode(ids[:-1], skip_special_tokens=False) != one
        for ids, one in zip(expected, (text, "another"), strict=True)
    )


@pytest.mark.parametrize("family", ["byte_bpe", "metaspace"])
def test_special_tokens_in_a_file_of_text_are_counted_once_or_taken_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 15)
    monkeypatch.setattr("peers.data.encoder._FEW_BYTES", 1 << 15)
    document = rig.FAMILIES[family]()
    end = Tokenizer(document).end_token
    times = 200_000 // len(end)
    text = f"{end}{end[:-1]}" * times + end  # a line: blocks end within it
    (tmp_path / "a.txt").write_text(text)
    (file,) = source_files(tmp_path / "a.txt", "TEXT")
    assert {block.body[: len(end)] == end.encode() for block in blocks_of(file, "TEXT")} == {True, False}
    plain = build(document, tmp_path / "plain", tmp_path / "a.txt", processes=2)
    assert plain.keys == KeyCount(special=times + 1)
    taken = build(document, tmp_path / "taken", tmp_path / "a.txt", processes=2, special=True)
    assert taken.keys == KeyCount()
    expected = BackendTokenizer.from_str(document.decode()).encode(text, add_special_tokens=False).ids
    assert Shard.open(tmp_path / "taken").tokens.tolist() == expected, "it has an end token last already"


@pytest.mark.parametrize(("family", "size"), [*((family, 1 << 15) for family in rig.FAMILIES), ("byte_bpe", 1 << 17)])
def test_text_with_bad_lines_near_the_ends_of_blocks_has_the_tokens_of_the_whole_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
    document, path = rig.FAMILIES[family](), tmp_path / "a.txt"
    text = "".join(rig.texts(size // 2 + 30_000).values())
    data = text.encode()
    path.write_bytes(data)
    ends = np.cumsum([len(block.body) for block in blocks_of(source_files(path, "TEXT")[0], "TEXT")])[:-1].tolist()
    around = (-blocks.AROUND_BYTES, -9, 9, blocks.AROUND_BYTES)
    places = {data.rfind(b"\n", 0, max(0, end + far)) + 1 for end in ends for far in around}
    bad = itertools.cycle([b"caf\xe9\n", b"a\x00b\r\n", b"\xff" * 100_000 + b"\n"])
    lost = dict(zip(sorted(places), bad, strict=False))
    assert len(lost) > 3
    cuts = [0, *lost, len(data)]
    parts = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    path.write_bytes(b"".join(itertools.chain(*itertools.zip_longest(parts, lost.values(), fillvalue=b""))))
    report = build(document, tmp_path / "shard", path, allow_bad=True)
    shard = Shard.open(tmp_path / "shard")
    assert np.array_equal(
        shard.tokens[:-1], BackendTokenizer.from_str(document.decode()).encode(text, add_special_tokens=False).ids
    )
    assert shard.manifest.documents == 1
    total = report.left_out.total
    assert (total.size, total.of_size) == (sum(map(len, lost.values())), path.stat().st_size)
    assert total.records == len(lost) or size < 100_000  # a line that is longer than a block is judged in parts


def test_line_of_several_blocks_and_a_long_record_have_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 17)
    document = rig.FAMILIES["prepend"]()
    line = rig.texts(3 << 17)["line"]
    (tmp_path / "a.txt").write_text(line)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": line[: 1 << 18]}))
    for name, size in (("a.txt", len(line)), ("b.jsonl", 1 << 18)):
        build(document, tmp_path / "shard" / name, tmp_path / name)
        shard = Shard.open(tmp_path / "shard" / name)
        expected = BackendTokenizer.from_str(document.decode()).encode(line[:size], add_special_tokens=False).ids
        assert np.array_equal(shard.tokens[:-1], expected)
        assert shard.manifest.documents == 1


def test_command_says_what_is_left_out_of_a_text_and_what_the_tokenizer_alters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(rig.FAMILIES["word_piece"]())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfThe Quick\r\nbrown fox")
    (tmp_path / "b.txt").write_text("the owl")
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "the", "completion": " Fox"}))
    out = str(tmp_path / "shard")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl")]
    assert run(["data", "build", *files, "--tokenizer", str(tmp_path / "tokenizer.json"), "--out", out]) == EXIT_OK
    said = capsys.readouterr().err
    assert "1 file began with a byte order mark, which is left out" in said
    assert "2 documents are other texts when the tokens are decoded" in said


def test_what_the_tokenizer_adds_is_in_the_shard_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = rig.wrapped(rig.FAMILIES["metaspace"](), "<s> $A")
    (tmp_path / "tokenizer.json").write_bytes(document)
    (tmp_path / "a.jsonl").write_bytes(_jsonl())
    out = tmp_path / "shard"
    command = ["data", "build", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert run([*command, "--out", str(out)]) == EXIT_OK
    shard, backend = Shard.open(out), BackendTokenizer.from_str(document.decode())
    end = Tokenizer(document).end_of_text
    assert shard.tokens.tolist() == [token for text in TEXTS for token in [*backend.encode(text).ids, end]]
    assert run(["data", "stats", str(out)]) == EXIT_OK
    assert "a text is written as <s> … </s>" in capsys.readouterr().out


def test_text_that_the_tokenizer_can_cut_nowhere_is_refused_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_shards.tokenize._LARGEST_WHOLE", 1 << 17)
    (tmp_path / "a.txt").write_text("some words\n" + "a" * (1 << 18) + " more")
    with pytest.raises(ConfigError, match=r"begins at line 1 .* the same character, goes on for too long") as caught:
        build(rig.FAMILIES["word_piece"](), tmp_path / "shard", tmp_path / "a.txt")
    assert caught.value.value == str(tmp_path / "a.txt")


# --- in parallel, and after a kill -----------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of several blocks."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr("peers.data.encoder._FEW_BYTES", 1 << 14)
    path = tmp_path / "large.jsonl"
    draw = random.Random(1)
    with path.open("w") as file:
        for n in range(1500):
            words = " ".join(draw.choice(TEXTS) for _ in range(draw.randrange(1, 8)))
            record = json.dumps({"text": f"{n} {words}", "id": n + 1})
            file.write(f"{record}\n" if n % 100 else "broken\n")  # a hundredth
    return path


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_build_that_was_ended_goes_on_and_makes_the_same_shard(
    tmp_path: Path, tokenizer: bytes, large: Path, kind: str
) -> None:
    large = large.rename(large.with_suffix(f".{kind}"))
    whole = build(tokenizer, tmp_path / "whole", large, processes=1)
    calls: list[BuildProgress] = []

    def end(progress: BuildProgress) -> None:
        calls.append(progress)
        if len(calls) == 7:
            raise _Killed

    with pytest.raises(_Killed):
        build(tokenizer, tmp_path / "shard", large, processes=2, told=end)
    kept = tmp_path / ".shard.building"
    assert (kept / JOURNAL_FILE).stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_mode & 0o777 == 0o700
    with (kept / TOKENS_FILE).open("ab") as file:
        file.write(b"half a piece")
    with (kept / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"source": "torn')
    seen: list[BuildProgress] = []
    report = build(tokenizer, tmp_path / "shard", large, processes=1, told=seen.append)
    assert report.kept_tokens == calls[-1].tokens
    assert sum(progress.kept for progress in seen) == 7
    assert report.shard == whole.shard
    assert (report.left_out.total, report.text_bytes) == (whole.left_out.total, whole.text_bytes)
    assert report.left_out.first == whole.left_out.first
    assert report.keys == whole.keys == KeyCount(unused={"id": 1485} if kind == "jsonl" else {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [large.name, "shard", "whole"]


@pytest.mark.parametrize("change", ["source", "tokens", "field", "special"])
def test_what_is_kept_is_not_taken_for_something_else(
    tmp_path: Path, tokenizer: bytes, large: Path, change: str
) -> None:
    def end(progress: BuildProgress) -> None:
        if progress.read > large.stat().st_size // 3:
            raise _Killed

    with pytest.raises(_Killed):
        build(tokenizer, tmp_path / "shard", large, processes=1, told=end)
    kept = tmp_path / ".shard.building"
    if change == "source":
        large.write_text(large.read_text().replace("owl", "cat"))
    elif change == "tokens":
        data = np.fromfile(kept / TOKENS_FILE, dtype=np.uint16)
        data[3] ^= 1
        data.tofile(kept / TOKENS_FILE)
    field = "text" if change == "field" else None
    report = build(tokenizer, tmp_path / "shard", large, processes=1, field=field, special=change == "special")
    assert report.kept_tokens == 0
    assert report.shard == build(tokenizer, tmp_path / "whole", large, processes=1).shard


def test_bad_file_behind_good_ones_does_not_cost_what_is_done(tmp_path: Path, tokenizer: bytes, large: Path) -> None:
    bad = tmp_path / "z.txt"
    bad.write_bytes(b"\xff\xfe\x00x")
    with pytest.raises(ConfigError, match="encoding"):
        build(tokenizer, tmp_path / "shard", large, bad, processes=1)
    bad.write_text("good now")
    report = build(tokenizer, tmp_path / "shard", large, bad, processes=1)
    assert report.kept_tokens > 0
    assert report.shard == build(tokenizer, tmp_path / "whole", large, bad, processes=1).shard


def test_two_builds_of_one_shard_are_one_too_many(tmp_path: Path, tokenizer: bytes, large: Path) -> None:
    def again(progress: BuildProgress) -> None:
        build(tokenizer, tmp_path / "shard", large)

    with pytest.raises(StateError, match="another process builds this shard"):
        build(tokenizer, tmp_path / "shard", large, told=again)


def test_command_says_what_was_left_out(tmp_path: Path, tokenizer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    (tmp_path / "a.jsonl").write_bytes(_jsonl("story") + b"\n" + b"broken\n" * 7)
    arguments = ["data", "build", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert run([*arguments, "--out", str(tmp_path / "a")]) == EXIT_USAGE
    assert "it has no text; it has n, story" in capsys.readouterr().err
    arguments = [*arguments, "--out", str(tmp_path / "a"), "--field", "story"]
    assert run(arguments) == EXIT_USAGE
    refused = capsys.readouterr().err
    bad = f"7 of 47 records (49 of {(tmp_path / 'a.jsonl').stat().st_size:,} bytes)"
    assert f"{bad} are bad: {tmp_path / 'a.jsonl'}:41: it is no JSON" in refused
    assert "with --allow-bad" in refused
    assert not (tmp_path / "a").exists()
    assert run([*arguments, "--allow-bad"]) == EXIT_OK
    said = capsys.readouterr()
    assert "40 documents" in said.out
    assert f"{bad} left out: {tmp_path / 'a.jsonl'}:41: it is no JSON" in said.err
    assert f"{tmp_path / 'a.jsonl'}:45: it is no JSON" in said.err

from __future__ import annotations

from pathlib import Path

import pytest

from peers.data.blocks import blocks_of
from peers.data.files import source_files
from peers.data.flaws import Flaw
from peers.data.text import built_in_corpus, read_corpus
from swarm.errors import ConfigError


def test_built_in_corpus_is_bounded_prose_and_the_same_each_time() -> None:
    corpus = built_in_corpus(600_000)
    assert corpus == built_in_corpus(600_000)
    assert 500_000 < sum(map(len, corpus.documents)) < 700_000
    assert len(corpus.documents) > 80
    assert any("with" in document and "statement" in document for document in corpus.documents)


def test_read_corpus_file_of_text_is_one_document_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    text = "\r\n\r\n".join(f"\tParagraph {n}.\u2028\x0c\x85 " + "word " * 50 for n in range(12_000)) + "\n\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    corpus = read_corpus([file, file])
    assert corpus.name == "book.txt, book.txt"
    assert corpus.documents == (text, text)
    assert len(list(blocks_of(source_files(file, "--text")[0], "--text"))) > 2


@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "no such file"), (b"", "empty"), (b" \n\n ", "empty"), (b"\xff\xfe\x00x", "encoding"), (b"a\x00b", "NUL")],
)
def test_read_corpus_unusable_file_names_it_and_the_remedy(tmp_path: Path, content: bytes | None, cause: str) -> None:
    file = tmp_path / "input.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=cause) as caught:
        read_corpus([file])
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("bad", [b"caf\xe9", b"a\x00b", b"\xff", "ö".encode()[:1]])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r", b""])
def test_line_that_is_no_text_costs_itself_alone(tmp_path: Path, bad: bytes, end: bytes) -> None:
    why = "it holds NUL bytes" if b"\x00" in bad else "it is no UTF-8"
    (tmp_path / "a.txt").write_bytes(b"".join((bad, b"\r\n\xc3\xb6\n", bad, b"\nbetween\rand\n", bad, end)))
    (block,) = blocks_of(source_files(tmp_path / "a.txt", "TEXT")[0], "TEXT")
    sizes = len(bad) + 2, len(bad) + 1, len(bad + end)
    assert block.body.decode() == "ö\nbetween\rand\n"
    assert block.flaws == tuple(Flaw(line, why, size) for line, size in zip((1, 3, 5), sizes, strict=True))
    assert (block.records, block.size) == (6, len(block.body) + sum(sizes))


def test_files_that_are_given_apart_are_judged_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nbad\n')
    (tmp_path / "b.jsonl").write_text('{"text": "of many, long enough"}\n' * 200)
    assert len(read_corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]).documents) == 201


def test_whole_text_is_without_its_bad_lines(tmp_path: Path) -> None:
    lines = [b"line %d\n" % number for number in range(200)]
    lines[7] = b"caf\xe9\n"
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    corpus = read_corpus([tmp_path / "a.txt"])
    assert corpus.documents[0].encode() == b"".join(lines[:7] + lines[8:])
    (tmp_path / "a.txt").write_bytes(b"".join(lines[:50]))
    with pytest.raises(ConfigError, match=r"1 of 50 lines .* --allow-bad"):
        read_corpus([tmp_path / "a.txt"])
    assert read_corpus([tmp_path / "a.txt"], allow_bad=True).documents


def test_corpus_printed_shows_no_text(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("the password is xyzzyplugh")
    assert "xyzzyplugh" not in repr(read_corpus([file]))


def test_directory_of_links_to_files_elsewhere_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "abc").write_text("some text")
    (snapshot / "data.txt").symlink_to(blobs / "abc")
    assert [file.path for file in source_files(snapshot, "--data")] == [snapshot / "data.txt"]
    assert read_corpus([snapshot]).documents == ("some text",)


def test_device_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="it is a device"):
        read_corpus([Path("/dev/null")])

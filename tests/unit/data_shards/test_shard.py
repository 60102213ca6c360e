from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

import data_shards.build
import data_shards.draft
from data_shards.build import build_shard
from data_shards.manifest import MANIFEST_FILE, STARTS_FILE, TOKENS_FILE, file_digest, read_manifest
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from swarm.errors import ConfigError, StateError
from tests.harness.rigs.data_shards import SECRET, edit


def test_build_shard_then_open_gives_every_document_back(
    shard_path: Path, documents: list[str], tokenizer_json: bytes
) -> None:
    shard = Shard.open(shard_path)
    tokenizer = Tokenizer(tokenizer_json)
    texts, document = [], []
    for token in shard.tokens.tolist():
        if token == tokenizer.end_of_text:
            texts.append(tokenizer.decode(document))
            document = []
        else:
            document.append(token)
    assert texts == documents
    assert shard.manifest.documents == len(documents)
    assert shard.manifest.tokenizer == tokenizer.digest
    assert shard.manifest.dtype == "uint16"


def test_build_shard_same_documents_give_same_digest(
    tmp_path: Path, documents: list[str], tokenizer_json: bytes
) -> None:
    first = build_shard(tmp_path / "a", documents, tokenizer_json)
    second = build_shard(tmp_path / "b", iter(documents), tokenizer_json)
    other = build_shard(tmp_path / "c", documents[1:], tokenizer_json)
    assert first.digest == second.digest != other.digest
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b", "c"]


def test_build_shard_files_are_for_their_owner_only(shard_path: Path) -> None:
    assert shard_path.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in shard_path.iterdir())


def test_build_shard_existing_path_is_refused(shard_path: Path, tokenizer_json: bytes) -> None:
    with pytest.raises(ConfigError, match="does not exist yet"):
        build_shard(shard_path, ["text"], tokenizer_json)


def test_build_shard_no_documents_leaves_nothing(tmp_path: Path, tokenizer_json: bytes) -> None:
    with pytest.raises(ConfigError, match="at least one document"):
        build_shard(tmp_path / "empty", [], tokenizer_json)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_build_shard_interrupted_leaves_nothing(
    tmp_path: Path, tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(data_shards.draft, "file_digest", fail)
    with pytest.raises((KeyboardInterrupt, StateError)):
        build_shard(tmp_path / "shard", ["text"], tokenizer_json)
    assert not list(tmp_path.iterdir())


def test_build_shard_removes_what_a_killed_build_left_and_nothing_else(tmp_path: Path, tokenizer_json: bytes) -> None:
    left, others, another = (tmp_path / name for name in (".shard-abcd1234", ".shard-mine5678", ".other-abcd1234"))
    for path in (left, others, another):
        path.mkdir()
        (path / TOKENS_FILE).write_bytes(b"private")
    (others / "notes.txt").write_text("not ours")
    held = Path(tempfile.mkdtemp(prefix=".shard-", dir=tmp_path))
    with data_shards.build._held(held):
        build_shard(tmp_path / "shard", ["text"], tokenizer_json)
        assert held.is_dir(), "another process builds it"
    assert (left.exists(), others.exists(), another.exists()) == (False, True, True)


def _cut(path: Path) -> None:
    os.truncate(path / TOKENS_FILE, 100)


def _alter(path: Path) -> None:
    data = bytearray((path / TOKENS_FILE).read_bytes())
    data[50] ^= 1
    (path / TOKENS_FILE).write_bytes(data)


def _lie(path: Path) -> None:
    edit(path, tokens=5)


def _shrink_vocabulary(path: Path) -> None:
    edit(path, vocab_size=7)


def _disorder(path: Path) -> None:
    starts = np.fromfile(path / STARTS_FILE, dtype="<u8")
    starts[[3, 4]] = starts[[4, 3]]
    starts.tofile(path / STARTS_FILE)
    edit(path, starts=file_digest(path / STARTS_FILE).model_dump())


DAMAGE = {
    "cut short": _cut,
    "differ from what": _alter,
    "cannot take": _lie,
    "has format 2 of an older version": lambda path: edit(path, format=2),
    "has format 4 of a newer version": lambda path: edit(path, format=4),
    "do not ascend": _disorder,
    "starts.bin: no such file": lambda path: (path / STARTS_FILE).unlink(),
    "outside its vocabulary": _shrink_vocabulary,
    "no such file: this directory": lambda path: (path / MANIFEST_FILE).unlink(),
    "tokens.bin: no such file": lambda path: (path / TOKENS_FILE).unlink(),
    "invalid json": lambda path: (path / MANIFEST_FILE).write_text("{"),
    "far too large": lambda path: (path / MANIFEST_FILE).write_text(" " * 100_000),
}


@pytest.mark.parametrize("cause", DAMAGE)
def test_open_damaged_shard_names_path_cause_and_remedy(shard_path: Path, cause: str) -> None:
    DAMAGE[cause](shard_path)
    with pytest.raises(StateError) as caught:
        Shard.open(shard_path)
    message = str(caught.value)
    assert cause in message
    assert str(shard_path) in message
    assert "Build it again" in message


def test_read_manifest_missing_directory_is_a_state_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not a shard"):
        read_manifest(tmp_path / "nowhere")


def test_shard_printed_shows_no_text(shard_path: Path) -> None:
    shard = Shard.open(shard_path)
    assert SECRET not in repr(shard)
    assert "tokens of 60 documents" in repr(shard)

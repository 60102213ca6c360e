"""What is in a shard's files, and when opening it reads them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

import data_shards.shard
from data_shards.draft import Documents, ShardDraft
from data_shards.manifest import STARTS_FILE, TOKENS_FILE, ShardManifest, read_manifest
from data_shards.packing import counted_between
from data_shards.shard import VERIFIED_FILE, Shard
from swarm.errors import StateError
from tests.harness.rigs.data_shards import edit


def test_digest_of_text_is_what_it_was_in_format_1(shard_path: Path) -> None:
    manifest = read_manifest(shard_path)
    kept = manifest.model_dump(include={"file", "dtype", "tokens", "documents", "tokenizer", "vocab_size"})
    canonical = json.dumps(kept | {"format": 1}, sort_keys=True, separators=(",", ":"))
    assert manifest.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert manifest.model_copy(update={"template": "0" * 64}).digest != manifest.digest


@pytest.mark.parametrize("first", [0, 3, 40])
def test_draft_keeps_which_tokens_count(tmp_path: Path, first: int) -> None:
    """``first``: documents without a mask before those with one."""
    draw = random.Random(first)
    pieces = [[draw.random() < 0.5 for _ in range(draw.randrange(1, 30))] for _ in range(50)]
    draft = ShardDraft(tmp_path, tokenizer="0" * 64, vocab_size=100)
    for number, bits in enumerate(pieces):
        counted = None if number < first else np.array(bits)
        draft.add(Documents(np.zeros(len(bits), np.uint32), (0,), counted))
    draft.finish()
    shard = Shard.open(tmp_path)
    assert shard.counted is not None
    expected = [number < first or bit for number, bits in enumerate(pieces) for bit in bits]
    assert counted_between(shard.counted, 0, shard.manifest.tokens).tolist() == expected
    assert counted_between(shard.counted, 5, 90).tolist() == expected[5:90]


# --- opened again ----------------------------------------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read whole, in order. What changed just now counts as what changed long ago."""
    found: list[str] = []
    really = data_shards.shard._verify

    def verify(file: Path, manifest: ShardManifest) -> None:
        found.append(file.name)
        really(file, manifest)

    monkeypatch.setattr(data_shards.shard, "_verify", verify)
    monkeypatch.setattr(data_shards.shard, "_SETTLED_NS", -(10**10))
    return found


def test_open_again_reads_nothing_until_a_file_changes(shard_path: Path, verified: list[str]) -> None:
    assert Shard.open(shard_path).manifest == Shard.open(shard_path).manifest
    assert verified == [TOKENS_FILE, STARTS_FILE]
    os.utime(shard_path / TOKENS_FILE, ns=(0, 1))
    Shard.open(shard_path)
    assert verified == [TOKENS_FILE, STARTS_FILE] * 2
    edit(shard_path, vocab_size=7)
    with pytest.raises(StateError, match="outside its vocabulary"):
        Shard.open(shard_path)


def test_open_anew_reads_everything(shard_path: Path, verified: list[str]) -> None:
    Shard.open(shard_path)
    Shard.open(shard_path, anew=True)
    assert verified == [TOKENS_FILE, STARTS_FILE] * 2


def test_open_of_what_changed_just_before_is_not_remembered(
    shard_path: Path, verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_shards.shard, "_SETTLED_NS", 10**18)
    Shard.open(shard_path)
    Shard.open(shard_path)
    assert verified == [TOKENS_FILE, STARTS_FILE] * 2
    assert not [path for path in shard_path.iterdir() if VERIFIED_FILE in path.name]


@pytest.mark.parametrize("content", ["", "{", '{"stamps": {"tokens.bin": [1, 2]}}', '{"stamps": {}}'])
def test_open_with_a_corrupt_memory_verifies(shard_path: Path, verified: list[str], content: str) -> None:
    Shard.open(shard_path)
    (shard_path / VERIFIED_FILE).write_text(content)
    Shard.open(shard_path)
    assert verified == [TOKENS_FILE, STARTS_FILE] * 2

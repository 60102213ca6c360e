"""A small corpus, its tokenizer and a shard of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_shards.build import build_shard
from data_shards.tokenize import train_tokenizer
from tests.harness.rigs.data_shards import corpus


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Sixty different documents of growing length, one with a word that must never be printed."""
    return corpus()


@pytest.fixture(scope="session")
def tokenizer_json(documents: list[str]) -> bytes:
    """A tokenizer of 400 tokens trained on the corpus."""
    return train_tokenizer(documents, 400)


@pytest.fixture
def shard_path(tmp_path: Path, documents: list[str], tokenizer_json: bytes) -> Path:
    """A fresh shard of the whole corpus."""
    path = tmp_path / "shard"
    build_shard(path, documents, tokenizer_json)
    return path

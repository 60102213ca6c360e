"""``swarm data``: shards made, checked and listed by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_shards.build import build_shard
from data_shards.manifest import MANIFEST_FILE, ShardManifest, read_manifest
from peers.text_files import documents_of
from peers.words import another_path
from swarm.errors import ConfigError, StateError

SCHEMA = 1
DEEPEST = 6
"""Levels of directories that a listing goes down."""


def build_from(texts: Sequence[Path], tokenizer: Path, out: Path) -> ShardManifest:
    """A new shard at ``out``. Raises ConfigError for text or a tokenizer that cannot be used and for an ``out`` that
    exists, StateError when the disk refuses; nothing is left then."""
    if out.exists():
        raise ConfigError("--out", str(out), "a directory that does not exist yet", "Remove it or name another.")
    try:
        document = tokenizer.read_bytes()
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        raise ConfigError(
            "--tokenizer", str(tokenizer), "a readable tokenizer.json", another_path(tokenizer), why=cause
        ) from None
    return build_shard(out, _all(texts), document)


def describe(path: Path, manifest: ShardManifest) -> dict[str, object]:
    """A shard as plain data: what ``--json`` prints."""
    return {
        "path": str(path),
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "bytes": manifest.file.bytes,
        "tokenizer": manifest.tokenizer,
        "digest": manifest.digest,
    }


def shards_below(root: Path) -> list[dict[str, object]]:
    """Every shard in ``root`` and below it, :data:`DEEPEST` levels deep, links not followed; a broken one with its
    ``error``. Raises ConfigError when there is no such directory."""
    if not root.is_dir():
        raise ConfigError("DIR", str(root), "a directory", another_path(root), why="there is none of that name")
    found: list[dict[str, object]] = []
    for directory, inner, files in os.walk(root):
        path = Path(directory)
        if MANIFEST_FILE in files:
            inner.clear()
            try:
                found.append(describe(path, read_manifest(path)))
            except StateError as error:
                found.append({"path": str(path), "error": str(error)})
        elif len(path.relative_to(root).parts) >= DEEPEST:
            inner.clear()
    return sorted(found, key=lambda facts: str(facts["path"]))


def _all(texts: Sequence[Path]) -> Iterator[str]:
    for text in texts:
        yield from documents_of(text, "TEXT")

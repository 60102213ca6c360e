"""The rig of ``data_shards``: a small corpus, and a shard's manifest altered.

The fixtures beside the tests make a tokenizer and a shard of it."""

from __future__ import annotations

import json
from pathlib import Path

SECRET = "xyzzyplugh"
"""A word of the corpus that must never be printed."""


def corpus() -> list[str]:
    """Return sixty different documents of growing length, one with :data:`SECRET` in it."""
    texts = [
        f"Document {n}: the owl sees {n * 7} mice and {'very ' * (n % 9)}few cats. " * (1 + n % 5) for n in range(60)
    ]
    texts[30] += f" The password is {SECRET}."
    return texts


def edit(shard: Path, **changes: object) -> None:
    """Change keys of a shard's manifest."""
    manifest = shard / "shard.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))

"""Which part of the text a run's tokenizer is trained on."""

from __future__ import annotations

from collections.abc import Sequence

SAMPLE_CHARACTERS = 8_000_000
"""Text the tokenizer is trained on: frequent words of a few megabytes are those of the whole, and training it cannot
be interrupted, so it must stay short."""


def sample_texts(shards: Sequence[Sequence[str]]) -> list[str]:
    """The first documents of every shard, up to :data:`SAMPLE_CHARACTERS` in all."""
    texts: list[str] = []
    for documents in shards:
        room = SAMPLE_CHARACTERS // len(shards)
        for document in documents:
            if room <= 0:
                break
            texts.append(document[:room])
            room -= len(document)
    return texts

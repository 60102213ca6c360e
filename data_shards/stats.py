"""What is in a shard, in numbers; and some of its documents, for their owner to read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_shards.documents import DocumentRows, Packing, rows_of
from data_shards.packing import counted_between
from data_shards.privacy import Private
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer

PERCENTILES = (5, 50, 95)
MOST_SHOWN = 1 << 16
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardStats:
    """Numbers of a shard.

    ``lengths`` are tokens of documents: shortest, 5th, 50th and 95th percentile, longest, mean. ``counted`` is the
    share of tokens that are targets which count. ``tokens_per_byte`` is None where nobody knows how much text it was,
    ``altered`` is how many documents are another text when they are decoded, None where nobody knows; ``frame`` is what
    the tokenizer put around a text, as in ``<s> … </s>``.
    """

    tokens: int
    documents: int
    lengths: tuple[int, int, int, int, int, float]
    counted: float
    tokens_per_byte: float | None
    altered: int | None
    frame: str | None


@dataclass(frozen=True, slots=True)
class PackingStats:
    """What a shard is at one length of rows: how many there are, the share of their positions that is no padding, and
    the share of its tokens that counts and is a target in some row."""

    packing: Packing
    context: int
    rows: int
    filled: float
    targets: float


def stats_of(shard: Shard) -> ShardStats:
    """Read starts and targets, no tokens."""
    manifest = shard.manifest
    lengths = np.diff(shard.starts, append=np.uint64(manifest.tokens)).astype(np.int64)
    low, middle, high = (int(value) for value in np.percentile(lengths, PERCENTILES, method="lower"))
    size = manifest.text_bytes
    return ShardStats(
        tokens=manifest.tokens,
        documents=manifest.documents,
        lengths=(int(lengths.min()), low, middle, high, int(lengths.max()), float(lengths.mean())),
        counted=_counted(shard) / manifest.tokens,
        tokens_per_byte=manifest.tokens / size if size else None,
        altered=manifest.altered,
        frame=manifest.frame,
    )


def packing_of(shard: Shard, context: int, packing: Packing) -> PackingStats:
    """Return how the shard packs into rows of this context."""
    rows = rows_of(shard, context, packing)
    filled = rows.filled if isinstance(rows, DocumentRows) else float(rows.count > 0)
    return PackingStats(packing, context, rows.count, filled, rows.targets / max(1, _counted(shard)))


def _counted(shard: Shard) -> int:
    if shard.counted is None:
        return shard.manifest.tokens
    pieces = range(0, len(shard.counted), _AT_ONCE)
    return sum(int(_BITS[np.asarray(shard.counted[at : at + _AT_ONCE])].sum()) for at in pieces)


@dataclass(frozen=True, slots=True, repr=False)
class ShownDocument(Private):
    """A document's text in parts that are learnt and parts that are not. ``more`` is how many tokens are not shown."""

    number: int
    parts: tuple[tuple[str, bool], ...]
    more: int


def sample_documents(
    shard: Shard, tokenizer: Tokenizer, count: int, *, seed: int, tokens: int
) -> Iterator[ShownDocument]:
    """Some documents of a shard, at most so many tokens of each; another seed shows others."""
    documents = shard.manifest.documents
    for number in random.Random(seed).sample(range(documents), min(count, documents)):
        begin = int(shard.starts[number])
        end = int(shard.starts[number + 1]) if number + 1 < documents else shard.manifest.tokens
        shown = min(end, begin + tokens, begin + MOST_SHOWN)
        ids = np.asarray(shard.tokens[begin:shown])
        shard.check_ids(ids)
        counts = np.ones(len(ids), np.bool_) if shard.counted is None else counted_between(shard.counted, begin, shown)
        cuts = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(ids)]
        parts = tuple(
            (tokenizer.decode_all(ids[a:b].tolist()), bool(counts[a])) for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        )
        yield ShownDocument(number, parts, end - shown)

"""Documents into disjoint shards and a held-out set."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from data_shards.privacy import Private
from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True, repr=False)
class DocumentSplit(Private):
    """``shards[i]`` are the documents of shard i, in their original order; ``held_out`` is in none of them."""

    shards: tuple[tuple[str, ...], ...]
    held_out: tuple[str, ...]

    def private_size(self) -> str:
        """See :class:`Private`."""
        sizes = ", ".join(str(len(shard)) for shard in self.shards)
        return f"shards of {sizes} documents, {len(self.held_out)} held out"


def split_documents(documents: Sequence[str], shards: int, held_out_fraction: float, seed: int) -> DocumentSplit:
    """Deal documents into ``shards`` disjoint, equally large sets, after setting a fraction aside.

    Disjoint by *text*: equal documents count once, so nothing held out is also trained on. Sizes are characters.
    Held out are documents in the order of a keyed hash of their text, until the fraction is reached, so adding
    documents hardly changes who is held out. The rest goes, largest first, each to the smallest shard so far (LPT:
    no shard exceeds 4/3 of the ideal; Graham 1969). Deterministic in (documents, arguments).
    Cost: one hash per document, O(n log n).
    Raises ConfigError when there are not enough documents.
    """
    if not 0 <= held_out_fraction < 1:
        raise ConfigError("held_out_fraction", held_out_fraction, "from 0 up to, not including, 1", "Use 0.05.")
    if shards < 1:
        raise ConfigError("shards", shards, "at least 1", "Ask for one shard per trainer.")
    order = list(dict.fromkeys(document for document in documents if document.strip()))
    needed = shards + (1 if held_out_fraction else 0)
    if len(order) < needed:
        raise ConfigError("documents", len(order), f"at least {needed} different, non-empty ones", "Give more text.")
    held = _held_out(order, held_out_fraction, seed, at_most=len(order) - shards)
    dealt = _deal([index for index in range(len(order)) if index not in held], [len(text) for text in order], shards)
    return DocumentSplit(
        shards=tuple(tuple(order[index] for index in sorted(part)) for part in dealt),
        held_out=tuple(order[index] for index in sorted(held)),
    )


def _held_out(order: Sequence[str], fraction: float, seed: int, *, at_most: int) -> frozenset[int]:
    key = seed.to_bytes(8, "little", signed=True)
    ranked = sorted(range(len(order)), key=lambda index: (_hash(order[index], key), index))
    wanted = fraction * sum(len(text) for text in order)
    chosen: set[int] = set()
    size = 0
    for index in ranked[:at_most]:
        if size >= wanted:
            break
        chosen.add(index)
        size += len(order[index])
    return frozenset(chosen)


def _deal(indices: Sequence[int], sizes: Sequence[int], shards: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(shards)]
    smallest = [(0, shard) for shard in range(shards)]
    for index in sorted(indices, key=lambda index: (-sizes[index], index)):
        size, shard = heapq.heappop(smallest)
        parts[shard].append(index)
        heapq.heappush(smallest, (size + sizes[index], shard))
    return parts


def _hash(text: str, key: bytes) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()

"""Deal documents into disjoint shards and a held-out set, and write a shard to disk: whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import heapq
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

from data_shards.draft import SHARD_FILES, Documents, ShardDraft, sync
from data_shards.manifest import ShardManifest
from data_shards.privacy import Private
from data_shards.tokenize import NoSeam, Passage, Tokenizer
from swarm.errors import ConfigError, StateError

Document = TypeVar("Document", str | Passage, bytes)
"""A text, or one that is encoded."""
LEAST_SPAN = 1024
"""Characters, or bytes of what is encoded: a smaller document is not cut."""


def build_shard(
    out_dir: Path, documents: Iterable[str | Passage], tokenizer_json: bytes, end_token: str | None = None
) -> ShardManifest:
    """Tokenise ``documents`` into a new shard at ``out_dir`` and return its manifest.

    Atomic: written beside ``out_dir``, synced, then renamed, so ``out_dir`` is either absent or complete; what an
    error or an interrupt leaves is removed, what a kill leaves by the next build of the same shard. Files are readable
    by their owner only. The same documents and tokenizer, and ``end_token`` as for :class:`Tokenizer`, give the same
    digest. Documents are streamed: memory is a few of them at a time. Raises ConfigError when ``out_dir`` exists, there
    is no document, or one cannot be encoded in parts, StateError when the disk refuses.
    """
    tokenizer = Tokenizer(tokenizer_json, end_token)

    def encoded() -> Iterator[Documents]:
        try:
            for tokens, _ in tokenizer.encode_documents(documents):
                if len(tokens):  # a span may have none: what is next to it joins in its middle
                    yield Documents(tokens)
        except NoSeam as error:
            raise error.refusal("text", out_dir.name, "one of its documents") from None

    return build_encoded(out_dir, encoded(), tokenizer)


def build_encoded(
    out_dir: Path, documents: Iterable[Documents], tokenizer: Tokenizer, template: str | None = None
) -> ShardManifest:
    """Write documents that are tokens already as :func:`build_shard` does, which see.

    Args:
        out_dir: The new shard.
        documents: Streamed.
        tokenizer: What made the tokens.
        template: Digest of the chat template that conversations were written with.
    """
    if out_dir.exists():
        raise ConfigError(
            "out_dir", str(out_dir), "a path that does not exist yet", "Choose another; what is there stays."
        )
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out_dir)
        draft = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
        try:
            with _held(draft):
                manifest = _write(draft, documents, tokenizer, template)
                os.rename(draft, out_dir)
            sync(out_dir.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise StateError(
            f"shard {out_dir}: {error.strerror}. Check space and permissions, then build it again."
        ) from None
    return manifest


@contextlib.contextmanager
def _held(draft: Path) -> Iterator[None]:
    """While it is held nobody takes it for one whose process was killed. Raises BlockingIOError."""
    descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sweep(out_dir: Path) -> None:
    """Remove the drafts of this shard that killed processes left: private tokens, as large as the shard."""
    for path in out_dir.parent.glob(f".{glob.escape(out_dir.name)}-????????"):
        with contextlib.suppress(OSError), _held(path):
            if {one.name for one in path.iterdir()} <= SHARD_FILES:
                shutil.rmtree(path)


def _write(
    directory: Path, documents: Iterable[Documents], tokenizer: Tokenizer, template: str | None
) -> ShardManifest:
    digest, vocab_size, frame = tokenizer.digest, tokenizer.vocab_size, tokenizer.frame
    draft = ShardDraft(directory, tokenizer=digest, vocab_size=vocab_size, template=template, frame=frame)
    with contextlib.closing(draft):
        for some in documents:
            draft.add(some)
        return draft.finish()


# --- dealing documents out -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class DocumentSplit(Private, Generic[Document]):
    """``shards[i]`` are the documents of shard i, in their original order; ``held_out`` is in none of them."""

    shards: tuple[tuple[Document, ...], ...]
    held_out: tuple[Document, ...]

    def private_size(self) -> str:
        """See :class:`Private`."""
        sizes = ", ".join(str(len(shard)) for shard in self.shards)
        return f"shards of {sizes} documents, {len(self.held_out)} held out"


def split_documents(
    documents: Sequence[Document], shards: int, held_out_fraction: float, seed: int
) -> DocumentSplit[Document]:
    """Deal documents, texts or encoded ones, into ``shards`` disjoint, equally large sets, after setting a fraction
    aside.

    Disjoint by *text*: equal documents count once, so nothing held out is also trained on. Sizes are characters, of
    encoded ones bytes. A text larger than what is to be held out, or than half of what a shard gets, is cut into spans
    first: they are dealt as documents are, with no end of text between them, and equal spans go together.
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
    whole = list(dict.fromkeys(document for document in documents if document_text(document).strip()))
    most = int(sum(map(len, map(document_text, whole))) * min(held_out_fraction or 1, 1 / (2 * shards)))
    order: dict[str | bytes, list[tuple[int, Document]]] = {}
    for number, span in enumerate(span for document in whole for span in _spans(document, most)):
        order.setdefault(document_text(span), []).append((number, span))
    texts = list(order)
    sizes = [len(text) * len(order[text]) for text in texts]
    needed = shards + (1 if held_out_fraction else 0)
    if len(texts) < needed:
        raise ConfigError("documents", len(texts), f"at least {needed} different, non-empty ones", "Give more text.")
    held = _held_out(texts, sizes, held_out_fraction, seed, at_most=len(texts) - shards)
    dealt = _deal([index for index in range(len(texts)) if index not in held], sizes, shards)

    def together(indices: Iterable[int]) -> tuple[Document, ...]:
        spans = sorted((span for index in indices for span in order[texts[index]]), key=lambda numbered: numbered[0])
        return tuple(span for _, span in spans)

    return DocumentSplit(shards=tuple(map(together, dealt)), held_out=together(held))


def document_text(document: str | Passage | bytes) -> str | bytes:
    """Return what is dealt out: of a passage its own text."""
    return document.text[document.begin : document.end] if isinstance(document, Passage) else document


def _spans(document: Document, most: int) -> Iterator[Document]:
    """A document, or where it is larger than ``most``, parts of about that size: of a text they end with a line or a
    word; of an encoded one between tokens. Conversations are never cut."""
    count: int = -(-len(document_text(document)) // max(most, LEAST_SPAN))
    if count == 1 or isinstance(document, Passage):
        yield document
    elif isinstance(document, str):
        text: str = document
        cuts = [0, *(_break(text, len(text) * part // count) for part in range(1, count)), len(text)]
        yield from (Passage(text, begin, end) for begin, end in pairwise(cuts))
    else:
        encoded = Documents.of(document)
        if encoded.counted is not None and not encoded.counted.all():
            yield document
            return
        starts = [len(encoded.tokens) * part // count for part in range(count)]
        yield from replace(encoded, starts=starts).apart()


def _break(text: str, near: int) -> int:
    """Return where a line ends, or a word, shortly before a place in a text; else that place."""
    least = near - LEAST_SPAN // 4
    return text.rfind("\n", least, near) + 1 or text.rfind(" ", least, near) + 1 or near


def _held_out(
    order: Sequence[str | bytes], sizes: Sequence[int], fraction: float, seed: int, *, at_most: int
) -> frozenset[int]:
    key = seed.to_bytes(8, "little", signed=True)
    ranked = sorted(range(len(order)), key=lambda index: (_hash(order[index], key), index))
    wanted = fraction * sum(sizes)
    chosen: set[int] = set()
    size = 0
    for index in ranked[:at_most]:
        if size >= wanted:
            break
        chosen.add(index)
        size += sizes[index]
    return frozenset(chosen)


def _deal(indices: Sequence[int], sizes: Sequence[int], shards: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(shards)]
    smallest = [(0, shard) for shard in range(shards)]
    for index in sorted(indices, key=lambda index: (-sizes[index], index)):
        size, shard = heapq.heappop(smallest)
        parts[shard].append(index)
        heapq.heappush(smallest, (size + sizes[index], shard))
    return parts


def _hash(document: str | bytes, key: bytes) -> bytes:
    data = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    return hashlib.blake2b(data, digest_size=16, key=key).digest()

"""A shard that is being written: documents are appended, and at the end the manifest is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from data_shards.manifest import (
    COUNTED_FILE,
    MANIFEST_FILE,
    START_BYTES,
    STARTS_FILE,
    TOKENS_FILE,
    ShardManifest,
    TokenFile,
    file_digest,
    token_type,
)
from data_shards.privacy import Private
from swarm.errors import ConfigError

SHARD_FILES = frozenset({TOKENS_FILE, STARTS_FILE, COUNTED_FILE, MANIFEST_FILE})

_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Documents(Private):
    """Some documents as tokens: those of all one after the other, where in them each starts, and which of them are
    targets that count (None: all). What is before the first start goes on with the document before."""

    tokens: npt.NDArray[np.unsignedinteger]
    starts: Sequence[int] = (0,)
    counted: npt.NDArray[np.bool_] | None = None

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.starts)} documents of {len(self.tokens)} tokens"

    def apart(self) -> Iterator[bytes]:
        """Yield each document as bytes of its own, its tokens and its mask, by which documents can be compared."""
        counted = np.ones(len(self.tokens), np.bool_) if self.counted is None else self.counted
        for begin, end in pairwise([*self.starts, len(self.tokens)]):
            yield self.tokens[begin:end].astype("<u4", copy=False).tobytes() + counted[begin:end].tobytes()

    @classmethod
    def of(cls, document: bytes) -> Documents:
        """Return one document that :meth:`apart` gave."""
        length = len(document) // 5
        return cls(np.frombuffer(document, "<u4", length), (0,), np.frombuffer(document, np.bool_, offset=4 * length))


class ShardDraft(Private):
    """The files of a shard in a directory of its own, readable by their owner only.

    Args:
        directory: Where they are.
        tokenizer: Digest of the tokenizer.
        vocab_size: Its number of token ids.
        template: Digest of the chat template that documents with a mask were written with.
        frame: See :attr:`ShardManifest.frame <data_shards.manifest.ShardManifest>`.
    """

    def __init__(
        self, directory: Path, *, tokenizer: str, vocab_size: int, template: str | None = None, frame: str | None = None
    ) -> None:
        self._directory = directory
        self._made_with = (tokenizer, vocab_size, template, frame)
        self.dtype = token_type(vocab_size)
        self.stored = np.dtype(self.dtype).newbyteorder("<")
        self.tokens = self.documents = 0
        self._token_file = _opened(directory / TOKENS_FILE)
        self._start_file = _opened(directory / STARTS_FILE)
        self._counted_file = _opened(directory / COUNTED_FILE)
        self._all_count, self._chats = True, False

    def restart(self, *, tokens: int, documents: int, chats: bool) -> None:
        """Go on behind the first of what another draft has left in the same directory, or from nothing; the rest of
        it is gone. Who calls has made sure that they are there, and knows whether there are conversations."""
        self.tokens, self.documents, self._chats = tokens, documents, chats
        sizes = (tokens * self.stored.itemsize, documents * START_BYTES, -(-tokens // 8))
        for file, size in zip((self._token_file, self._start_file, self._counted_file), sizes, strict=True):
            file.truncate(min(size, os.fstat(file.fileno()).st_size))
            file.seek(0, os.SEEK_END)
        if os.fstat(self._counted_file.fileno()).st_size < sizes[2]:
            self._counted_file.truncate(0)
        self._all_count = not tokens or not os.fstat(self._counted_file.fileno()).st_size
        if not self._all_count:
            self._append_bits(np.empty(0, np.bool_), tokens)

    def flush(self) -> None:
        """Have what was added in the files, where it outlives this process."""
        for file in (self._token_file, self._start_file, self._counted_file):
            file.flush()

    def add(self, documents: Documents) -> None:
        """Append documents."""
        self._token_file.write(documents.tokens.astype(self.stored, copy=False).tobytes())
        starts = np.asarray(documents.starts, dtype="<u8") + np.uint64(self.tokens)
        self._start_file.write(starts.astype("<u8", copy=False).tobytes())
        self._chats = self._chats or documents.counted is not None
        if documents.counted is not None and not documents.counted.all():
            if self._all_count:
                self._fill_counted()
            self._all_count = False
        if not self._all_count:
            counted = documents.counted
            self._append_bits(np.ones(len(documents.tokens), np.bool_) if counted is None else counted, self.tokens)
        self.tokens += len(documents.tokens)
        self.documents += len(documents.starts)

    def finish(self, text_bytes: int | None = None, altered: int | None = None) -> ShardManifest:
        """Write the manifest, and have all files on the disk. Raises ConfigError when there is no document.

        Args:
            text_bytes: How much text the documents were, where it is known.
            altered: How many of them are another text when they are decoded, where it is known.
        """
        if not self.documents:
            raise ConfigError("documents", 0, "at least one document", "Give more text, or ask for fewer shards.")
        for file in (self._token_file, self._start_file, self._counted_file):
            file.flush()
            os.fsync(file.fileno())
        self.close()
        if self._all_count:
            (self._directory / COUNTED_FILE).unlink()
        tokenizer, vocab_size, template, frame = self._made_with
        tokens = file_digest(self._directory / TOKENS_FILE)
        manifest = ShardManifest(
            file=TokenFile(bytes=tokens.bytes, sha256=tokens.sha256),
            starts=file_digest(self._directory / STARTS_FILE),
            counted=None if self._all_count else file_digest(self._directory / COUNTED_FILE),
            template=template if self._chats else None,
            dtype=self.dtype,
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=text_bytes,
            altered=altered,
            frame=frame,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
        )
        with open(self._directory / MANIFEST_FILE, "w", encoding="utf-8", opener=for_owner) as text:
            text.write(manifest.render())
            text.flush()
            os.fsync(text.fileno())
        sync(self._directory)
        return manifest

    def close(self) -> None:
        """Close the files, finished or not."""
        for file in (self._token_file, self._start_file, self._counted_file):
            file.close()

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.tokens} tokens of {self.documents} documents"

    def _fill_counted(self) -> None:
        """All tokens so far count."""
        full, rest = divmod(self.tokens, 8)
        for begin in range(0, full, _AT_ONCE_BYTES):
            self._counted_file.write(b"\xff" * min(_AT_ONCE_BYTES, full - begin))
        self._append_bits(np.ones(rest, np.bool_), full * 8)

    def _append_bits(self, bits: npt.NDArray[np.bool_], at: int) -> None:
        """Write bits from this one on; those before it in its byte stay."""
        byte, lead = divmod(at, 8)
        self._counted_file.seek(byte)
        if lead:
            before = np.frombuffer(self._counted_file.read(1), dtype=np.uint8)
            bits = np.concatenate([np.unpackbits(before, bitorder="little")[:lead].astype(np.bool_), bits])
            self._counted_file.seek(byte)
        self._counted_file.write(np.packbits(bits, bitorder="little").tobytes())


def sync(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def for_owner(path: str, flags: int) -> int:
    """Open for ``open``, readable by the owner only."""
    return os.open(path, flags, 0o600)

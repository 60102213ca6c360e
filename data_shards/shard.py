"""A verified shard, opened for reading: its manifest, and its tokens cut into rows.

A shard is one file of tokens, how it was made, and the digest that names it (:class:`ShardManifest`). :class:`Shard`
opens one.

Rows of ``context`` + 1 tokens start every ``context`` tokens: the last token of one row is the first of the next, so
that every token but the very first is a target exactly once per epoch. What this costs: rows cross document borders, so
a model sees the tail of one document as context of the next (the end-of-text token tells it), a row's first tokens are
predicted with little context, and fewer than ``context`` tokens at the end of the shard are never read. No token is
padding.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, ValidationError

from data_shards.privacy import Private
from swarm.errors import ConfigError, StateError
from swarm.schema import Count, Section


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Shard(Private):
    """A shard whose token file is what its manifest says, memory-mapped read-only."""

    path: Path
    manifest: ShardManifest
    tokens: npt.NDArray[np.unsignedinteger]
    opened: tuple[int, ...]
    """What the file system said of the token file when it was verified."""

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Verify and map a shard. Reads the whole file once (about a second per gigabyte).

        Raises StateError naming path, cause and remedy when anything is missing, torn or altered.
        """
        manifest = read_manifest(path)
        file = path / manifest.file.name
        try:
            found = file.stat()
            size = found.st_size
            if size != manifest.file.bytes:
                raise broken(file, f"{size} bytes where its manifest says {manifest.file.bytes}: torn or cut short")
            if not size:
                raise broken(file, "empty")
            if file_digest(file)[1] != manifest.file.sha256:
                raise broken(file, "its contents differ from what the manifest's sha256 says")
            tokens = np.memmap(file, dtype=np.dtype(manifest.dtype).newbyteorder("<"), mode="r")
        except FileNotFoundError:
            raise broken(file, "no such file") from None
        except OSError as error:
            raise broken(file, error.strerror or "unreadable") from None
        _check_ids(file, tokens, manifest)
        return cls(path, manifest, tokens, _stamp(found))

    def row_count(self, context: int) -> int:
        """Rows of ``context`` + 1 tokens in the shard."""
        return row_count(self.manifest.tokens, context)

    def rows(self, numbers: list[int], context: int) -> npt.NDArray[np.int64]:
        """Rows by number: int64, (len(numbers), context + 1). Raises StateError when the file has changed since it was
        opened."""
        file = self.path / self.manifest.file.name
        try:
            same = _stamp(file.stat()) == self.opened
        except OSError as error:
            raise broken(file, (error.strerror or "unreadable").lower()) from None
        if not same:
            raise broken(file, "it has changed since it was opened")
        rows = read_rows(self.tokens, numbers, context)
        _check_ids(file, rows, self.manifest)
        return rows

    def require(self, *, rows: int, context: int) -> None:
        """Raise ConfigError when the shard holds fewer than ``rows`` rows."""
        have = self.row_count(context)
        if have < rows:
            raise ConfigError(
                "shard",
                str(self.path),
                f"a shard of at least {rows * context + 1} tokens ({rows} rows of {context})",
                f"This one has {self.manifest.tokens}: give it more text, or make context or microbatch_size smaller.",
            )

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.manifest.tokens} tokens of {self.manifest.documents} documents"


def _check_ids(file: Path, tokens: npt.NDArray[np.integer], manifest: ShardManifest) -> None:
    if int(tokens.max()) >= manifest.vocab_size:
        raise broken(file, f"it holds token ids outside its vocabulary of {manifest.vocab_size}")


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


# --- manifest: what a shard is ---------------------------------------------------------------------------------------


MANIFEST_FILE = "shard.json"
TOKENS_FILE = "tokens.bin"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
TokenType = Literal["uint16", "uint32"]

REBUILD = "Build it again from its documents: swarm data build."

_LARGEST_MANIFEST_BYTES = 64 << 10
_READ_BYTES = 1 << 20


class TokenFile(Section):
    """The token file: little-endian unsigned integers, one per token, nothing else."""

    name: Literal["tokens.bin"] = "tokens.bin"
    bytes: Count
    sha256: Sha256


class ShardManifest(Section):
    """The contents of ``shard.json``. ``tokens`` includes one end-of-text token after every document."""

    format: Literal[1] = 1
    file: TokenFile
    dtype: TokenType
    tokens: Count
    documents: Count
    tokenizer: Sha256
    vocab_size: Annotated[int, Field(ge=1, le=1 << 32)]

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON: it covers the token file and the tokenizer, so it names the data."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def token_bytes(self) -> int:
        """Bytes of one stored token."""
        return 2 if self.dtype == "uint16" else 4

    def render(self) -> str:
        """The text of ``shard.json``."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def token_type(vocab_size: int) -> TokenType:
    """The smallest stored type that holds every token id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_manifest(directory: Path) -> ShardManifest:
    """Read and check ``shard.json``. Raises StateError naming the path, the cause and what to do."""
    path = directory / MANIFEST_FILE
    try:
        if path.stat().st_size > _LARGEST_MANIFEST_BYTES:
            raise broken(path, "far too large for a shard manifest")
        manifest = ShardManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise broken(path, "no such file: this directory is not a shard, or was not finished") from None
    except OSError as error:
        raise broken(path, error.strerror or "unreadable") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the document"
        raise broken(path, f"{key}: {first['msg'].lower()}") from None
    if manifest.file.bytes != manifest.tokens * manifest.token_bytes:
        raise broken(path, f"{manifest.tokens} tokens of {manifest.dtype} cannot take {manifest.file.bytes} bytes")
    return manifest


def file_digest(path: Path) -> tuple[int, str]:
    """(bytes, hex sha256) of a file, read once in 1 MiB pieces: about a second per gigabyte."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def broken(path: Path, cause: str) -> StateError:
    """The error for a shard that cannot be used: path, cause, what to do next."""
    return StateError(f"shard {path}: {cause}. {REBUILD}")


# --- packing: a stream of tokens cut into rows of ``context`` + 1 ----------------------------------------------------


def row_count(tokens: int, context: int) -> int:
    """Rows of ``context`` inputs and as many targets that ``tokens`` tokens hold."""
    return max(0, (tokens - 1) // context)


def unread_tokens(tokens: int, context: int) -> int:
    """Tokens at the end that are in no row."""
    rows = row_count(tokens, context)
    return tokens - (rows * context + 1) if rows else tokens


def read_rows(tokens: npt.NDArray[np.unsignedinteger], rows: list[int], context: int) -> npt.NDArray[np.int64]:
    """The rows as an int64 array of shape (len(rows), context + 1). ``tokens`` may be a memory map: only these rows
    are read."""
    out = np.empty((len(rows), context + 1), dtype=np.int64)
    for place, row in enumerate(rows):
        out[place] = tokens[row * context : row * context + context + 1]
    return out

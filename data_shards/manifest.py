"""What a shard is: one file of tokens, how it was made, and the digest that names it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from swarm.errors import StateError
from swarm.schema import Count, Section

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

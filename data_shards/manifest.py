"""What a shard is: the files of its directory, and ``shard.json``, whose digest names it.

| file | contents |
|---|---|
| ``tokens.bin`` | the token ids of all documents, one after the other: little-endian, of 2 or 4 bytes |
| ``starts.bin`` | where each document starts in them: little-endian integers of 8 bytes, ascending, the first 0 |
| ``counted.bin`` | one bit a token, lowest bit first: whether it is a target that counts; absent where all are |
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from swarm.errors import StateError
from swarm.schema import Count, Section

FORMAT = 3
MANIFEST_FILE = "shard.json"
TOKENS_FILE = "tokens.bin"
STARTS_FILE = "starts.bin"
COUNTED_FILE = "counted.bin"
START_BYTES = 8

REBUILD = "Build it again from its documents: swarm data build."

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
TokenType = Literal["uint16", "uint32"]

_NAMED_APART = {"format", "starts", "counted", "template"}
_FOR_PEOPLE = {"text_bytes", "altered", "frame"}
_LARGEST_MANIFEST_BYTES = 64 << 10
_READ_BYTES = 1 << 20


class ShardFile(Section):
    """The size of one file of a shard and what it holds."""

    bytes: Count
    sha256: Sha256


class TokenFile(ShardFile):
    """The token file."""

    name: Literal["tokens.bin"] = "tokens.bin"


class ShardManifest(Section):
    """The contents of ``shard.json``. ``tokens`` includes one end-of-text token after every document.

    The format stands for how documents become tokens, too: from 3 on a file of text is one document as it is, a
    document's tokens are those of the whole, and those that the tokenizer itself adds are around them.

    ``counted`` is None where every token is a target that counts. ``template`` is the digest of the chat template that
    conversations were rendered with, None where there are none. For people: ``text_bytes`` is how much text it was,
    ``altered`` how many documents are another text when their tokens are decoded,
    ``frame`` what the tokenizer put around a text, as in ``<s> … </s>``.
    """

    format: Literal[3] = 3
    file: TokenFile
    starts: ShardFile
    counted: ShardFile | None = None
    template: Sha256 | None = None
    dtype: TokenType
    tokens: Count
    documents: Count
    text_bytes: Count | None = None
    altered: Count | None = None
    frame: str | None = None
    tokenizer: Sha256
    vocab_size: Annotated[int, Field(ge=1, le=1 << 32)]

    @property
    def digest(self) -> str:
        """Hex sha256 that names the data, and so the order in which it is read: of tokens, tokenizer, and for
        conversations of starts, targets and template.

        The starts of plain text follow from its tokens. It is named as in format 1, so that what was read of it in
        a run of then is the same now.
        """
        named = self.model_dump(mode="json", exclude=_NAMED_APART | _FOR_PEOPLE) | {"format": 1}
        if self.counted is not None or self.template is not None:
            named |= self.model_dump(mode="json", include=_NAMED_APART)
        canonical = json.dumps(named, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def token_bytes(self) -> int:
        """Bytes of one stored token."""
        return 2 if self.dtype == "uint16" else 4

    @property
    def files(self) -> dict[str, ShardFile]:
        """The files that must be there next to the manifest, by name."""
        files = {TOKENS_FILE: self.file, STARTS_FILE: self.starts}
        return files if self.counted is None else files | {COUNTED_FILE: self.counted}

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
        document = path.read_bytes()
        manifest = ShardManifest.model_validate_json(document)
    except FileNotFoundError:
        raise broken(path, "no such file: this directory is not a shard, or was not finished") from None
    except OSError as error:
        raise broken(path, error.strerror or "unreadable") from None
    except ValidationError as error:
        raise broken(path, _flaw(document, error)) from None
    sizes = {
        TOKENS_FILE: manifest.tokens * manifest.token_bytes,
        STARTS_FILE: manifest.documents * START_BYTES,
        COUNTED_FILE: -(-manifest.tokens // 8),
    }
    for name, file in manifest.files.items():
        if file.bytes != sizes[name]:
            held = f"{manifest.documents} documents" if name == STARTS_FILE else f"{manifest.tokens} tokens"
            raise broken(path, f"{held} of {manifest.dtype} cannot take {file.bytes} bytes of {name}")
    return manifest


def _flaw(document: bytes, error: ValidationError) -> str:
    try:
        found = json.loads(document).get("format")
    except (ValueError, AttributeError, RecursionError):
        found = FORMAT
    if isinstance(found, int) and found != FORMAT:
        made_by = "an older" if found < FORMAT else "a newer"
        return f"it has format {found} of {made_by} version of swarm, this one reads format {FORMAT}"
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "the document"
    return f"{key}: {first['msg'].lower()}"


def file_digest(path: Path) -> ShardFile:
    """The size and sha256 of a file, read once in 1 MiB pieces: about a second per gigabyte."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return ShardFile(bytes=size, sha256=digest.hexdigest())


def broken(path: Path, cause: str) -> StateError:
    """The error for a shard that cannot be used: path, cause, what to do next."""
    return StateError(f"shard {path}: {cause}. {REBUILD}")

"""Which pieces of its source a draft of a shard holds already, so that a build that was killed goes on.

One line of JSON for each piece: what it was made of, and what was made of it. Pieces are taken back only in their
order, from the first on, and only where both are the same, so that whatever a death left in the files, the shard that
is made in the end is the one that an undisturbed build makes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from data_shards.draft import Documents, for_owner
from data_shards.manifest import COUNTED_FILE, START_BYTES, STARTS_FILE, TOKENS_FILE
from data_shards.packing import counted_between
from swarm.schema import Count, Section

JOURNAL_FILE = "journal.jsonl"


class DonePiece(Section):
    """A piece of the source that is in the draft. ``told`` is what else its maker wants to know of it again."""

    source: str
    tokens: Count
    documents: Count
    masked: bool
    made: str
    told: dict[str, Any]


class Journal:
    """The pieces of one draft.

    Args:
        directory: The draft's.
        made_with: What distinguishes this build from another of the same source.
        token_bytes: Bytes of a stored token.
    """

    def __init__(self, directory: Path, made_with: str, token_bytes: int) -> None:
        self._path = directory / JOURNAL_FILE
        self._head = json.dumps({"format": 2, "made_with": made_with}) + "\n"
        self.done = _intact(directory, _read(self._path, self._head), token_bytes)
        self._file: BinaryIO | None = None

    def keep(self, pieces: int) -> tuple[int, int, bool]:
        """Go on behind so many of the pieces that are done. Return the tokens and documents in them, and whether one
        has a mask."""
        del self.done[pieces:]
        lines = [self._head, *(piece.model_dump_json() + "\n" for piece in self.done)]
        self._file = open(self._path, "wb", opener=for_owner)  # noqa: SIM115 - until close
        self._file.write("".join(lines).encode())
        self._file.flush()
        tokens, documents = sum(piece.tokens for piece in self.done), sum(piece.documents for piece in self.done)
        return tokens, documents, any(piece.masked for piece in self.done)

    def add(self, source: str, documents: Documents, stored: np.dtype[Any], told: dict[str, Any]) -> None:
        """Note a piece that has been written to the draft."""
        piece = DonePiece(
            source=source,
            tokens=len(documents.tokens),
            documents=len(documents.starts),
            masked=documents.counted is not None,
            made=_digest(
                documents.tokens.astype(stored, copy=False).tobytes(), np.asarray(documents.starts), documents.counted
            ),
            told=told,
        )
        assert self._file is not None, "keep() comes first"  # noqa: S101
        self._file.write(piece.model_dump_json().encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _digest(tokens: bytes, starts: npt.NDArray[Any], counted: npt.NDArray[np.bool_] | None) -> str:
    found = hashlib.blake2b(tokens, digest_size=16)
    found.update(starts.astype("<u8").tobytes())
    if counted is not None:
        found.update(np.packbits(counted).tobytes())
    return found.hexdigest()


def _read(path: Path, head: str) -> list[DonePiece]:
    pieces: list[DonePiece] = []
    try:
        with path.open("rb") as file:
            if file.readline().decode(errors="replace") != head:
                return []
            pieces.extend(DonePiece.model_validate_json(line) for line in file)
    except (OSError, ValidationError):  # the last line may be torn
        return pieces
    return pieces


def _intact(directory: Path, pieces: list[DonePiece], token_bytes: int) -> list[DonePiece]:
    """The first of the pieces, up to one whose tokens, starts or targets are not what was written."""
    kept: list[DonePiece] = []
    begin, masked = 0, False
    try:
        bits = np.fromfile(directory / COUNTED_FILE, dtype=np.uint8) if any(one.masked for one in pieces) else None
        with (directory / TOKENS_FILE).open("rb") as tokens, (directory / STARTS_FILE).open("rb") as starts:
            for piece in pieces:
                begins = np.frombuffer(starts.read(piece.documents * START_BYTES), dtype="<u8")
                end = begin + piece.tokens
                stored = tokens.read(piece.tokens * token_bytes)
                masked = masked or piece.masked
                counted = None
                if masked and bits is not None:
                    if len(bits) * 8 < end:
                        return kept
                    counted = counted_between(bits, begin, end)
                    if not piece.masked:
                        counted = None if counted.all() else counted
                if len(begins) != piece.documents or _digest(stored, begins - np.uint64(begin), counted) != piece.made:
                    return kept
                kept.append(piece)
                begin = end
    except OSError:
        return kept
    return kept

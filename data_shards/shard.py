"""A verified shard, opened for reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_shards.manifest import ShardManifest, broken, file_digest, read_manifest
from data_shards.packing import read_rows, row_count
from data_shards.privacy import Private
from swarm.errors import ConfigError


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

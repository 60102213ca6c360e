"""A verified shard, opened for reading.

The first opening reads every byte of a shard and compares it with the digests of its manifest. It then leaves
``verified.json`` beside them: what the file system says of each file (inode, size, times of change). While that is the
same, opening the shard again reads nothing, so that a peer restarts in no time. What this does not find is a disk that
alters bytes by itself; ``swarm data verify`` reads everything at any time, and ids outside the vocabulary are never
given out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from data_shards.manifest import (
    COUNTED_FILE,
    MANIFEST_FILE,
    STARTS_FILE,
    TOKENS_FILE,
    ShardManifest,
    broken,
    read_manifest,
)
from data_shards.privacy import Private
from swarm.schema import LISTED, Section

VERIFIED_FILE = "verified.json"

_SETTLED_NS = 2_000_000_000
"""A file that changed less than this ago may change again without other times: the coarsest file systems count so."""
_READ_BYTES = 1 << 20

_Stamp = tuple[int, int, int, int]
_Stamps = dict[str, _Stamp]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Shard(Private):
    """A shard whose files are what its manifest says, memory-mapped read-only."""

    path: Path
    manifest: ShardManifest
    tokens: npt.NDArray[np.unsignedinteger]
    starts: npt.NDArray[np.unsignedinteger]
    """Where each document starts."""
    counted: npt.NDArray[np.uint8] | None
    """Bits, see :mod:`data_shards.manifest`. None: every token counts."""
    opened: _Stamps
    """What the file system said of each file when it was opened."""

    @classmethod
    def open(cls, path: Path, *, anew: bool = False) -> Shard:
        """Verify and map a shard.

        Reads every byte the first time, about a second per gigabyte; none while no file has changed since, unless it is
        to be verified ``anew``. Raises StateError naming path, cause and remedy when anything is missing, torn or
        altered.
        """
        manifest = read_manifest(path)
        stamps = _stamps(path, manifest)
        if anew or not _is_remembered(path, stamps):
            with _remembering(path, stamps):
                for name in manifest.files:
                    _verify(path / name, manifest)
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        counted = _mapped(path / COUNTED_FILE, np.dtype(np.uint8)) if manifest.counted is not None else None
        return cls(
            path=path,
            manifest=manifest,
            tokens=_mapped(path / TOKENS_FILE, dtype),
            starts=_mapped(path / STARTS_FILE, np.dtype("<u8")),
            counted=counted,
            opened=stamps,
        )

    def check_unchanged(self) -> None:
        """Raise StateError when a file has changed since the shard was opened."""
        for name, stamp in self.opened.items():
            file = self.path / name
            try:
                same = name == MANIFEST_FILE or _stamp(file) == stamp
            except OSError as error:
                raise broken(file, (error.strerror or "unreadable").lower()) from None
            if not same:
                raise broken(file, "it has changed since it was opened")

    def check_ids(self, tokens: npt.NDArray[np.integer]) -> None:
        """Raise StateError when one of these is outside the vocabulary."""
        _check_ids(self.path / TOKENS_FILE, tokens, self.manifest)

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{self.manifest.tokens} tokens of {self.manifest.documents} documents"


def _mapped(file: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise broken(file, error.strerror or "unreadable") from None


# --- verifying: every byte, once -------------------------------------------------------------------------------------


def _verify(file: Path, manifest: ShardManifest) -> None:
    check = {TOKENS_FILE: _token_checker, STARTS_FILE: _start_checker, COUNTED_FILE: _no_checker}[file.name]
    each = check(file, manifest)
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                digest.update(piece)
                each(piece)
    except OSError as error:
        raise broken(file, error.strerror or "unreadable") from None
    if digest.hexdigest() != manifest.files[file.name].sha256:
        raise broken(file, "its contents differ from what the manifest's sha256 says")


def _token_checker(file: Path, manifest: ShardManifest) -> Callable[[bytes], None]:
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    largest = 0

    def check(piece: bytes) -> None:
        nonlocal largest
        largest = max(largest, int(np.frombuffer(piece, dtype=dtype).max()))
        if largest >= manifest.vocab_size:
            _check_ids(file, np.array([largest]), manifest)

    return check


def _start_checker(file: Path, manifest: ShardManifest) -> Callable[[bytes], None]:
    before = -1

    def check(piece: bytes) -> None:
        nonlocal before
        starts = np.frombuffer(piece, dtype="<u8").astype(np.int64)
        first = before < 0
        if (first and starts[0] != 0) or (np.diff(starts, prepend=before) <= 0).any() or starts[-1] >= manifest.tokens:
            raise broken(file, "its document starts do not ascend from 0 within the tokens")
        before = int(starts[-1])

    return check


def _no_checker(file: Path, manifest: ShardManifest) -> Callable[[bytes], None]:
    return lambda piece: None


def _check_ids(file: Path, tokens: npt.NDArray[np.integer], manifest: ShardManifest) -> None:
    if int(tokens.max()) >= manifest.vocab_size:
        raise broken(file, f"it holds token ids outside its vocabulary of {manifest.vocab_size}")


# --- remembering that it was verified --------------------------------------------------------------------------------


class VerifiedFiles(Section):
    """The contents of ``verified.json``: what the file system said of each file that was found to be in order."""

    stamps: Annotated[_Stamps, LISTED]


def _stamps(path: Path, manifest: ShardManifest) -> _Stamps:
    found: _Stamps = {}
    for name in (MANIFEST_FILE, *manifest.files):
        try:
            found[name] = _stamp(path / name)
        except FileNotFoundError:
            raise broken(path / name, "no such file") from None
        except OSError as error:
            raise broken(path / name, error.strerror or "unreadable") from None
    for name, file in manifest.files.items():
        size = found[name][1]
        if size != file.bytes:
            raise broken(path / name, f"{size} bytes where its manifest says {file.bytes}: torn or cut short")
        if not size:
            raise broken(path / name, "empty")
    return found


def _stamp(file: Path) -> _Stamp:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_remembered(path: Path, stamps: _Stamps) -> bool:
    try:
        remembered = VerifiedFiles.model_validate_json((path / VERIFIED_FILE).read_bytes())
    except (OSError, ValidationError):
        return False
    return remembered.stamps == stamps


@contextlib.contextmanager
def _remembering(path: Path, stamps: _Stamps) -> Iterator[None]:
    """Remember these stamps once what is done inside has succeeded. Where the directory is read-only, or a file changed
    just before, nothing is remembered: the shard is verified again the next time."""
    draft = None
    with contextlib.suppress(OSError):
        descriptor, draft = tempfile.mkstemp(prefix=f".{VERIFIED_FILE}-", dir=path)
        os.close(descriptor)
    try:
        yield
        if draft is None:
            return
        with contextlib.suppress(OSError):
            begun = os.stat(draft).st_mtime_ns  # this file system's own clock
            if all(max(stamp[2:]) + _SETTLED_NS <= begun for stamp in stamps.values()):
                Path(draft).write_text(VerifiedFiles(stamps=stamps).model_dump_json(), encoding="utf-8")
                os.replace(draft, path / VERIFIED_FILE)
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)

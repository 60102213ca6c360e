"""The key file: one peer's identity on disk, in the form the libp2p daemon reads."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import ConfigError
from swarm.ids import PeerId
from swarm.security.signing import PRIVATE_KEY_BYTES, PrivateIdentity


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """An identity and the file it came from, which the daemon reads by itself."""

    path: Path
    private: PrivateIdentity

    @property
    def peer(self) -> PeerId:
        """The peer id."""
        return self.private.peer


def load_or_create(path: Path) -> StoredIdentity:
    """The identity in ``path``, made now when there is no such file.

    The file is 0600 in a directory that is made 0700 when missing, and appears whole or not at all: of two processes
    that start at once, one makes it and both use it. Raises ConfigError, with path and remedy, for a file that others
    may read, that is not ours, or that is no Ed25519 key.
    """
    try:
        if not path.exists():
            _create(path)
        return StoredIdentity(path, _load(path))
    except OSError as error:
        raise ConfigError("identity", str(path), "a key file this user can read and write",
                          f"{error.strerror}; check the path and its permissions.") from error  # fmt: skip


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".identity-")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(PrivateIdentity.generate().to_protobuf())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: its key is the identity
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _load(path: Path) -> PrivateIdentity:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        data = file.read(PRIVATE_KEY_BYTES + 1)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise ConfigError(
            "identity", str(path), "a regular file of this user", "Move it away; the peer makes a new one."
        )
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError("identity", str(path), "a file only its owner can read (0600)",
                          f"Run: chmod 600 {path}, and make a new one if others may have read it.")  # fmt: skip
    try:
        return PrivateIdentity.from_protobuf(data)
    except ValueError as error:
        raise ConfigError("identity", str(path), "the libp2p protobuf of an Ed25519 key",
                          f"It is {error}. Restore it, or move it away to become a new peer.") from error  # fmt: skip

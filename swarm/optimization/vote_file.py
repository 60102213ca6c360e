"""A member's vote in the open step as it lies on its disk, beside its key, so that a peer that is started again neither
votes twice nor takes its vote away.

The file is bound to the directory in which it was written: a copy of it elsewhere, with a copy of the key, is no vote,
for the original may still be used. Who puts an old state of the directory itself back must not start a peer there while
the step goes on in which it was taken; the record that the vote follows makes any older one worthless.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgpack
from pydantic import ValidationError

from swarm.optimization.acceptor import Vote
from swarm.schema import Count, DigestField, Message
from swarm.state.checkpoint_disk import sweep, sync_directory, write_whole

logger = logging.getLogger(__name__)

HEADER = b"swarm vote 1\n"
DIGEST_BYTES = 32
MAX_FILE_BYTES = 64 << 20
"""More than any record that fits a message takes, with the requests that explain it."""


class KeptVote(Message):
    """What a member has promised and accepted in one step, which follows the record with the hash ``previous``: see
    :class:`swarm.optimization.acceptor.Acceptor`."""

    run: DigestField
    step: Count
    previous: DigestField
    term: Count
    free: Count
    vote: Vote | None


class VoteFile:
    """The newest vote of the peer whose home ``path`` lies in; of one step only: the next one's takes its place."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> KeptVote | None:
        """What lies there; None for no file, and, said in the log, for one that is torn, strange or of elsewhere: then
        nothing is known of what was voted here. What a killed process left half written beside it is taken away. Never
        raises."""
        sweep(self._path)
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            return self._decoded(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, ValidationError, msgpack.exceptions.UnpackException) as error:
            logger.warning("%s is not a vote that was given here, and is passed over: %s", self._path, error)
            return None

    def write(self, kept: KeptVote) -> None:
        """Have it on the disk, instead of what was there, when this returns. Blocking: three syncs. Raises OSError with
        what was there untouched."""
        body: bytes = msgpack.packb(kept.model_dump(), use_bin_type=True)
        write_whole(self._path, [HEADER, self._digest(body), body])

    def drop(self) -> None:
        """Have none: whoever is started here anew knows nothing of what was voted. Blocking. Raises OSError."""
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)

    def _decoded(self, data: bytes) -> KeptVote:
        head, body = len(HEADER), data[len(HEADER) + DIGEST_BYTES :]
        if len(data) > MAX_FILE_BYTES or not data.startswith(HEADER):
            raise ValueError("no such file has this size and beginning")
        if data[head : head + DIGEST_BYTES] != self._digest(body):
            raise ValueError("it is torn, or comes from another directory")
        return KeptVote.model_validate(msgpack.unpackb(body, use_list=False))

    def _digest(self, body: bytes) -> bytes:
        here = os.stat(self._path.parent)
        return hashlib.sha256(f"{here.st_dev}|{here.st_ino}|".encode() + body).digest()

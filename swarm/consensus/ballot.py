"""One member's vote in one step, the file that keeps it, and which of a peer's starts may cast it.

What a member promises and accepts lies on its disk, beside its key, before anybody is told, so that a peer that is
started again neither votes twice nor takes its vote away. :class:`Ballot` is the vote, :class:`VoteFile` the disk,
:class:`Incarnation` one start of the peer.

The file is bound to the directory in which it was written: a copy of it elsewhere, with a copy of the key, is no vote,
for the original may still be used. Do not put an old state of the directory itself back and start a peer there while
the step goes on in which it was taken; the record that the vote follows makes any older one worthless.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgpack
from pydantic import ValidationError

from swarm.consensus.acceptor import Acceptor, Vote
from swarm.consensus.records import CloseRecord
from swarm.disk import sweep, sync_directory, write_whole
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.schema import Count, DigestField, Message

Keep = Callable[[Acceptor], None]
"""Have this on the disk. Blocking; raises OSError when the disk refuses."""


class Ballot:
    """An acceptor that forgets nothing. Without ``keep`` it lives in memory only; with a reason in ``abstains`` it
    takes no part: nobody knows what was promised and accepted before.

    Busy is what it answers instead of a vote that it may not give, or cannot keep: the leader then waits for other
    voters, where so many refusals would end the run.
    """

    def __init__(
        self,
        acceptor: Acceptor | None = None,
        *,
        keep: Keep | None = None,
        abstains: str = "",
        trouble: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._acceptor = acceptor or Acceptor()
        self._keep, self._abstains, self._trouble = keep, abstains, trouble
        self._one_by_one = asyncio.Lock()
        self._keeping: set[asyncio.Task[None]] = set()

    @property
    def term(self) -> int:
        """The highest term that it promised to follow."""
        return self._acceptor.term

    @property
    def vote(self) -> Vote | None:
        """The vote accepted last."""
        return self._acceptor.vote

    @property
    def free(self) -> int:
        """See :class:`Acceptor`. What is lost of it with a crash costs no more than a record proposed again."""
        return self._acceptor.free

    async def follow(self, term: int) -> bool:
        """Promise to follow a term; whether it is a new one. Raises Superseded for a lower one, and Busy. Cancelled,
        the promise may stand all the same."""
        async with self._asked():
            after = dataclasses.replace(self._acceptor)
            new = after.follow(term)
            await self._become(after)
        return new

    async def accept(self, vote: Vote) -> None:
        """Accept a record in its term; it is on the disk when this returns. Raises Superseded, Refused for a second
        record in one term, and Busy. Cancelled, the vote may stand all the same."""
        async with self._asked():
            after = dataclasses.replace(self._acceptor)
            after.accept(vote)
            await self._become(after)

    def begun_free(self, term: int) -> None:
        """Its leader closes the step anew in this term: it was free to. Kept with the next vote."""
        self._acceptor.begun_free(term)

    async def retire(self, reason: str) -> Acceptor:
        """Answer nothing any more; returns what it promised and accepted, when nothing is being written."""
        async with self.retiring(reason):
            return self._acceptor

    @asynccontextmanager
    async def retiring(self, reason: str) -> AsyncIterator[None]:
        """As :meth:`retire`, when nothing is being written; it goes on as before if what is done meanwhile fails."""
        async with self._one_by_one:
            await self.close()
            yield
            self._abstains = reason

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """One question at a time. Raises Busy where it abstains."""
        async with self._one_by_one:
            await self.close()
            if self._abstains:
                raise Busy(self._abstains)
            yield

    async def close(self) -> None:
        """Return when nothing is being written any more."""
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def _become(self, after: Acceptor) -> None:
        """Written off the event loop. That goes on when the question is given up, and the next one waits for it:
        so the disk never holds less than what somebody was told."""
        if (after.term, after.vote) == (self._acceptor.term, self._acceptor.vote):
            return
        if self._keep is None:
            self._acceptor = after
            return
        keeping = asyncio.ensure_future(self._kept(self._keep, after))
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        await asyncio.shield(keeping)

    async def _kept(self, keep: Keep, after: Acceptor) -> None:
        try:
            await asyncio.to_thread(keep, after)
        except OSError as error:
            self._trouble(error.strerror or str(error))
            raise Busy(f"its vote cannot be kept: {error.strerror or error}") from error
        after.free = max(after.free, self._acceptor.free)
        self._acceptor = after
        self._trouble("")


# --- vote file -------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

HEADER = b"swarm vote 2\n"
DIGEST_BYTES = 32
MAX_FILE_BYTES = 64 << 20
"""More than any record that fits a message takes, with the requests that explain it."""


class KeptVote(Message):
    """A member's promise and vote in one step, which follows the record with the hash ``previous``: see
    :class:`swarm.consensus.acceptor.Acceptor`."""

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
        """Read the file; None for no file and, with a line in the log, for one that is torn, strange or of elsewhere:
        then nothing is known of what was voted here. What a killed process left half written next to it is taken away.
        Never raises."""
        sweep(self._path)
        try:
            body, here = self._read()
            if not here:
                raise ValueError("it was written in another directory, or on a disk that had another number")
            return KeptVote.model_validate(msgpack.unpackb(body, use_list=False))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, ValidationError, msgpack.exceptions.UnpackException) as error:
            logger.warning("ignored %s: it is no vote of this peer: %s", self._path, error)
            return None

    def written_elsewhere(self) -> bool:
        """Return whether the file is whole, and was written in another directory, or on a disk that had another number
        then: what was voted since, in the home that this one is a copy of, is not known here. Never raises."""
        try:
            return not self._read()[1]
        except (OSError, ValueError):
            return False

    def write(self, kept: KeptVote) -> None:
        """Have it on the disk, instead of what was there, when this returns. Blocking: three syncs. Raises OSError with
        what was there untouched."""
        body: bytes = msgpack.packb(kept.model_dump(), use_bin_type=True)
        write_whole(self._path, [HEADER, hashlib.sha256(body).digest(), self._digest(body), body])

    def drop(self) -> None:
        """Have none: one that is started here anew knows nothing of what was voted. Blocking. Raises OSError."""
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)

    def _read(self) -> tuple[bytes, bool]:
        """Return what was written, and whether that was here. Raises OSError, and ValueError unless it is whole."""
        with self._path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        head, body = len(HEADER), data[len(HEADER) + 2 * DIGEST_BYTES :]
        if len(data) > MAX_FILE_BYTES or not data.startswith(HEADER):
            raise ValueError("no such file has this size and beginning")
        if data[head : head + DIGEST_BYTES] != hashlib.sha256(body).digest():
            raise ValueError("it is torn: its bytes are not those that were written")
        return body, data[head + DIGEST_BYTES : head + 2 * DIGEST_BYTES] == self._digest(body)

    def _digest(self, body: bytes) -> bytes:
        here = os.stat(self._path.parent)
        return hashlib.sha256(f"{here.st_dev}|{here.st_ino}|".encode() + body).digest()


FOUNDED = 0
"""How a founding record names everybody."""


class Incarnation:
    """This process, as the rosters name it: each of a peer's starts is one.

    A roster names a peer with the ``incarnation`` with which it asked to be let in, 0 in a founding record, which each
    has to accept itself. A later one takes no part in a step whose roster names an earlier one: that may have voted in
    it, and done any part of its work. A record that names the later one was made after that began, so none before can
    have voted in the step that follows.

    Where the disk is still there, with the vote of the step that was open, the later one keeps the promise, repeats the
    vote and goes on voting, as an acceptor and nothing else: so the run goes on when a majority was killed and came
    back. Without that disk, or with one that does not reach up to the record before the step, it abstains until a
    record names it. ``votes`` is None for a peer without a disk; ``trouble`` is told why it does not take a vote, ""
    when it takes it again.
    """

    def __init__(
        self,
        me: PeerId,
        incarnation: int = FOUNDED,
        votes: VoteFile | None = None,
        trouble: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._me, self._incarnations = me, {incarnation}
        self._votes, self._trouble = votes, trouble
        self._left = None if votes is None else votes.read()

    def founded(self) -> None:
        """This life accepted the founding record that was decided."""
        self._incarnations.add(FOUNDED)

    def is_named(self, record: CloseRecord) -> bool:
        """Return whether this life takes part in the step after the record."""
        members = record.members
        return self._me in members and members[self._me].incarnation in self._incarnations

    def inherits(self, record: CloseRecord) -> bool:
        """Return whether an earlier life takes part in the step after the record, whose vote in it is known."""
        return self._me in record.members and not self.is_named(record) and self._inherited(record) is not None

    def ballot(self, record: CloseRecord) -> Ballot:
        """Our vote in the step after the record."""
        acceptor = Acceptor() if self.is_named(record) else self._inherited(record)
        if acceptor is None:
            return Ballot(abstains="this peer was started anew, and does not know what it voted in this step")
        return self.resume(record, acceptor)

    def resume(self, record: CloseRecord, acceptor: Acceptor) -> Ballot:
        """Our vote in the step after the record, as this very life knows it."""
        return Ballot(acceptor, keep=self._keeper(record), trouble=self._trouble)

    async def forget(self) -> None:
        """Make every later incarnation here abstain in the open step. Raises OSError."""
        if self._votes is not None:
            await asyncio.to_thread(self._votes.drop)

    def _keeper(self, record: CloseRecord) -> Keep | None:
        return None if self._votes is None else partial(self._keep, self._votes, record)

    def _inherited(self, record: CloseRecord) -> Acceptor | None:
        """Return what the earlier life left: its vote in this step, or proof that it ended before it gave one, for it
        then wrote nothing after it accepted the record before."""
        left, before = self._left, record.hash()
        if left is None or left.run != record.run:
            return None
        if (left.step, left.previous) == (record.step + 1, before):
            return Acceptor(left.term, left.vote, left.free)
        if left.step == record.decides and left.vote is not None and left.vote.record.hash() == before:
            return Acceptor()
        return None

    def _keep(self, votes: VoteFile, record: CloseRecord, acceptor: Acceptor) -> None:
        """Blocking. Raises OSError."""
        votes.write(
            KeptVote(
                run=record.run,
                step=record.step + 1,
                previous=record.hash(),
                term=acceptor.term,
                free=acceptor.free,
                vote=acceptor.vote,
            )
        )

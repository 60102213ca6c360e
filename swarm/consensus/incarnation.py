"""Tell the incarnations of a peer apart, and limit the actions of one in the name of the one before it.

A roster names a peer in one life: the ``incarnation`` with which it asked to be let in, 0 in a founding record, which a
life has to accept itself. A process that is started anew under the same identity is another life. It takes no part in a
step whose roster names an earlier one: that one may have voted in it, and done any part of its work. When a record
names the new life, that record was made after the new life began, so none before it can have voted in the step that
follows: nothing of the earlier lives needs to be known.

What the earlier one voted in the step that was open when it ended is not lost where its disk is still there: the new
life keeps the promise, repeats the vote and goes on voting, as an acceptor and nothing else, so that the run can go on
when a majority was killed and came back. Without that disk, or with one that does not reach up to the record before the
step, it abstains until a record names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from swarm.consensus.acceptor import Acceptor
from swarm.consensus.ballot import Ballot, Keep, KeptVote, VoteFile
from swarm.consensus.records import CloseRecord
from swarm.ids import PeerId

FOUNDED = 0
"""How a founding record names everybody."""


class Incarnation:
    """This process, as the rosters name it. ``votes`` is None for a peer without a disk; ``trouble`` is told why
    it does not take a vote, "" when it takes it again."""

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

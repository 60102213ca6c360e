"""One member's vote in one step, with its disk: what it promises and accepts lies there before anybody is told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarm.errors import Busy
from swarm.optimization.acceptor import Acceptor, Vote

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
        """What it accepted last."""
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
        """Written off the event loop. That goes on when the question is given up, and whoever comes next waits for it:
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

"""One member's vote on the record that closes the open step: single-decree Paxos (Lamport, Paxos Made Simple, §2.3).

A ballot is a term; every term has one owner, who proposes at most one record in it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.consensus.changes import NO_CHANGES, Changes
from swarm.consensus.records import CloseRecord
from swarm.errors import Busy, OutOfSync, Refused, Superseded, Violation
from swarm.ids import PeerId
from swarm.schema import Count, Message, PeerIdField, SignatureField

MAX_LEAP = 1 << 16
"""How far beyond the term that it knows a member follows a leader. Honest leaders climb by a few terms at a time; one
that could name any would have all others run out of the numbers that their questions are counted with."""


class Vote(Message):
    """The record that a member accepted last, in which term, and the requests that explain its roster."""

    term: Count
    record: CloseRecord
    changes: Changes = NO_CHANGES


class BranchHead(Message):
    """A record that some closed by themselves (``swarm.consensus.branches``), and for how many microbatches since; with
    the signatures of those who did, and their term."""

    vote: Vote
    samples: Count
    term: Count = 0
    acceptances: Annotated[dict[PeerIdField, SignatureField], Field(max_length=20_000)] = {}


@dataclass(slots=True)
class Acceptor:
    """The vote of one member in one step.

    ``term`` is the highest that it promised to follow; messages of a lower one are refused from then on. ``free`` is
    the highest term of which it knows that its leader had a majority's promises and found nothing accepted: no record
    of a lower term can have been decided, so a later leader need not propose one again.
    """

    term: int = 0
    vote: Vote | None = None
    free: int = 0

    def follow(self, term: int) -> bool:
        """Promise to follow a term; whether it is a new one. Raises Superseded for a lower one, Busy for one out of
        reach."""
        if term < self.term:
            raise Superseded(f"term {self.term} has begun, this is of term {term}")
        if term > self.term + MAX_LEAP:
            raise Busy(f"term {self.term} is known here: {term} is out of reach")
        new = term > self.term
        self.term = term
        return new

    def accept(self, vote: Vote) -> None:
        """Accept a record in its term. Raises Superseded, and Refused for a second record in one term."""
        self.follow(vote.term)
        if self.vote is not None and self.vote.term == vote.term and self.vote.record.hash() != vote.record.hash():
            raise Refused(f"another record was accepted in term {vote.term}")
        self.vote = vote

    def begun_free(self, term: int) -> None:
        """Its leader closes the step anew in this term: it was free to."""
        self.free = max(self.free, term)


@dataclass(frozen=True, slots=True)
class Promised:
    """One member's promise, as the leader that asked for it sees it."""

    vote: Vote | None
    free: int
    candidate: Vote | None = None


def check_promise(promise: Promised, term: int, follows: Callable[[CloseRecord], None]) -> None:
    """Raises Violation for a promise to follow ``term`` that no honest member makes: it could steer
    :func:`must_propose`, and hide a record that was decided. ``follows`` raises OutOfSync for a record that cannot
    close the step."""
    if promise.free >= term:
        raise Violation(f"term {promise.free} was free, it says, in its promise to follow term {term}")
    offered = promise.candidate
    if offered is not None and not offered.record.forks:
        raise Violation("what it says was closed without a majority does not begin a lineage")
    for vote in (promise.vote, offered):
        if vote is None:
            continue
        if vote.term >= term or vote.record.term > vote.term:
            raise Violation(f"a vote of term {vote.term} in its promise to follow term {term}")
        try:
            follows(vote.record)
        except OutOfSync as error:
            raise Violation(f"a vote on what cannot close the step: {error}") from error


def must_propose(promises: list[Promised]) -> Vote | None:
    """Return the record that the leader of a term must propose, given the promises of a majority: the one accepted in
    the highest term, unless a later term was free. None: it may propose its own."""
    free = max((promise.free for promise in promises), default=0)
    votes = [promise.vote for promise in promises if promise.vote is not None and promise.vote.term >= free]
    return max(votes, key=lambda vote: vote.term, default=None)


def majority(voters: int) -> int:
    """Return the number of voters that form a majority of so many."""
    return voters // 2 + 1


def has_majority(electors: Collection[PeerId], gone: Container[PeerId]) -> bool:
    """Return whether those of the voters that are not gone could decide."""
    return sum(peer not in gone for peer in electors) >= majority(len(electors))

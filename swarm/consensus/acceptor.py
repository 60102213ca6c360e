"""One member's vote on the record that closes the open step: single-decree Paxos (Lamport, Paxos Made Simple, §2.3).

A ballot is a term; every term has one owner, who proposes at most one record in it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.consensus.changes import NO_CHANGES, Changes
from swarm.consensus.records import CloseRecord
from swarm.errors import Busy, OutOfSync, Refused, Superseded, Violation
from swarm.ids import PeerId
from swarm.schema import Count, DigestField, Message, PartField, PeerIdField, SignatureField

MAX_LEAP = 1 << 16
"""How far beyond the term that it knows a member follows a leader. Honest leaders climb by a few terms at a time; one
that could name any would have all others run out of the numbers that their questions are counted with."""


class RecordEvidence(Message):
    """What bears out a record that has results, whoever shows it, and in whichever term: the signatures of trainers
    under their ``rows``, and of replicas under their ``results`` in the part's attempt with that number of
    ``attempts`` (``swarm.step.results``)."""

    rows: Annotated[dict[PeerIdField, SignatureField], Field(max_length=20_000)] = {}
    results: Annotated[dict[PeerIdField, SignatureField], Field(max_length=20_000)] = {}
    attempts: Annotated[dict[PartField, Count], Field(max_length=1025)] = {}


NO_EVIDENCE = RecordEvidence()


class Vote(Message):
    """The record that a member accepted last, in which term, the requests that explain its roster, and what bears it
    out."""

    term: Count
    record: CloseRecord
    changes: Changes = NO_CHANGES
    evidence: RecordEvidence = NO_EVIDENCE

    @property
    def accepted(self) -> tuple[int, str]:
        """The term, and the record's hash."""
        return self.term, self.record.hash()


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


class SignedPromise(Message):
    """What a voter signed with its promise to follow a term, as others are shown it: in which term it accepted which
    record last, by its hash, and what is ``free`` (:class:`Acceptor`)."""

    accepted: tuple[Count, DigestField] | None
    free: Count
    signature: SignatureField


def promise_bytes(step: tuple[str, int, str], term: int, accepted: tuple[int, str] | None, free: int) -> bytes:
    """Return the bytes that a voter signs when it promises to follow a term of a step: of a run, with a number, after a
    record with a hash."""
    said = "none" if accepted is None else f"{accepted[0]}:{accepted[1]}"
    return f"promise|{'|'.join(map(str, step))}|{term}|{said}|{free}".encode()


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


def may_be_decided(digest: str, accepted: Mapping[PeerId, str | None], electors: Collection[PeerId]) -> bool:
    """Return whether a majority of the electors can have accepted a record, by its hash, where some of them have told
    which they accepted last."""
    return sum(accepted.get(peer, digest) == digest for peer in electors) >= majority(len(electors))


def has_to_be_proposed(
    digest: str, promises: Mapping[PeerId, SignedPromise], electors: Collection[PeerId], leader: PeerId
) -> bool:
    """Return whether these promises show that a record may have been decided in an earlier term: then its ``leader``
    must propose it, and whoever sees them accept it. Of its own word alone it may not make use: another leader can."""
    told = {peer: promises[peer] for peer in electors if peer in promises}
    free = max((one.free for one in told.values()), default=0)
    accepted = {peer: one.accepted for peer, one in told.items()}
    newest = max((one for one in accepted.values() if one is not None and one[0] >= free), default=(0, ""))
    hashes = {peer: None if one is None else one[1] for peer, one in accepted.items()}
    return (
        len(told) >= majority(len(electors))
        and newest[1] == digest
        and any(one == digest for peer, one in hashes.items() if peer != leader)
        and may_be_decided(digest, hashes, electors)
    )


def majority(voters: int) -> int:
    """Return the number of voters that form a majority of so many."""
    return voters // 2 + 1


def has_majority(electors: Collection[PeerId], gone: Container[PeerId]) -> bool:
    """Return whether those of the voters that are not gone could decide."""
    return sum(peer not in gone for peer in electors) >= majority(len(electors))

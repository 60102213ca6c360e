"""One member's vote on the record that closes the open step: single-decree Paxos (Lamport, Paxos Made Simple, §2.3).

A ballot is a term; every term has one owner, who proposes at most one record in it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.consensus.changes import NO_CHANGES, Changes
from swarm.consensus.majority import majority
from swarm.consensus.records import CloseRecord
from swarm.errors import Busy, OutOfSync, Refused, Superseded, Violation
from swarm.ids import PeerId
from swarm.schema import Count, DigestField, Message, PartField, PeerIdField, SignatureField

MAX_LEAP = 1 << 16
"""How far beyond the term that it knows a member follows a leader. Honest leaders climb by a few terms at a time; one
that could name any would have all others run out of the numbers that their questions are counted with."""


class RecordEvidence(Message):
    """What bears out a record that has results, no matter who shows it, and in whichever term: the signatures of
    trainers under their ``rows``, and of replicas under their ``results`` in the part's attempt with that number of
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


Told = Mapping[PeerId, tuple[tuple[int, str] | None, int]]
"""What electors have told: the term and hash of what each accepted last, and the term that it calls free."""


def newest(told: Told, electors: Collection[PeerId], unknown: Collection[PeerId]) -> tuple[int, str] | None:
    """Return the record that the leader of a term must propose, after what a majority told: the one that was accepted
    in the highest term of those that may have been decided, unless a later term was free. None: it may propose its own.

    One elector may lie: that a term was free counts where two say so, and what cannot have been decided counts only
    where nothing can. Both are safe: to propose what was accepted by too few harms nobody.
    """
    claims = sorted((free for _, free in told.values()), reverse=True)
    hashes = {peer: None if accepted is None else accepted[1] for peer, (accepted, _) in told.items()}
    votes = [accepted for accepted, _ in told.values() if accepted is not None and accepted[0] >= [*claims, 0, 0][1]]
    possible = [one for one in votes if may_be_decided(one[1], hashes, electors, unknown)]
    return max(possible or votes, default=None)


def must_propose(promises: Mapping[PeerId, Promised], electors: Collection[PeerId]) -> Vote | None:
    """Return the vote on the record that the leader of a term must propose, given the promises of a majority of the
    electors: see :func:`newest`. Who has promised nothing may have accepted anything."""
    told = {p: (None if one.vote is None else one.vote.accepted, one.free) for p, one in promises.items()}
    found = newest(told, electors, set(electors) - told.keys())
    return next((one.vote for one in promises.values() if one.vote is not None and one.vote.accepted == found), None)


def may_be_decided(
    digest: str, accepted: Mapping[PeerId, str | None], electors: Collection[PeerId], unknown: Collection[PeerId]
) -> bool:
    """Return whether so many of the electors can have accepted a record, by its hash, that it may be decided: those of
    which that is what they ``accepted`` last, and those of which it is ``unknown``. More than half are enough to say
    so, where one more decides (:func:`~swarm.consensus.majority.majority`): one may hide what it accepted."""
    can = sum(accepted[peer] == digest if peer in accepted else peer in unknown for peer in electors)
    return 2 * can > len(electors)


def has_to_be_proposed(
    vote: tuple[int, str],
    promises: Mapping[PeerId, SignedPromise],
    electors: Collection[PeerId],
    *,
    leader: PeerId,
    gone: Collection[PeerId],
) -> bool:
    """Return whether these promises to follow a term show that the record that is proposed in it, ``vote`` being the
    two, may have been decided in an earlier one: then its ``leader`` must propose it, and anyone who sees them accept
    it.

    Of its own word alone the leader may not make use: another leader can. Nor may it leave out whom it likes: who is
    not ``gone`` here and shows no promise has accepted nothing.
    """
    term, digest = vote
    told = {
        peer: (one.accepted, one.free)
        for peer in electors
        if (one := promises.get(peer)) is not None and (one.accepted is None or one.accepted[0] < term)
    }
    hashes = {peer: None if accepted is None else accepted[1] for peer, (accepted, _) in told.items()}
    found = newest(told, electors, gone)
    return (
        2 * len(told) > len(electors)
        and found is not None
        and found[1] == digest
        and any(one == digest for peer, one in hashes.items() if peer != leader)
        and may_be_decided(digest, hashes, electors, gone)
    )


def has_majority(electors: Collection[PeerId], gone: Container[PeerId]) -> bool:
    """Return whether those of the voters that are not gone could decide."""
    return sum(peer not in gone for peer in electors) >= majority(len(electors))

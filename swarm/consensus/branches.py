"""A lineage: what those do who are cut off for long, before anybody can know whether it counts.

    the fork point     the last record that a majority decided
    the candidate      the record of the step after it, which those who are there closed by themselves
    confirmed          a majority of the fork point's voters has accepted the candidate, when the links are mended:
                       then all after it counts as well, for it was decided by the roster that the candidate names
    given up           they accepted another, or had decided another: the lineage is rewound

A provisional record is no vote. It is kept next to the acceptor of its step, which promises and accepts as any other;
so at most one lineage is ever confirmed, by the same argument by which a step has one record. A leader that Paxos
leaves free proposes the candidate for which most was done. Pure but for :class:`Fork`'s own state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarm.consensus.acceptor import Acceptor, BranchHead, Vote
from swarm.consensus.history import History
from swarm.consensus.records import CloseRecord, Confirmation, check_confirmed, valid_acceptances, voters
from swarm.errors import OutOfSync, Refused, Violation
from swarm.ids import PeerId
from swarm.security.signing import Verify


def best(candidates: Iterable[BranchHead]) -> Vote | None:
    """The candidate for which the most microbatches were committed, as those who made it say; of equals the one with
    the greater hash. Its makers' lower median counts, so that no single one decides."""
    claims: dict[str, list[int]] = {}
    known: dict[str, Vote] = {}
    for one in candidates:
        digest = one.vote.record.hash()
        claims.setdefault(digest, []).append(one.samples)
        known[digest] = one.vote
    if not known:
        return None
    return known[max(known, key=lambda digest: (_lower_median(claims[digest]), digest))]


def _lower_median(values: Collection[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def check_lineage(record: CloseRecord, head: CloseRecord, fork: Fork | None) -> None:
    """Check that a proposed record is of the lineage of the one before it, ``head``, or leaves it with the proof that
    it was confirmed. Raises Refused. Who was not there at the fork cannot judge the proof, and takes it."""
    if record.forks:
        if head.provisional:
            raise Refused("a provisional lineage does not fork again")
        return
    if record.confirmation is None:
        if record.lineage != head.lineage:
            raise Refused(f"a record of lineage {record.lineage} does not follow one of lineage {head.lineage}")
        return
    if not head.provisional or record.provisional:
        raise Refused("it confirms what is not provisional")
    if fork is not None:
        fork.check(record.confirmation)


@dataclass(slots=True)
class Fork:
    """One member's side of a fork: where it was, what it closed by itself, and its vote in the step after.

    ``term`` and ``acceptances`` prove that those who were there closed the candidate; ``closed`` counts microbatches
    committed since; ``confirmation`` proves that they count.
    """

    point: CloseRecord
    acceptor: Acceptor
    candidate: Vote
    me: PeerId
    verify: Verify
    term: int = 0
    acceptances: Mapping[str, bytes] = field(default_factory=dict)
    closed: int = 0
    confirmation: Confirmation | None = None

    @property
    def step(self) -> int:
        """The step after the fork point."""
        return self.point.step + 1

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """The voters that can confirm it."""
        return voters(self.point.members, self.candidate.record.previous)

    @property
    def others(self) -> tuple[PeerId, ...]:
        """Members of the fork point that are not of this lineage."""
        return tuple(PeerId(peer) for peer in self.candidate.record.absent)

    @property
    def ours(self) -> tuple[PeerId, ...]:
        """Members of the fork point that are."""
        return tuple(peer for peer in self.point.members.peers if peer not in self.others)

    def history(self) -> History:
        """A chain that ends at the fork point: what who asks for votes works with."""
        history = History()
        history.begin(self.point)
        return history

    def offer(self) -> BranchHead:
        """The record to propose when Paxos leaves it free."""
        signed = dict(self.acceptances)
        return BranchHead(vote=self.candidate, samples=self.closed, term=self.term, acceptances=signed)

    def accept(self, vote: Vote, *, may_be_decided: bool) -> None:
        """Vote in a later term, on our candidate or another's. That one must have been closed without all of ours,
        unless it ``may_be_decided`` already. Raises Superseded, Refused, Violation."""
        record, ours = vote.record, self.candidate.record
        if record.hash() != ours.hash():
            with_us = set(self.ours) - set(record.absent)
            if self.me in with_us or (with_us and not may_be_decided):
                raise Refused(f"{min(with_us)} is of another lineage")
            try:
                self.history().check(record)
            except OutOfSync as error:
                raise Refused(str(error)) from error
        if record.term >= vote.term:
            raise Violation("a candidate is confirmed in a later term than the one in which it was made")
        self.acceptor.accept(vote)

    def decided(self, digest: str, term: int, acceptances: Mapping[str, bytes]) -> CloseRecord | None:
        """Return the record that a majority decided in this step: None when it is our candidate, which is confirmed by
        that; else the record that it is. Raises Refused for what is not known here or not decided."""
        if digest == self.candidate.record.hash():
            # Others than the voters may have signed it as well, and the one who tells us may have added what he likes.
            votes = valid_acceptances(self.candidate.record, self.voters, acceptances, self.verify, term)
            proof = Confirmation.of(term, votes)
            self.check(proof)
            self.confirmation = proof
            return None
        vote = self.acceptor.vote
        if vote is None or vote.record.hash() != digest:
            raise Refused("this record was not accepted here")
        check_confirmed(vote.record, self.point.members, acceptances, self.verify, term)
        return vote.record

    def check(self, proof: Confirmation) -> None:
        """Raises Refused unless it proves that our candidate was decided."""
        check_confirmed(self.candidate.record, self.point.members, proof.signatures(), self.verify, proof.term)

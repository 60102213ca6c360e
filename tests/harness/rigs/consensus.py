"""The rig of ``swarm.consensus``: a small run's roster and records, requests to join and leave, and a world of votes.

chain = [first := record(), second := record(first, lr=0.25)]
check_acceptances(first, ROSTER, acceptances(first), verify, 0)
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.consensus.acceptor import (
    Acceptor,
    Promised,
    RecordEvidence,
    SignedPromise,
    Vote,
    has_to_be_proposed,
    must_propose,
)
from swarm.consensus.changes import (
    Admission,
    ChangeRules,
    Departure,
    OpenStepFacts,
    RosterRules,
    admission_bytes,
    departure_bytes,
)
from swarm.consensus.faults import HopFault
from swarm.consensus.majority import majority
from swarm.consensus.records import CloseRecord, Contribution, acceptance_bytes, by_trainer, rows_bytes
from swarm.consensus.roster import Member, Roster
from swarm.errors import Superseded
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, stage_part
from swarm.membership.founding_record import genesis
from swarm.step.decisions import ATTEMPTS_PER_TERM, totals
from swarm.step.results import ResultSigning, record_inputs
from tests.harness.rigs.common import RUN as RUN
from tests.harness.rigs.common import sign as sign
from tests.harness.rigs.common import verify as verify

A, B, T = PeerId("A"), PeerId("B"), PeerId("T")
"""Two replicas of a stage, and a trainer."""


def listed(peer: str, role: str = "stage", part: str | None = "stage-0", **more: Any) -> Member:
    """Return a member, by default a stage host without addresses."""
    return Member(**({"peer": peer, "role": role, "name": peer.lower(), "part": part, "addresses": ()} | more))


ROSTER = Roster([listed(A), listed(B), listed(T, "trainer", "ends")])
GENESIS = genesis(RUN, ROSTER, {PartName("stage-0"): "0" * 64, PartName("ends"): "1" * 64})
CURSOR = (0, 7)


def microbatch(position: int) -> MicrobatchId:
    """Return a microbatch of the only trainer."""
    return MicrobatchId(T, "00" * 8, 0, position)


COMMITTED = tuple(
    Contribution(microbatch=microbatch(position), tokens=10 + position, loss_sum=1.5, route=(host,))
    for position, host in enumerate((A, B))
)
FAULTY = HopFault(
    step=1,
    microbatch=microbatch(0),
    attempt=0,
    after="",
    hop=0,
    accused=A,
    told=bytes(32),
    tokens=0,
    receipt=bytes(64),
    statements=(),
)


def weights_digest(name: str, step: int, lr: float, clip: float) -> str:
    """Return what every replica of a fake part arrives at."""
    return hashlib.sha256(f"{name}|{step}|{lr}|{clip}".encode()).hexdigest()


def record(before: CloseRecord = GENESIS, **changes: Any) -> CloseRecord:
    """Return what an honest leader proposes after ``before``, with some fields changed."""
    step = before.step + 1
    tokens, loss_sum = totals(COMMITTED)
    fields: dict[str, Any] = {
        "run": RUN,
        "step": step,
        "committed": COMMITTED,
        "tokens": tokens,
        "loss_sum": loss_sum,
        "grad_norm": math.sqrt(0.5),
        "clip": 1.0,
        "lr": 0.5,
        "norms": {"ends": 0.25, "stage-0": 0.25},
        "digests": {name: weights_digest(name, step, 0.5, 1.0) for name in ("ends", "stage-0")},
        "cursors": {T: CURSOR},
        "roster": ROSTER.members,
        "previous": before.hash(),
    }
    return CloseRecord(**(fields | changes))


def acceptances(accepted: CloseRecord, term: int = 0, signers: Collection[PeerId] = ROSTER.peers) -> dict[str, bytes]:
    """Return what proves that these accepted a record."""
    signed = acceptance_bytes(accepted, term)
    return {peer: sign(peer, signed) for peer in signers}


def signed_rows(proposed: CloseRecord) -> dict[str, bytes]:
    """Return what trainers sign of a record's microbatches."""
    return {
        trainer: sign(trainer, rows_bytes(RUN, proposed.step, proposed.previous, rows, proposed.absent))
        for trainer, rows in by_trainer(proposed.committed).items()
    }


def evidence(
    proposed: CloseRecord, roster: Roster = ROSTER, signers: Collection[PeerId] | None = None
) -> RecordEvidence:
    """Return what bears a record out: the rows of all trainers, and the results of all replicas of ``roster`` that
    closed the step, or of ``signers`` only. Nothing, of a record without results."""
    if not proposed.committed:
        return RecordEvidence()
    signing, inputs = ResultSigning(RUN, proposed.step, proposed.previous), record_inputs(roster, proposed)
    attempt = proposed.term * ATTEMPTS_PER_TERM + 1
    results = {
        peer: sign(peer, signing.data(part, attempt, "weights", inputs, proposed.digests.get(part, "")))
        for part in roster.parts
        for peer in roster.replicas(part)
        if (signers is None or peer in signers) and peer not in {*proposed.absent, *proposed.late}
    }
    return RecordEvidence(rows=signed_rows(proposed), results=results, attempts=dict.fromkeys(roster.parts, attempt))


def voted(term: int, accepted: CloseRecord, roster: Roster = ROSTER) -> Vote:
    """Return a vote of a term, with what bears the record out."""
    return Vote(term=term, record=accepted, evidence=evidence(accepted, roster))


# --- who joins and who leaves ----------------------------------------------------------------------------------------

PARTS = (stage_part(0), stage_part(1), ENDS)
STEP, BEFORE = 5, "ab" * 32
"""The open step, and the record before it."""
SEVEN = Roster(
    [
        listed("A1"),
        listed("A2"),
        listed("B1", part="stage-1"),
        listed("B2", part="stage-1"),
        listed("F", "bootstrap", None),
        listed("T1", "trainer", "ends"),
        listed("T2", "trainer", "ends"),
    ]
)
NOW = OpenStepFacts(STEP, SEVEN, BEFORE)
CHANGE_RULES = ChangeRules(RosterRules(RUN, 9), verify)


def admission(who: Member, *, step: int = STEP, previous: str = BEFORE, signer: str | None = None) -> Admission:
    """Return a peer's request to join, signed by itself or by ``signer``."""
    signed = admission_bytes(RUN, step, previous, who)
    return Admission(step=step, member=who, signature=sign(PeerId(signer or who.peer), signed))


def departure(
    peer: str, *, step: int = STEP, previous: str = BEFORE, signer: str | None = None, ends: bool = False
) -> Departure:
    """Return a member's request to leave, signed by itself or by ``signer``."""
    signed = departure_bytes(RUN, step, previous, peer, ends=ends)
    return Departure(step=step, peer=peer, ends=ends, signature=sign(PeerId(signer or peer), signed))


# --- votes -----------------------------------------------------------------------------------------------------------

VOTERS = 5
RECORDS = [record(term=term) for term in range(9)]
"""What the leader of each term proposes."""


def vote(term: int, proposed: int | None = None) -> Vote:
    """Return a record accepted in ``term`` that was proposed first in ``proposed``."""
    return Vote(term=term, record=RECORDS[term if proposed is None else proposed])


@dataclass
class TermLeader:
    """The leader of one term, as :mod:`swarm.step.leader.close` does it: promises, maybe work, one proposal."""

    term: int
    promises: dict[int, Promised] = field(default_factory=dict)
    proposal: Vote | None = None
    anew: bool = False

    def promised(self, voter: int, promise: Promised) -> None:
        """Take a promise. The first majority settles what is proposed; term 0 needs none."""
        self.promises[voter] = promise
        if self.proposal is None and not self.anew and len(self.promises) >= majority(VOTERS):
            told = {PeerId(f"{voter}"): promise for voter, promise in self.promises.items()}
            self.begin(must_propose(told, [PeerId(f"{voter}") for voter in range(VOTERS)]))

    def begin(self, found: Vote | None) -> None:
        """Propose what was found, or work anew."""
        self.anew = found is None
        if found is not None:
            self.proposal = Vote(term=self.term, record=found.record)


voters = st.integers(0, VOTERS - 1)


terms = st.integers(0, len(RECORDS) - 1)


class Ballots(RuleBasedStateMachine):
    """Each message goes into one bag, from which it is delivered late, twice, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.acceptors = [Acceptor() for _ in range(VOTERS)]
        self.leaders = [TermLeader(term) for term in range(len(RECORDS))]
        self.leaders[0].begin(None)
        self.mail: list[Callable[[], None]] = []
        self.accepted: dict[tuple[int, str], set[int]] = defaultdict(set)

    # --- leaders -----------------------------------------------------------------------------------------------------

    @rule(term=terms, to=st.sets(voters, min_size=1))
    def prepare(self, term: int, to: set[int]) -> None:
        """Ask these for a promise, for the leader of a term."""
        for voter in to:
            self.mail.append(lambda voter=voter: self.on_prepare(term, voter))  # type: ignore[misc]

    @rule(term=terms, to=st.sets(voters, min_size=1))
    def close_anew(self, term: int, to: set[int]) -> None:
        """Ask these to work for the leader of a term, which then has a record of its own."""
        leader = self.leaders[term]
        if leader.anew:
            leader.proposal = leader.proposal or vote(term)
            for voter in to:
                self.mail.append(lambda voter=voter: self.on_reconcile(term, voter))  # type: ignore[misc]

    @rule(term=terms, to=st.sets(voters, min_size=1))
    def propose(self, term: int, to: set[int]) -> None:
        """Propose to these, for the leader of a term."""
        proposal = self.leaders[term].proposal
        if proposal is not None:
            for voter in to:
                self.mail.append(lambda voter=voter: self.on_propose(proposal, voter))  # type: ignore[misc]

    @rule(term=terms, quorum=st.sets(voters, min_size=3))
    def lead(self, term: int, quorum: set[int]) -> None:
        """Let all go well with these in a term, at once: so that decisions are made at all."""
        for voter in quorum:
            self.on_prepare(term, voter)
        leader = self.leaders[term]
        if leader.anew:
            leader.proposal = leader.proposal or vote(term)
            for voter in quorum:
                self.on_reconcile(term, voter)
        if leader.proposal is not None:
            for voter in quorum:
                self.on_propose(leader.proposal, voter)

    # --- the network -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 999), again=st.booleans())
    def deliver(self, choice: int, again: bool) -> None:
        """Deliver a message, which may arrive ``again``."""
        message = self.mail[choice % len(self.mail)]
        if not again:
            self.mail.remove(message)
        message()

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 999))
    def lose(self, choice: int) -> None:
        """Lose a message."""
        del self.mail[choice % len(self.mail)]

    # --- voters ------------------------------------------------------------------------------------------------------

    def on_prepare(self, term: int, voter: int) -> None:
        """Ask a voter for a promise."""
        acceptor = self.acceptors[voter]
        try:
            acceptor.follow(term)
        except Superseded:
            return
        promise = Promised(acceptor.vote, acceptor.free)
        answer = lambda: self.leaders[term].promised(voter, promise)  # noqa: E731 - it travels as the questions do
        answer() if voter % 2 else self.mail.append(answer)

    def on_reconcile(self, term: int, voter: int) -> None:
        """Ask a voter to work for a leader."""
        try:
            self.acceptors[voter].follow(term)
        except Superseded:
            return
        self.acceptors[voter].begun_free(term)

    def on_propose(self, proposal: Vote, voter: int) -> None:
        """Ask a voter to accept."""
        try:
            self.acceptors[voter].accept(proposal)
        except Superseded:
            return
        self.accepted[proposal.term, proposal.record.hash()].add(voter)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @property
    def decided(self) -> set[str]:
        """Return the hashes of the records that a majority has accepted in one term."""
        return {digest for (_, digest), by in self.accepted.items() if len(by) >= majority(VOTERS)}

    @invariant()
    def one_record_at_most_is_decided(self) -> None:
        """Check that a majority has accepted one record only."""
        assert len(self.decided) <= 1

    @invariant()
    def later_leaders_propose_what_was_decided(self) -> None:
        """Check that leaders after a decision propose nothing else."""
        done = [(term, digest) for (term, digest), by in self.accepted.items() if len(by) >= majority(VOTERS)]
        first, decided = min(done, default=(len(RECORDS), ""))
        leading = [one for one in self.leaders[first + 1 :] if one.proposal is not None]
        assert {one.proposal.record.hash() for one in leading if one.proposal is not None} <= {decided}
        for one in leading:
            self.check_shown(one, decided)

    def check_shown(self, leader: TermLeader, decided: str) -> None:
        """Check that anyone who sees a leader's promises accepts what was decided, whatever he knows otherwise, but
        where only the leader itself has accepted it: then the others' promises show it to the leader of another
        term."""
        promises = {
            PeerId(f"{voter}"): SignedPromise(
                accepted=None if one.vote is None else one.vote.accepted, free=one.free, signature=bytes(64)
            )
            for voter, one in leader.promises.items()
        }
        electors, me = [PeerId(f"{voter}") for voter in range(VOTERS)], PeerId(f"{leader.term % VOTERS}")
        accepted = {peer for peer, one in promises.items() if one.accepted and one.accepted[1] == decided}
        vote, others = (leader.term, decided), [peer for peer in electors if peer != me]
        assert has_to_be_proposed(vote, promises, electors, leader=me, gone=electors) is (accepted != {me})
        if accepted == {me}:
            assert has_to_be_proposed(vote, promises, electors, leader=others[0], gone=electors)

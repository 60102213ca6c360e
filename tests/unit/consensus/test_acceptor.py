"""Votes: whatever is lost, repeated, late or out of order, and whoever leads, one record at most is decided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.consensus.acceptor import MAX_LEAP, Acceptor, Promised, Vote, check_promise, majority, must_propose
from swarm.consensus.history import History
from swarm.errors import Busy, Refused, Superseded, Violation
from tests.unit.step.world import GENESIS, record

VOTERS = 5
OFFERED = Vote(term=2, record=record(term=2, lineage=1))
RECORDS = [record(term=term) for term in range(9)]


def vote(term: int, proposed: int | None = None) -> Vote:
    """A record accepted in ``term`` that was proposed first in ``proposed``."""
    return Vote(term=term, record=RECORDS[term if proposed is None else proposed])


def test_majority_is_more_than_half() -> None:
    assert [majority(voters) for voters in (1, 2, 3, 4, 5, 11)] == [1, 2, 2, 3, 3, 6]


def test_acceptor_follows_the_highest_term_only() -> None:
    acceptor = Acceptor()
    assert not acceptor.follow(0)
    assert acceptor.follow(2)
    assert not acceptor.follow(2)
    for late in (lambda: acceptor.follow(1), lambda: acceptor.accept(vote(1))):
        with pytest.raises(Superseded, match="term 2 has begun"):
            late()
    assert (acceptor.term, acceptor.vote) == (2, None)


def test_acceptor_follows_no_term_that_is_out_of_reach() -> None:
    acceptor = Acceptor(term=7)
    for beyond in (8 + MAX_LEAP, 1 << 52):
        with pytest.raises(Busy, match="out of reach"):
            acceptor.follow(beyond)
    assert acceptor.term == 7
    assert acceptor.follow(7 + MAX_LEAP)


def test_acceptor_accepts_one_record_a_term_and_another_in_the_next() -> None:
    acceptor = Acceptor()
    acceptor.accept(vote(1))
    acceptor.accept(vote(1))
    with pytest.raises(Refused, match="another record was accepted in term 1"):
        acceptor.accept(vote(1, proposed=0))
    acceptor.accept(vote(3, proposed=0))
    assert acceptor.vote == vote(3, proposed=0)


def test_acceptor_that_accepts_follows() -> None:
    acceptor = Acceptor()
    acceptor.accept(vote(4))
    assert acceptor.term == 4


@pytest.mark.parametrize(
    ("untrue", "words"),
    [
        (Promised(None, 4), "term 4 was free"),
        (Promised(vote(4), 0), "a vote of term 4"),
        (Promised(vote(2, proposed=3), 0), "a vote of term 2"),
        (Promised(Vote(term=2, record=record(previous="f" * 64)), 0), "cannot close the step"),
        (Promised(Vote(term=2, record=record(step=7)), 0), "cannot close the step"),
        (Promised(Vote(term=2, record=record(run="cd" * 32)), 0), "cannot close the step"),
        (Promised(None, 0, vote(2)), "does not begin a lineage"),
        (Promised(None, 0, Vote(term=4, record=record(term=4, lineage=1))), "a vote of term 4"),
        (Promised(None, 0, Vote(term=2, record=record(lineage=1, previous="f" * 64))), "cannot close the step"),
    ],
)
def test_promise_that_no_honest_member_makes_is_a_violation(untrue: Promised, words: str) -> None:
    history = History()
    history.append(GENESIS)
    for honest in (Promised(None, 0), Promised(None, 3), Promised(vote(3, proposed=1), 2), Promised(None, 0, OFFERED)):
        check_promise(honest, 4, history.check)
    with pytest.raises(Violation, match=words):
        check_promise(untrue, 4, history.check)


def test_acceptor_remembers_the_highest_free_term() -> None:
    acceptor = Acceptor()
    for term in (3, 1):
        acceptor.begun_free(term)
    assert acceptor.free == 3


@pytest.mark.parametrize(
    ("promises", "chosen"),
    [
        ([], None),
        ([(None, 0), (None, 0)], None),
        ([(vote(0), 0), (None, 0)], vote(0)),
        ([(vote(1), 0), (vote(3, proposed=0), 0), (vote(2), 0)], vote(3, proposed=0)),
        ([(vote(1), 0), (None, 2)], None),
        ([(vote(2), 0), (None, 2)], vote(2)),
        ([(vote(1), 2), (vote(3), 0)], vote(3)),
    ],
)
def test_leader_proposes_what_was_accepted_last_unless_a_later_term_was_free(
    promises: list[tuple[Vote | None, int]], chosen: Vote | None
) -> None:
    assert must_propose([Promised(*promise) for promise in promises]) == chosen


@dataclass
class Leader:
    """The leader of one term, as :mod:`swarm.step.leader.close` does it: promises, maybe work, one proposal."""

    term: int
    promises: dict[int, Promised] = field(default_factory=dict)
    proposal: Vote | None = None
    anew: bool = False

    def promised(self, voter: int, promise: Promised) -> None:
        """What it proposes is settled by the first majority that promises; term 0 needs none."""
        self.promises[voter] = promise
        if self.proposal is None and not self.anew and len(self.promises) >= majority(VOTERS):
            self.begin(must_propose(list(self.promises.values())))

    def begin(self, found: Vote | None) -> None:
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
        self.leaders = [Leader(term) for term in range(len(RECORDS))]
        self.leaders[0].begin(None)
        self.mail: list[Callable[[], None]] = []
        self.accepted: dict[tuple[int, str], set[int]] = defaultdict(set)

    # --- leaders -----------------------------------------------------------------------------------------------------

    @rule(term=terms, to=st.sets(voters, min_size=1))
    def prepare(self, term: int, to: set[int]) -> None:
        for voter in to:
            self.mail.append(lambda voter=voter: self.on_prepare(term, voter))  # type: ignore[misc]

    @rule(term=terms, to=st.sets(voters, min_size=1))
    def close_anew(self, term: int, to: set[int]) -> None:
        """What the reconcile question does, and then the leader has a record of its own."""
        leader = self.leaders[term]
        if leader.anew:
            leader.proposal = leader.proposal or vote(term)
            for voter in to:
                self.mail.append(lambda voter=voter: self.on_reconcile(term, voter))  # type: ignore[misc]

    @rule(term=terms, to=st.sets(voters, min_size=1))
    def propose(self, term: int, to: set[int]) -> None:
        proposal = self.leaders[term].proposal
        if proposal is not None:
            for voter in to:
                self.mail.append(lambda voter=voter: self.on_propose(proposal, voter))  # type: ignore[misc]

    @rule(term=terms, quorum=st.sets(voters, min_size=3))
    def lead(self, term: int, quorum: set[int]) -> None:
        """A term in which all goes well with these, at once: so that decisions are made at all."""
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
        message = self.mail[choice % len(self.mail)]
        if not again:
            self.mail.remove(message)
        message()

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 999))
    def lose(self, choice: int) -> None:
        del self.mail[choice % len(self.mail)]

    # --- voters ------------------------------------------------------------------------------------------------------

    def on_prepare(self, term: int, voter: int) -> None:
        acceptor = self.acceptors[voter]
        try:
            acceptor.follow(term)
        except Superseded:
            return
        promise = Promised(acceptor.vote, acceptor.free)
        answer = lambda: self.leaders[term].promised(voter, promise)  # noqa: E731 - it travels as the questions do
        answer() if voter % 2 else self.mail.append(answer)

    def on_reconcile(self, term: int, voter: int) -> None:
        try:
            self.acceptors[voter].follow(term)
        except Superseded:
            return
        self.acceptors[voter].begun_free(term)

    def on_propose(self, proposal: Vote, voter: int) -> None:
        try:
            self.acceptors[voter].accept(proposal)
        except Superseded:
            return
        self.accepted[proposal.term, proposal.record.hash()].add(voter)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @property
    def decided(self) -> set[str]:
        return {digest for (_, digest), by in self.accepted.items() if len(by) >= majority(VOTERS)}

    @invariant()
    def one_record_at_most_is_decided(self) -> None:
        assert len(self.decided) <= 1

    @invariant()
    def later_leaders_propose_what_was_decided(self) -> None:
        done = [(term, digest) for (term, digest), by in self.accepted.items() if len(by) >= majority(VOTERS)]
        first, decided = min(done, default=(len(RECORDS), ""))
        later = {one.proposal.record.hash() for one in self.leaders[first + 1 :] if one.proposal is not None}
        assert later <= {decided}


class BlindBallots(Ballots):
    """Leaders that ignore what they were promised: the same world must catch them."""

    def on_prepare(self, term: int, voter: int) -> None:
        self.leaders[term].anew = True


TestBallots = Ballots.TestCase
TestBallots.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_world_of_the_ballots_notices_two_decisions() -> None:
    world = BlindBallots()
    world.lead(1, {0, 1, 2})
    world.one_record_at_most_is_decided()
    world.lead(2, {2, 3, 4})
    with pytest.raises(AssertionError):
        world.one_record_at_most_is_decided()
    with pytest.raises(AssertionError):
        world.later_leaders_propose_what_was_decided()

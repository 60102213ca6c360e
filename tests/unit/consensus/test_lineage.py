"""At most one lineage is ever confirmed, and it is the one for which most was done where that is free to choose."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.consensus.acceptor import Acceptor, BranchHead, Promised, Vote, must_propose
from swarm.consensus.ballot import Incarnation, VoteFile
from swarm.consensus.branches import Fork, best, check_lineage
from swarm.consensus.changes import Changes
from swarm.consensus.majority import majority
from swarm.consensus.records import (
    CloseRecord,
    Confirmation,
    Decision,
    check_acceptances,
    check_confirmed,
)
from swarm.consensus.roster import Roster, owner
from swarm.errors import Busy, Refused, Superseded, Violation
from swarm.ids import PeerId
from swarm.step.member.open_step import Mean, OpenStep
from swarm.step.messages import Propose
from tests.harness.rigs.consensus import COMMITTED, GENESIS, ROSTER, A, B, T, acceptances, record, verify
from tests.harness.rigs.step import MemberBench, reconcile

ALONE = Roster([ROSTER[T]])


def forked(*absent: PeerId, term: int = 1, **more: object) -> CloseRecord:
    """What those that are there close by themselves."""
    there = tuple(member for member in ROSTER.members if member.peer not in absent)
    return record(lineage=1, term=term, absent=tuple(sorted(absent)), roster=there, **more)


def fork(me: PeerId = T, candidate: CloseRecord | None = None) -> Fork:
    """A member that closed a step without two of three."""
    return Fork(GENESIS, Acceptor(term=1), Vote(term=1, record=candidate or forked(A, B)), me, verify)


# --- the pure rules --------------------------------------------------------------------------------------------------


def test_best_candidate_is_the_one_for_which_most_was_done() -> None:
    small, large = Vote(term=3, record=forked(A, B)), Vote(term=1, record=forked(T, B))
    offers = [BranchHead(vote=small, samples=12), BranchHead(vote=large, samples=18)]
    assert best(offers) == large
    assert best([]) is None
    overclaim = BranchHead(vote=small, samples=10**6)
    assert best([*offers, overclaim]) == large, "one of two cannot make it more alone"
    even = [BranchHead(vote=small, samples=12), BranchHead(vote=large, samples=12)]
    assert best(even) == best(even[::-1]) == max((small, large), key=lambda vote: vote.record.hash())


def test_record_that_begins_a_lineage_needs_those_who_were_there_and_a_majority_to_count() -> None:
    first = forked(A, B)
    assert first.forks
    assert first.provisional
    few = acceptances(first, 1, [T])
    check_acceptances(first, ROSTER, few, verify, 1)
    with pytest.raises(Refused, match="1 of 3 voters"):
        check_confirmed(first, ROSTER, few, verify, 1)
    check_confirmed(first, ROSTER, acceptances(first, 5, [T, A]), verify, 5)
    with pytest.raises(Refused, match="that is no vote"):
        check_confirmed(first, ROSTER, acceptances(first, 1, [T, A]), verify, 1)


def test_lineage_is_left_only_with_the_proof_that_it_was_confirmed() -> None:
    mine = fork()
    first = mine.candidate.record
    second = record(first, lineage=1)
    check_lineage(second, first, mine)
    with pytest.raises(Refused, match="a record of lineage 0 does not follow"):
        check_lineage(record(first), first, mine)
    with pytest.raises(Refused, match="does not fork again"):
        check_lineage(record(first, lineage=2), first, mine)
    proof = Confirmation.of(5, acceptances(first, 5, [T, B]))
    check_lineage(record(first, confirmation=proof), first, mine)
    with pytest.raises(Refused, match="1 of 3"):
        check_lineage(record(first, confirmation=Confirmation.of(5, acceptances(first, 5, [T]))), first, mine)
    with pytest.raises(Refused, match="not provisional"):
        check_lineage(record(confirmation=proof), GENESIS, None)


async def test_nobody_averages_alone_or_says_that_it_did_who_sees_a_majority() -> None:
    """So what replicas sign under the results of a record without a majority says that they saw none."""
    bench = MemberBench(me=T)
    alone = reconcile().model_copy(update={"provisional": True})
    bench.gone |= {A: "silent"}
    with pytest.raises(Refused, match="a majority is there"):
        await bench.ask(alone)
    earlier = forked(A, term=0)
    changes = Changes(absent=(A,))
    with pytest.raises(Refused, match="not closed without a majority by this member"):
        await bench.ask(Propose(record=earlier, changes=changes, term=1))
    bench.gone |= {B: "silent"}
    await bench.ask(alone.model_copy(update={"term": 1, "attempts": {"ends": 1025, "stage-0": 1025}}))
    assert len(bench.average.begun) == 1


def test_member_of_a_lineage_votes_for_its_own_or_for_one_that_leaves_it_out() -> None:
    mine, other = fork(), forked(T, term=2)
    for wrong in (forked(B, term=2), forked(T, term=2, previous="ab" * 32)):
        with pytest.raises(Refused):
            mine.accept(Vote(term=4, record=wrong), may_be_decided=True)
    with pytest.raises(Violation):
        mine.accept(Vote(term=2, record=other), may_be_decided=False)
    mine.accept(Vote(term=4, record=other), may_be_decided=False)
    with pytest.raises(Superseded):
        mine.accept(Vote(term=3, record=mine.candidate.record), may_be_decided=False)
    assert mine.decided(other.hash(), 4, acceptances(other, 4, [A, B])) == other
    with pytest.raises(Refused):
        mine.decided(other.hash(), 4, acceptances(other, 4, [A]))


def test_member_of_a_lineage_votes_for_none_that_counts_on_another_of_it_unless_it_may_be_decided() -> None:
    mine, other = fork(candidate=forked(B)), forked(T, term=2)
    with pytest.raises(Refused, match="A is of another lineage"):
        mine.accept(Vote(term=4, record=other), may_be_decided=False)
    mine.accept(Vote(term=4, record=other), may_be_decided=True)


def test_member_whose_candidate_a_majority_accepts_keeps_the_proof() -> None:
    mine = fork()
    digest = mine.candidate.record.hash()
    with pytest.raises(Refused):
        mine.decided(digest, 1, acceptances(mine.candidate.record, 1, [T]))
    assert mine.confirmation is None
    assert mine.decided(digest, 4, acceptances(mine.candidate.record, 4, [T, A])) is None
    assert mine.confirmation is not None


def test_proof_of_many_members_keeps_the_voters_signatures() -> None:
    crowd = Roster(ROSTER[T].model_copy(update={"peer": f"P{number}"}) for number in range(10, 80))
    point = GENESIS.model_copy(update={"roster": crowd.members})
    first = record(point, lineage=1, term=1, absent=crowd.peers[1:], roster=crowd.members[:1])
    mine = Fork(point, Acceptor(term=1), Vote(term=1, record=first), crowd.peers[0], verify)
    signed = acceptances(first, 4, crowd.peers)
    forged = {mine.voters[0]: bytes(64), "Ev1": bytes(64)}
    assert mine.decided(first.hash(), 4, signed | forged) is None
    assert mine.confirmation is not None
    assert mine.confirmation.signatures() == {peer: signed[peer] for peer in mine.voters[1:]}
    mine.check(mine.confirmation)


# --- a model of one step ---------------------------------------------------------------------------------------------

VOTERS = [PeerId(f"v{number}") for number in range(5)]


@dataclass
class Voter:
    """One voter of the step after the fork point."""

    acceptor: Acceptor = field(default_factory=Acceptor)
    offers: BranchHead | None = None


class Step:
    """Leaders that come and go, whose questions and answers get lost or late, among voters of whom some went on alone.

    ``chosen`` are the records that a majority has accepted in one term, by their loss, which tells them apart.
    """

    def __init__(self) -> None:
        self.voters = {peer: Voter() for peer in VOTERS}
        self.accepted: dict[tuple[int, float], set[PeerId]] = {}
        self.proposals: list[tuple[int, CloseRecord]] = []
        self.chosen: set[float] = set()
        self.alone: set[PeerId] = set()
        self.term = 0

    def go_on_alone(self, who: set[PeerId], samples: int) -> None:
        """A minority closes the step by itself: no vote, no promise that counts."""
        there = who - self.alone
        if not there or len(there) >= majority(len(VOTERS)):
            return
        self.term += 1
        candidate = record(lineage=1, term=self.term, loss_sum=float(self.term))
        for peer in there:
            self.voters[peer].acceptor.follow(max(self.term, self.voters[peer].acceptor.term))
            self.voters[peer].offers = BranchHead(vote=Vote(term=self.term, record=candidate), samples=samples)
        self.alone |= there

    def lead(self, promising: set[PeerId]) -> None:
        """A leader of a new term asks for promises, and with a majority's proposes as :meth:`StepClose.close` does."""
        self.term += 1
        given = []
        for peer in promising:
            self.voters[peer].acceptor.follow(self.term)
            given.append(self.voters[peer])
        if len(given) < majority(len(VOTERS)):
            return
        told = {
            peer: Promised(one.acceptor.vote, one.acceptor.free) for peer, one in self.voters.items() if one in given
        }
        vote = must_propose(told, VOTERS)
        vote = vote or best(voter.offers for voter in given if voter.offers is not None)
        if vote is not None:
            self.proposals.append((self.term, vote.record))
            return
        self.proposals.append((self.term, record(term=self.term, loss_sum=float(self.term))))
        for voter in given:
            voter.acceptor.begun_free(self.term)

    def propose(self, which: int, accepting: set[PeerId]) -> None:
        """Some hear one of the proposals so far, however late: 0 is the newest."""
        if not self.proposals:
            return
        term, proposed = self.proposals[-1 - which % len(self.proposals)]
        for peer in accepting:
            voter = self.voters[peer]
            own = voter.offers is not None and voter.offers.vote.record is proposed
            if peer in self.alone and not own and not proposed.forks:
                continue  # it holds no result of this step any more: only candidates are asked of it
            try:
                voter.acceptor.accept(Vote(term=term, record=proposed))
            except Superseded:
                continue
            by = self.accepted.setdefault((term, proposed.loss_sum), set())
            by.add(peer)
            if len(by) >= majority(len(VOTERS)):
                self.chosen.add(proposed.loss_sum)


SOME = st.sets(st.sampled_from(VOTERS), min_size=2)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("alone"), SOME, st.integers(1, 40)),
        st.tuples(st.just("lead"), SOME, st.just(0)),
        st.tuples(st.just("propose"), SOME, st.integers(0, 2)),
    ),
    max_size=14,
)


@settings(max_examples=200, deadline=None)
@given(MOVES)
def test_at_most_one_lineage_is_ever_confirmed(moves: list[tuple[str, set[PeerId], int]]) -> None:
    step = Step()
    for what, who, number in moves:
        if what == "alone":
            step.go_on_alone(who, number)
        elif what == "lead":
            step.lead(who)
        else:
            step.propose(number, who)
        assert len(step.chosen) <= 1


def test_model_confirms_what_it_should() -> None:
    """The larger of two lineages, and nothing that a majority decided before is forgotten."""
    step = Step()
    step.go_on_alone({VOTERS[0], VOTERS[1]}, 6)
    step.go_on_alone({VOTERS[2], VOTERS[3]}, 9)
    step.lead(set(VOTERS))
    step.propose(0, set(VOTERS))
    larger = step.voters[VOTERS[2]].offers
    assert larger is not None
    assert step.chosen == {larger.vote.record.loss_sum}
    step.lead(set(VOTERS[:3]))
    step.propose(0, set(VOTERS))
    assert len(step.chosen) == 1


# --- giving it up ----------------------------------------------------------------------------------------------------


async def in_a_lineage() -> tuple[MemberBench, CloseRecord]:
    """T went on provisionally after the genesis. With the record that it went on with."""
    candidate = forked(A, B)
    bench = MemberBench(me=T)
    state = OpenStep(Incarnation(T).ballot(GENESIS))
    await state.accept(Vote(term=1, record=candidate), T)
    bench.history.append(candidate)
    await bench.position.forking.closed(Decision(candidate, {}, term=1), GENESIS, state)
    return bench, candidate


async def test_member_told_that_its_lineage_does_not_count_gives_it_up_whoever_hangs_up_meanwhile() -> None:
    bench, candidate = await in_a_lineage()
    gate = asyncio.Event()
    bench.position.open.averaging = asyncio.create_task(_stubborn(gate))
    await asyncio.sleep(0)
    giving_up = [asyncio.create_task(bench.member.rewind("another was decided", None)) for _ in range(2)]
    await asyncio.sleep(0)
    giving_up[0].cancel()
    await asyncio.sleep(0)
    assert (bench.history.head, bench.position.cut_off) == (candidate, ""), "all of it or nothing"
    gate.set()
    await asyncio.gather(*giving_up, return_exceptions=True)
    assert (bench.history.head, bench.position.open_step, bench.position.forking.fork) == (GENESIS, 1, None)
    assert "do not count: another was decided" in bench.position.cut_off
    await bench.member.rewind("it was decided again", None)
    assert "another was decided" in bench.position.cut_off


async def test_member_whose_disk_refuses_to_give_its_lineage_up_goes_on_in_it_and_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, candidate = await in_a_lineage()
    await bench.member._open_next(candidate)
    with monkeypatch.context() as patch:
        patch.setattr(bench.history, "rewind", _refuse)
        with pytest.raises(OSError, match="read-only"):
            await bench.member.rewind("another was decided", None)
    assert (bench.history.head, bench.position.open_step, bench.position.cut_off) == (candidate, 2, "")
    await bench.position.open.ballot.follow(3)
    await bench.member.rewind("another was decided", None)
    assert (bench.history.head, bench.position.open_step) == (GENESIS, 1)


def _refuse(to: CloseRecord) -> None:
    raise OSError("read-only file system")


async def _stubborn(gate: asyncio.Event) -> Mean:
    """A round that takes its time to end."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await gate.wait()


# --- the disk --------------------------------------------------------------------------------------------------------


async def test_later_life_does_not_take_what_lies_there_for_all_that_was_voted(tmp_path: Path) -> None:
    votes, candidate = VoteFile(tmp_path / "vote"), forked(T, B)
    by_b = tuple(one.model_copy(update={"route": (B,)}) for one in COMMITTED)
    bench = MemberBench(me=A, life=Incarnation(A, votes=votes))
    state = OpenStep(Incarnation(A, votes=votes).ballot(GENESIS))
    await state.accept(Vote(term=1, record=candidate), A)
    assert Incarnation(A, 2, votes).inherits(GENESIS), "it has voted for nothing yet"
    await bench.position.forking.closed(Decision(candidate, {}, term=1), GENESIS, state)
    with pytest.raises(Busy, match="closed without a majority"):
        await state.ballot.follow(9)
    other = Propose(record=forked(A, term=2, committed=by_b), changes=Changes(absent=(A,)), term=3)
    assert await bench.ask(other, caller=owner(ROSTER, 1, 3))
    assert not Incarnation(A, 2, votes).inherits(GENESIS)

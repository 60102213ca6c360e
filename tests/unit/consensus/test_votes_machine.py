"""Voters that are killed and started again, with their disk or without: at most one record is decided all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from swarm.consensus.acceptor import Promised, Vote
from swarm.consensus.ballot import Ballot, Incarnation, KeptVote
from swarm.consensus.roster import Roster
from swarm.errors import Busy, Superseded
from swarm.ids import PeerId
from swarm.sim.loop import SimLoop
from tests.harness.rigs.consensus import RECORDS, VOTERS, Ballots, TermLeader, listed, record, voters

PEERS = [PeerId(f"V{number}") for number in range(VOTERS)]
AFTER = record(roster=Roster(listed(peer, name=peer, incarnation=1) for peer in PEERS).members)
"""The record that lets all voters in, in their first lives."""


class Disk:
    """A :class:`swarm.consensus.ballot.VoteFile` in memory."""

    def __init__(self, kept: KeptVote | None = None) -> None:
        self.kept, self.full = kept, False

    def read(self) -> KeptVote | None:
        """See VoteFile."""
        return self.kept

    def write(self, kept: KeptVote) -> None:
        """See VoteFile."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.kept = kept


def before() -> KeptVote:
    """What lies on a voter's disk when the step begins: its vote for the record before."""
    vote = Vote(term=0, record=AFTER)
    return KeptVote(run=AFTER.run, step=1, previous=AFTER.previous, term=0, free=0, vote=vote)


class Lives(Ballots):
    """As :class:`Ballots`, of voters that end at any moment and begin again."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = SimLoop()
        self.disks = [Disk(before()) for _ in range(VOTERS)]
        self.born = [1] * VOTERS
        self.ballots = [self.begun(voter) for voter in range(VOTERS)]

    def begun(self, voter: int) -> Ballot:
        """The vote of a voter's present life."""
        return Incarnation(PEERS[voter], self.born[voter], self.disks[voter]).ballot(AFTER)  # type: ignore[arg-type]

    @rule(voter=voters, keep_disk=st.sampled_from([True, True, True, False]))
    def start_again(self, voter: int, keep_disk: bool) -> None:
        if not keep_disk:
            self.disks[voter] = Disk()
        self.born[voter] += 1
        self.ballots[voter] = self.begun(voter)

    @rule(voter=voters, full=st.booleans())
    def fill_disk(self, voter: int, full: bool) -> None:
        self.disks[voter].full = full

    def answered(self, answer: Coroutine[Any, Any, object]) -> bool:
        """Whether a voter says yes."""
        try:
            self.loop.run_until_complete(answer)
        except (Superseded, Busy):
            return False
        return True

    def on_prepare(self, term: int, voter: int) -> None:
        ballot = self.ballots[voter]
        if self.answered(ballot.follow(term)):
            promise = Promised(ballot.vote, ballot.free)
            answer = lambda: self.leaders[term].promised(voter, promise)  # noqa: E731 - it travels as the questions do
            answer() if voter % 2 else self.mail.append(answer)

    def on_reconcile(self, term: int, voter: int) -> None:
        if self.answered(self.ballots[voter].follow(term)):
            self.ballots[voter].begun_free(term)

    def on_propose(self, proposal: Vote, voter: int) -> None:
        if self.answered(self.ballots[voter].accept(proposal)):
            self.accepted[proposal.term, proposal.record.hash()].add(voter)

    def teardown(self) -> None:
        self.loop.close()


class ForgetfulLives(Lives):
    """Who is started again votes as if nothing had been: the same world must catch it."""

    def begun(self, voter: int) -> Ballot:
        return Ballot()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def led(world: Lives, term: int, quorum: set[int]) -> None:
    """A term with these, until all answers have come."""
    world.lead(term, quorum)
    while world.mail:
        world.mail.pop()()
    world.lead(term, quorum)


def killed_between_two_terms(world: Lives, *, keep_disk: bool) -> TermLeader:
    """A majority decides; one of it is started again, and is asked by the next leader with those who were not asked."""
    led(world, 1, {0, 1, 2})
    assert world.decided == {RECORDS[1].hash()}
    world.start_again(2, keep_disk=keep_disk)
    led(world, 2, {2, 3, 4})
    return world.leaders[2]


@pytest.mark.parametrize("keep_disk", [True, False])
def test_voter_started_again_repeats_its_vote_or_gives_none(keep_disk: bool) -> None:
    world = Lives()
    leader = killed_between_two_terms(world, keep_disk=keep_disk)
    world.one_record_at_most_is_decided()
    if keep_disk:
        assert leader.proposal == Vote(term=2, record=RECORDS[1]), "what was decided is proposed again"
    else:
        assert (leader.proposal, leader.anew) == (None, False), "without it there is no majority"
    world.teardown()


def test_world_of_the_lives_notices_one_that_forgets_its_vote() -> None:
    world = ForgetfulLives()
    killed_between_two_terms(world, keep_disk=True)
    with pytest.raises(AssertionError):
        world.one_record_at_most_is_decided()
    world.teardown()

"""Votes: whatever is lost, repeated, late or out of order, and no matter who leads, one record at most is decided."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, settings

from swarm.consensus.acceptor import (
    MAX_LEAP,
    Acceptor,
    Promised,
    SignedPromise,
    Vote,
    check_promise,
    has_to_be_proposed,
    must_propose,
)
from swarm.consensus.history import History
from swarm.consensus.majority import majority
from swarm.consensus.records import CloseRecord, check_acceptances
from swarm.consensus.roster import Roster
from swarm.errors import Busy, Refused, Violation
from swarm.ids import PeerId
from tests.harness.rigs.consensus import GENESIS, Ballots, acceptances, listed, record, verify, vote

OFFERED = Vote(term=2, record=record(term=2, lineage=1))


def test_majority_is_more_than_half_and_two_of_them_share_two_but_of_three_and_five() -> None:
    assert {voters: majority(voters) for voters in range(1, 12)} == dict(
        zip(range(1, 12), [1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7], strict=True)
    )
    assert [voters for voters in range(2, 12) if 2 * majority(voters) - voters < 2] == [3, 5]
    assert [voters - majority(voters) for voters in range(2, 12)] == [0, 1, 1, 2, 2, 2, 3, 3, 4, 4], "may be away"


def decided(proposed: CloseRecord, roster: Roster, by: Collection[PeerId]) -> bool:
    """Whether those of a roster that accepted a record in term 0 decided it."""
    try:
        check_acceptances(proposed, roster, acceptances(proposed, 0, by), verify)
    except Refused:
        return False
    return True


@pytest.mark.parametrize("number", range(2, 12))
def test_leader_that_says_two_things_has_both_decided_by_three_voters_or_five_only(number: int) -> None:
    """It accepts both itself, and shows each to as many of the others as it likes: each of them accepts one."""
    roster = Roster(listed(f"V{n}") for n in range(number))
    leader, *others = roster.peers
    assert decided(record(), roster, roster.peers)
    both = [
        first
        for first in range(number)
        if decided(record(), roster, [leader, *others[:first]])
        and decided(record(loss_sum=0.0), roster, [leader, *others[first:]])
    ]
    assert bool(both) is (number in (3, 5))


def test_acceptor_follows_no_term_that_is_out_of_reach() -> None:
    acceptor = Acceptor(term=7)
    for beyond in (8 + MAX_LEAP, 1 << 52):
        with pytest.raises(Busy, match="out of reach"):
            acceptor.follow(beyond)
    assert acceptor.term == 7
    assert acceptor.follow(7 + MAX_LEAP)


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
        ([(vote(1), 0), (None, 2), (None, 2)], None),
        ([(vote(1), 0), (None, 2), (None, 0)], vote(1)),  # one may lie
        ([(vote(2), 0), (None, 2), (None, 2)], vote(2)),
        ([(vote(1), 2), (vote(3), 2)], vote(3)),
        ([(vote(1), 0), (vote(1), 0), (vote(3), 0)], vote(1)),  # that of term 3 cannot be decided: one says it
    ],
)
def test_leader_proposes_what_was_accepted_last_of_what_may_be_decided_unless_a_later_term_was_free(
    promises: list[tuple[Vote | None, int]], chosen: Vote | None
) -> None:
    """Of five voters: who is not told of may have accepted anything."""
    electors = [PeerId(peer) for peer in "abcde"]
    told = {peer: Promised(*promise) for peer, promise in zip(electors, promises, strict=False)}
    if len(promises) == 3 and promises[2][0] == vote(3):
        electors = electors[:4]
    assert must_propose(told, electors) == chosen


class BlindBallots(Ballots):
    """Leaders that ignore what they were promised: the same world must catch them."""

    def on_prepare(self, term: int, voter: int) -> None:
        self.leaders[term].anew = True


SHOWN: list[tuple[str, str, bool]] = [
    ("a x b - c -", "a", False),  # the leader's own word
    ("b x c - d -", "a", True),
    ("b x c -", "a", False),  # no majority has promised
    ("b x a - c - d -", "a", False),  # at most two of five can have accepted it
    ("b x c x a - d -", "a", True),
    ("b x c y d -", "a", False),  # another was accepted later
    ("b x c free d free", "a", False),  # a later leader was free
    ("b x c free d -", "a", True),  # one says that it was
    ("b x c late d -", "a", False),  # accepted in no earlier term than this
]


@pytest.mark.parametrize(("told", "leader", "shown"), SHOWN)
def test_promises_show_what_may_be_decided_and_nothing_else(told: str, leader: str, shown: bool) -> None:
    """``x`` was accepted in term 1, ``y`` in term 2."""
    words, hashes = iter(told.split()), {"x": (1, "x" * 64), "y": (2, "y" * 64), "late": (3, "x" * 64)}
    promises = {
        PeerId(peer): SignedPromise.model_construct(
            accepted=hashes.get(said), free=2 if said == "free" else 0, signature=bytes(64)
        )
        for peer, said in zip(words, words, strict=True)
    }
    electors = [PeerId(peer) for peer in "abcde"]
    vote = (3, "x" * 64)
    assert has_to_be_proposed(vote, promises, electors, leader=PeerId(leader), gone=electors) is shown
    assert not has_to_be_proposed(vote, promises, electors, leader=PeerId(leader), gone=()) or told.count("x") == 3


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

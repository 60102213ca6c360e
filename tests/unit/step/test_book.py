"""The book of one step: what becomes of each microbatch, and that two books share nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.consensus.changes import OpenStepFacts
from swarm.consensus.ledger import reassigned
from swarm.consensus.records import NO_RECORD, Contribution
from swarm.consensus.roster import Roster
from swarm.errors import Busy, PeerError, Superseded, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.step.leader.book import MOST_ENDED, StepBook
from swarm.step.messages import ResumeTrainer
from tests.harness.rigs.consensus import FAULTY
from tests.harness.rigs.step import RULES, listed, verify

HOSTS, TRAINERS = [PeerId(name) for name in "ABC"], [PeerId(name) for name in "TUV"]
ROSTER = Roster([*(listed(peer) for peer in HOSTS), *(listed(peer, "trainer", "ends") for peer in TRAINERS)])
SIX = replace(RULES, target=6)


def book(step: int = 1, *, hosted: bool = False) -> StepBook:
    made = StepBook(SIX, verify, OpenStepFacts(step, ROSTER, NO_RECORD), hosted=hosted)
    made.begin_first()
    return made


class Story:
    """Trainers that feed a book, vanish and come back without their work; ``told`` is all that was ever reported."""

    def __init__(self, *, hosted: bool) -> None:
        self.book, self.gone, self.was_gone = book(hosted=hosted), set[PeerId](), set[PeerId]()
        self.told: dict[MicrobatchId, Contribution] = {}
        self.excluded: set[MicrobatchId] = set()
        self._position: defaultdict[PeerId, int] = defaultdict(int)

    def feed(self, trainer: PeerId, host: PeerId) -> None:
        led = self.book.led
        assert led is not None
        done = sum(one.microbatch.trainer == trainer for one in led.ledger.committed())
        if trainer in self.gone or self.book.lease(led, trainer, done + 1).total == done:
            return
        microbatch = MicrobatchId(trainer, "00" * 8, 0, self._position[trainer])
        self._position[trainer] += 1
        one = Contribution(microbatch=microbatch, tokens=10, loss_sum=1.0, route=(host,))
        self.book.complete(led, trainer, one)
        self.told[microbatch] = one

    def vanish(self, trainer: PeerId, host: PeerId) -> None:
        if len(self.gone) < len(TRAINERS) - 1:
            self.gone.add(trainer)
            self.was_gone.add(trainer)
            self.book.count_on(self.gone)

    def return_(self, trainer: PeerId, host: PeerId) -> None:
        if trainer in self.gone and self.book.led is not None:
            self.gone.discard(trainer)
            assert self.book.count_on(self.gone)
            said = ResumeTrainer(step=1, term=0, started=(), aside=())
            assert self.book.resume(self.book.led, trainer, said).kept == 0

    def lose(self, trainer: PeerId, host: PeerId) -> None:
        """Nobody has the first any more of what counts of a trainer that is gone."""
        assert self.book.led is not None
        orphans = [one.microbatch for one in self.book.led.ledger.committed() if one.microbatch.trainer == trainer]
        if trainer in self.gone and orphans:
            self.excluded |= set(self.book.exclude(orphans[:1]))


acts = st.lists(
    st.tuples(
        st.sampled_from(["feed", "feed", "feed", "vanish", "return_", "lose"]),
        st.sampled_from(TRAINERS),
        st.sampled_from(HOSTS),
    ),
    max_size=30,
)


@settings(max_examples=100)
@given(acts=acts, hosted=st.booleans(), dead=st.sampled_from([None, *HOSTS]))
def test_each_microbatch_is_committed_or_replayed_or_withdrawn_or_lost(
    acts: list[tuple[str, PeerId, PeerId]], hosted: bool, dead: PeerId | None
) -> None:
    story = Story(hosted=hosted)
    for act, trainer, host in acts:
        getattr(story, act)(trainer, host)
    for turn in range(6 * len(TRAINERS)):
        story.feed(TRAINERS[turn % len(TRAINERS)], HOSTS[turn % len(HOSTS)])
    assert story.book.full
    assert story.book.led is not None
    live = [peer for peer in HOSTS if peer != dead]
    counted = reassigned(story.book.led.ledger.committed(), [live])
    committed = {one.microbatch for one in counted if one == story.told[one.microbatch]}
    replayed = {one.microbatch for one in counted} - committed
    withdrawn = {one for one in story.told if one not in committed | replayed | story.excluded}
    assert len(counted) == len(committed) + len(replayed) == SIX.target
    fates = (committed, replayed, withdrawn, story.excluded)
    assert sum(map(len, fates)) == len(story.told)
    assert set().union(*fates) == story.told.keys()
    assert all((story.told[one].route == (dead,)) == (one in replayed) for one in committed | replayed)
    assert {one.trainer for one in withdrawn | story.excluded} <= story.was_gone
    assert all(one.route[0] in live for one in counted)


def test_books_of_two_steps_share_nothing() -> None:
    first, second = book(1), book(2)
    assert first.led is not None
    assert second.led is not None
    first.lease(first.led, TRAINERS[0], 4)
    one = Contribution(microbatch=MicrobatchId(TRAINERS[0], "00" * 8, 0, 0), tokens=9, loss_sum=1.0, route=("A",))
    first.complete(first.led, TRAINERS[0], one)
    first.witness.starved.add(TRAINERS[1])
    first.count_on({TRAINERS[2]})
    assert (first.done, second.done) == (1, 0)
    assert second.led.ledger.trainers == tuple(TRAINERS)
    assert second.lease(second.led, TRAINERS[1], 6).total == 4, "one is leased to each of the others by rule"
    assert not second.witness.starved
    first.end_term()
    assert first.led is None
    assert (first.done, first.aside(), first.waits_for(), first.full) == (0, (), (), False)
    assert second.led.ledger.trainers == tuple(TRAINERS)


def test_trainer_that_is_not_counted_on_must_resume() -> None:
    opened = book()
    assert opened.led is not None
    opened.count_on({TRAINERS[0]})
    with pytest.raises(Superseded, match="resume"):
        opened.lease(opened.led, TRAINERS[0], 1)


def test_first_lease_is_had_by_all_and_what_is_not_started_of_it_is_given_back() -> None:
    made = StepBook(replace(RULES, target=12), verify, OpenStepFacts(1, ROSTER, NO_RECORD))
    made.begin_first()
    assert (led := made.led) is not None
    assert [led.ledger.leased(trainer) for trainer in TRAINERS] == [2, 2, 2]
    assert made.lease(led, TRAINERS[0], 12).total == 8
    begun = (MicrobatchId(TRAINERS[1], "00" * 8, 0, 0),)
    assert made.resume(led, TRAINERS[1], ResumeTrainer(step=1, term=0, started=begun, aside=())).kept == 1
    assert made._given_back.is_set(), "others must hear that there is quota again"
    assert made.lease(led, TRAINERS[0], 12).total == 9


def test_trainer_of_whom_nothing_is_taken_hears_why_and_feeds_where_no_other_is_left() -> None:
    first, *others = TRAINERS
    tried = Roster(ROSTER.members, unfed={first: 9})
    made = StepBook(replace(RULES, target=12), verify, OpenStepFacts(1, tried, NO_RECORD))
    made.begin_first()
    assert (led := made.led) is not None
    assert [led.ledger.leased(trainer) for trainer in TRAINERS] == [0, 3, 3]
    refused = made.lease(led, first, 1)
    assert refused.total == 0
    assert "against the others': it feeds again from step 9 on" in refused.reason
    made.count_on(set(others))
    assert made.resume(led, first, ResumeTrainer(step=1, term=0, started=(), aside=())).kept == 0
    assert made.lease(led, first, 12).total == 12


@given(target=st.integers(1, 400), trainers=st.integers(1, 40), share=st.floats(0.0, 1.0), step=st.integers(0, 50))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_first_lease_is_within_every_quota_and_half_of_the_step(
    target: int, trainers: int, share: float, step: int
) -> None:
    names = [PeerId(str(number)) for number in range(trainers)]
    for reproducible in (False, True):
        rules = replace(RULES, target=target, max_share=share, reproducible=reproducible)
        first = rules.first_lease(names)
        assert all(first <= most for most in rules.quota(step, names).values())
        assert 2 * first * trainers <= target < 2 * (first + 1) * trainers


def test_what_proves_an_accused_wrong_takes_the_place_of_what_proves_its_accusers_so_and_is_told_once() -> None:
    made = book()
    accused, accuser = HOSTS[0], HOSTS[1]
    contradicted, proof = (FAULTY.model_copy(update={"accused": accused, "attempt": at}) for at in (0, 1))
    for fault, found, news in (
        (contradicted, (accuser,), True),
        (contradicted, (accuser,), False),
        (proof, (accused,), True),
        (proof, (accused,), False),
        (contradicted, (accuser,), False),
    ):
        made._given_back.clear()
        made.accuse(fault, found)
        assert made._given_back.is_set() is news
    assert made.faults == {accused: (proof, (accused,))}
    assert made.wrong() == {accused: {accused}}


@pytest.mark.parametrize("error", [Superseded, WrongStep])
def test_term_does_not_end_for_ever_by_the_word_of_one(error: type[PeerError]) -> None:
    made, (me, one, another) = book(), HOSTS
    assert not made.ends_term(Busy("later", peer=one), me)
    assert [made.ends_term(error("over", peer=one), me) for _ in range(MOST_ENDED + 1)] == [True] * MOST_ENDED + [False]
    assert made.ends_term(error("over", peer=another), me), "another says so"
    assert all(made.ends_term(error("over", peer=me), me) for _ in range(MOST_ENDED + 1)), "we know it"

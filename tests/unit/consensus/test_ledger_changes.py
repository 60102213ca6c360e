"""The ledger when trainers go and come back: nothing counts twice, nothing is left out, no batch is too large."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.consensus.ledger import Ledger, fixed_quota, free_quota, reassigned
from swarm.consensus.records import ASIDE_BYTES, MAX_ASIDE, Contribution, Quarantined, record_bytes, record_room
from swarm.consensus.roster import Roster
from swarm.errors import Refused, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.network.rpc.bodies import pack
from swarm.step.decisions import cursors
from tests.harness.rigs.consensus import GENESIS

ANN, BEN, CAY = TRAINERS = (PeerId("ann"), PeerId("ben"), PeerId("cay"))
STEP, EPOCH = 7, 6
START = (0, 2)
"""Where every shard goes on in this step, a little before its first epoch ends."""


def microbatch(trainer: PeerId, number: int) -> MicrobatchId:
    """The number-th from the shard's cursor; an epoch has EPOCH positions."""
    at = START[1] + number
    return MicrobatchId(trainer, "0" * 16, at // EPOCH, at % EPOCH)


def contribution(trainer: PeerId, number: int, route: tuple[str, ...] = ("a0",)) -> Contribution:
    return Contribution(microbatch=microbatch(trainer, number), tokens=8, loss_sum=1.5, route=route)


def aside(trainer: PeerId, number: int) -> Quarantined:
    return Quarantined(microbatch=microbatch(trainer, number), reason="no number anywhere")


def ledger(target: int = 4, trainers: tuple[PeerId, ...] = TRAINERS[:2]) -> Ledger:
    return Ledger(STEP, target, free_quota(trainers, target, 1.0))


def fed(target: int, counts: dict[PeerId, int]) -> Ledger:
    """Trainers have leased and completed so many."""
    book = ledger(target)
    for trainer, count in counts.items():
        book.lease(STEP, trainer, count)
        for number in range(count):
            book.complete(STEP, trainer, contribution(trainer, number))
    return book


def counted(book: Ledger) -> list[MicrobatchId]:
    return [one.microbatch for one in book.committed()]


# --- put aside -------------------------------------------------------------------------------------------------------


def test_trainer_that_puts_one_after_the_other_aside_is_stopped_before_no_record_can_hold_them() -> None:
    book, most = ledger(2, tuple(PeerId(f"t{number}") for number in range(512))), MAX_ASIDE // 512
    trainer = PeerId("t0")
    for number in range(most):
        book.lease(STEP, trainer, number + 1)
        assert book.put_aside(STEP, trainer, aside(trainer, number))
    book.lease(STEP, trainer, most + 1)
    with pytest.raises(Refused, match=f"{most} microbatches of yours"):
        book.put_aside(STEP, trainer, aside(trainer, most))
    assert not book.put_aside(STEP, trainer, aside(trainer, 0)), "what is known is told again"
    started = [microbatch(trainer, number) for number in range(most + 2)]
    kept = book.resume(STEP, trainer, started, [aside(trainer, number) for number in range(most + 2)])
    assert (len(book.aside()), kept) == (most, most + 2)


def put_all_aside(book: Ledger, trainer: PeerId) -> None:
    """As much as it may, with ids and reasons as long as they can be."""
    for number in range(MAX_ASIDE + 1):
        at = MicrobatchId(trainer, "f" * 16, 1 << 51, (1 << 51) + number)
        book.put_aside(STEP, trainer, Quarantined(microbatch=at, reason="\U0001f9e8" * 200))


@pytest.mark.parametrize("trainers", [1, 3, 512, record_room(1, 1, MAX_BODY_BYTES)])
def test_all_that_trainers_may_put_aside_is_within_what_a_record_has_room_for(trainers: int) -> None:
    each = [PeerId(f"{number:x>64}") for number in range(trainers)]
    book = Ledger(STEP, 1 << 50, dict.fromkeys(each, 1 << 40))
    for trainer in each:
        book.lease(STEP, trainer, MAX_ASIDE + 1)
        with pytest.raises(Refused, match="put aside already"):
            put_all_aside(book, trainer)
    put = book.aside()
    assert len({one.microbatch.trainer for one in put}) == trainers
    assert len(put) <= MAX_ASIDE
    assert len(pack([one.model_dump() for one in put])) <= len(put) * ASIDE_BYTES
    assert MAX_ASIDE * ASIDE_BYTES < record_bytes(1, 1, trainers) <= MAX_BODY_BYTES


def test_what_trainers_that_are_lost_have_put_aside_leaves_less_room_for_the_others() -> None:
    book, poison = ledger(1 << 20), {ANN: list[Quarantined](), BEN: list[Quarantined]()}
    for trainer, put in poison.items():
        ids = (MicrobatchId(trainer, "0" * 16, 0, number) for number in range(MAX_ASIDE))
        put += [Quarantined(microbatch=one, reason="no number") for one in ids]
    book.lease(STEP, ANN, MAX_ASIDE)
    for one in poison[ANN][: MAX_ASIDE // 2]:
        book.put_aside(STEP, ANN, one)
    book.share({BEN: 1 << 20}, {ANN: (0, 0)})
    book.resume(STEP, BEN, [one.microbatch for one in poison[BEN]], poison[BEN])
    assert Counter(one.microbatch.trainer for one in book.aside()) == {ANN: MAX_ASIDE // 2, BEN: MAX_ASIDE // 2}


def test_microbatch_is_completed_or_put_aside_within_what_is_leased() -> None:
    book = fed(4, {ANN: 1})
    with pytest.raises(Refused, match="was completed"):
        book.put_aside(STEP, ANN, aside(ANN, 0))
    with pytest.raises(Refused, match="no more were leased"):
        book.put_aside(STEP, ANN, aside(ANN, 1))
    with pytest.raises(Refused, match="its own"):
        book.put_aside(STEP, BEN, aside(ANN, 1))
    with pytest.raises(WrongStep):
        book.put_aside(STEP + 1, ANN, aside(ANN, 1))
    book.lease(STEP, ANN, 3)
    book.put_aside(STEP, ANN, aside(ANN, 1))
    with pytest.raises(Refused, match="was put aside"):
        book.complete(STEP, ANN, contribution(ANN, 1))


# --- resuming --------------------------------------------------------------------------------------------------------


def test_trainer_that_resumes_keeps_from_its_first_what_there_is_room_for() -> None:
    book = ledger(4)
    book.lease(STEP, BEN, 3)
    started = [microbatch(ANN, number) for number in range(4)]
    assert book.resume(STEP, ANN, started, [aside(ANN, 1)]) == 2
    assert book.lease(STEP, ANN, 9)[0] == 2
    assert book.resume(STEP, ANN, started, [aside(ANN, 0), aside(ANN, 1), aside(ANN, 3)]) == 4
    assert book.aside() == (aside(ANN, 0), aside(ANN, 1), aside(ANN, 3))
    assert book.lease(STEP, BEN, 9)[0] == 3


def test_trainer_that_resumes_reports_again_what_counted() -> None:
    book = fed(4, {ANN: 2, BEN: 1})
    assert book.resume(STEP, ANN, [microbatch(ANN, number) for number in range(2)], []) == 2
    assert counted(book) == [microbatch(BEN, 0)]
    assert book.complete(STEP, ANN, contribution(ANN, 1))
    with pytest.raises(Refused, match="not counted on"):
        book.resume(STEP, CAY, [], [])
    with pytest.raises(WrongStep):
        book.resume(STEP - 1, ANN, [], [])


# --- sharing anew ----------------------------------------------------------------------------------------------------


def test_what_a_lost_trainer_leased_and_completed_is_fed_by_others() -> None:
    book = fed(4, {ANN: 2, BEN: 1})
    book.share({BEN: 4}, {})
    assert (book.trainers, counted(book)) == ((BEN,), [microbatch(BEN, 0)])
    assert book.lease(STEP, BEN, 9)[0] == 4
    with pytest.raises(Refused, match="not counted on"):
        book.complete(STEP, ANN, contribution(ANN, 0))


def test_what_a_lost_trainer_completed_counts_up_to_its_first_gap_when_others_hold_it() -> None:
    book = ledger(6)
    book.lease(STEP, ANN, 5)
    for number in (0, 2, 4):
        book.complete(STEP, ANN, contribution(ANN, number))
    book.put_aside(STEP, ANN, aside(ANN, 1))
    book.share({BEN: 6}, {ANN: START, BEN: START})
    assert (counted(book), book.aside()) == ([microbatch(ANN, 0), microbatch(ANN, 2)], (aside(ANN, 1),))
    assert book.lease(STEP, BEN, 9)[0] == 4


def test_what_is_kept_ends_with_the_epoch_for_nobody_knows_whether_that_is_a_gap() -> None:
    book = fed(6, {ANN: 6})
    assert microbatch(ANN, 4) == MicrobatchId(ANN, "0" * 16, 1, 0)
    book.share({BEN: 6}, {ANN: START})
    assert counted(book) == [microbatch(ANN, number) for number in range(4)]
    book = fed(6, {ANN: 4})
    book.share({BEN: 6}, {ANN: (0, 1)})
    assert counted(book) == []


def test_witnessed_work_is_inherited_without_gaps_and_as_far_as_there_is_room() -> None:
    book = ledger(4, (BEN,))
    witnessed = [contribution(CAY, 0), *(contribution(ANN, number) for number in (0, 1, 3))]
    book.inherit(ANN, witnessed, START)
    assert counted(book) == [microbatch(ANN, 0), microbatch(ANN, 1)]
    assert book.lease(STEP, BEN, 9)[0] == 2
    book.inherit(CAY, [contribution(CAY, number) for number in range(4)], START)
    assert len(counted(book)) == 2
    assert not book.full


def test_work_that_is_lost_for_good_leaves_room_for_other_work() -> None:
    book = fed(3, {ANN: 2, BEN: 1})
    book.share({BEN: 3}, {ANN: START})
    assert book.full
    assert book.exclude([microbatch(ANN, 1), microbatch(CAY, 0)], {ANN: START}) == (microbatch(ANN, 1),)
    assert not book.full
    assert book.exclude([microbatch(ANN, 1)], {ANN: START}) == ()
    assert book.lease(STEP, BEN, 9)[0] == 2
    book.complete(STEP, BEN, contribution(BEN, 1))
    assert book.full


def test_what_a_lost_trainer_did_after_lost_work_is_left_to_it_too_for_its_cursor_stops_there() -> None:
    book = ledger(4)
    book.lease(STEP, ANN, 4)
    for number in (0, 1, 3):
        book.complete(STEP, ANN, contribution(ANN, number))
    book.put_aside(STEP, ANN, aside(ANN, 2))
    book.share({BEN: 4}, {ANN: START})
    assert book.exclude([microbatch(ANN, 1)], {ANN: START}) == (microbatch(ANN, 1), microbatch(ANN, 3))
    assert (counted(book), book.aside()) == ([microbatch(ANN, 0)], ())
    assert book.lease(STEP, BEN, 9)[0] == 3
    place = tuple(microbatch(ANN, 1))[2:]
    assert cursors(GENESIS, book.committed(), {}, Roster(()), 8)[ANN] == place


def test_report_costs_the_same_however_many_there_were_before() -> None:
    """Who scanned what was reported before would look at its trainers."""
    target = 1 << 12
    looked = Counter[str]()

    class Watched(MicrobatchId):
        @property
        def trainer(self) -> PeerId:  # type: ignore[override]
            looked["at"] += 1
            return ANN

    book = ledger(target, (ANN,))
    book.lease(STEP, ANN, target)
    for number in range(target):
        known = Contribution.model_construct(
            microbatch=Watched(ANN, "0" * 16, 0, number), tokens=8, loss_sum=1.5, route=("a0",)
        )
        book.complete(STEP, ANN, known)
    assert book.full
    assert looked["at"] <= 2 * target


# --- whatever happens ------------------------------------------------------------------------------------------------

trainers = st.sampled_from(TRAINERS)
numbers = st.integers(0, 6)


class Feeding(RuleBasedStateMachine):
    """Trainers, honest and otherwise, of which some go and come back, under one leader."""

    hosted = True

    def __init__(self) -> None:
        super().__init__()
        self.target = 5
        self.book = ledger(self.target, TRAINERS)
        self.leased: Counter[PeerId] = Counter()

    @rule(trainer=trainers, total=st.integers(0, 8))
    def lease(self, trainer: PeerId, total: int) -> None:
        if trainer not in self.book.trainers:
            with pytest.raises(Refused):
                self.book.lease(STEP, trainer, total)
            return
        granted, reason = self.book.lease(STEP, trainer, total)
        assert granted >= self.leased[trainer]
        assert granted <= max(total, self.leased[trainer])
        assert reason
        self.leased[trainer] = granted

    @rule(trainer=trainers, number=numbers)
    def complete(self, trainer: PeerId, number: int) -> None:
        before = counted(self.book)
        try:
            new = self.book.complete(STEP, trainer, contribution(trainer, number))
        except Refused:
            assert counted(self.book) == before
        else:
            assert (microbatch(trainer, number) in before) is not new

    @rule(trainer=trainers, number=numbers)
    def put_aside(self, trainer: PeerId, number: int) -> None:
        try:
            self.book.put_aside(STEP, trainer, aside(trainer, number))
        except Refused:
            return
        assert aside(trainer, number) in self.book.aside()

    @rule(trainer=trainers, count=st.integers(0, 7), poison=st.sets(numbers))
    def resume(self, trainer: PeerId, count: int, poison: set[int]) -> None:
        if trainer not in self.book.trainers:
            return
        started = [microbatch(trainer, number) for number in range(count)]
        kept = self.book.resume(STEP, trainer, started, [aside(trainer, number) for number in sorted(poison)])
        assert kept <= count
        self.leased[trainer] = kept

    @rule(there=st.sets(trainers, min_size=1))
    def count_on(self, there: set[PeerId]) -> None:
        """Some go, some come back."""
        before = set(self.book.trainers)
        keep = dict.fromkeys(TRAINERS, START) if self.hosted else {}
        self.book.share(fixed_quota(STEP, sorted(there), self.target), keep)
        for trainer in before - there:
            held = [*counted(self.book), *(one.microbatch for one in self.book.aside())]
            mine = sorted(m for m in held if m.trainer == trainer)
            assert {m.epoch for m in mine} <= {START[0]}
            assert mine == [microbatch(trainer, number) for number in range(len(mine))]
            self.leased[trainer] = len(mine)

    @rule(data=st.data())
    def exclude(self, data: st.DataObject) -> None:
        gone = [m for m in counted(self.book) if m.trainer not in self.book.trainers]
        if gone:
            lost = data.draw(st.sampled_from(gone))
            before = set(counted(self.book))
            excluded = self.book.exclude([lost], dict.fromkeys(TRAINERS, START))
            assert lost in excluded
            assert before - set(counted(self.book)) == set(excluded)
            told = [*counted(self.book), *(one.microbatch for one in self.book.aside())]
            self.leased[lost.trainer] = sum(m.trainer == lost.trainer for m in told)

    @invariant()
    def no_more_is_under_way_than_makes_a_batch(self) -> None:
        assert self.leased.total() - len(self.book.aside()) <= self.target
        assert len(self.book.committed()) <= self.target
        assert self.book.full == (len(self.book.committed()) == self.target)

    @invariant()
    def nobody_has_done_more_than_was_leased_to_him(self) -> None:
        done = Counter(m.trainer for m in [*counted(self.book), *(one.microbatch for one in self.book.aside())])
        assert all(done[trainer] <= self.leased[trainer] for trainer in TRAINERS)

    @invariant()
    def a_microbatch_counts_once_or_is_put_aside(self) -> None:
        both = [*counted(self.book), *(one.microbatch for one in self.book.aside())]
        assert len(set(both)) == len(both)
        assert counted(self.book) == sorted(counted(self.book))

    @invariant()
    def a_step_that_is_not_full_can_be_filled(self) -> None:
        """What is not leased is left to somebody who is there, or everybody's share of it is."""
        if self.book.full or self.leased.total() - len(self.book.aside()) >= self.target:
            return
        room = {trainer: self.book.lease(STEP, trainer, 99)[0] for trainer in self.book.trainers}
        self.leased |= Counter(room)
        assert self.leased.total() - len(self.book.aside()) == self.target


class PrivateFeeding(Feeding):
    """Ends that die with their trainer: nothing of it is kept."""

    hosted = False


quick = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestFeeding = Feeding.TestCase
TestFeeding.settings = quick
TestPrivateFeeding = PrivateFeeding.TestCase
TestPrivateFeeding.settings = quick


# --- who computes again ----------------------------------------------------------------------------------------------

hosts = [PeerId(f"h{number}") for number in range(4)]


@pytest.mark.parametrize("lost", [set(), {"h0"}, {"h0", "h2"}, {"h1", "h3"}])
def test_reassigned_work_goes_to_those_that_are_there_and_hold_least(lost: set[str]) -> None:
    committed = [contribution(ANN, number, (f"h{number % 2}", f"h{2 + number % 2}")) for number in range(6)]
    stages = [[h for h in hosts[:2] if h not in lost], [h for h in hosts[2:] if h not in lost]]
    result = reassigned(committed, stages)
    assert [one.microbatch for one in result] == [one.microbatch for one in committed]
    for before, after in zip(committed, result, strict=True):
        for stage, (old, new) in enumerate(zip(before.route, after.route, strict=True)):
            assert new == old if old not in lost else new in stages[stage]
    assert reassigned(result, stages) == result


def test_reassigned_work_spreads() -> None:
    committed = [contribution(ANN, number, ("h0",)) for number in range(6)]
    loads = Counter(one.route[0] for one in reassigned(committed, [hosts[1:]]))
    assert loads == {"h1": 2, "h2": 2, "h3": 2}


def test_work_of_a_stage_without_anybody_cannot_be_reassigned() -> None:
    with pytest.raises(Refused, match="nobody is left at stage 1"):
        reassigned([contribution(ANN, 0, ("h0", "h2"))], [hosts[:2], []])


def test_work_that_nobody_computes_again_is_shared_in_proportion() -> None:
    """The weights of those that are left stay about what they were to each other: 6 to 1."""
    dead, busy, idle = PeerId("h0"), PeerId("h1"), PeerId("h2")
    routes = [dead] * 28 + [busy] * 60 + [idle] * 10
    committed = [contribution(ANN, position, (peer,)) for position, peer in enumerate(routes)]
    loads = Counter(one.route[0] for one in reassigned(committed, [[busy, idle]], computed_again=False))
    assert loads == {busy: 83, idle: 15}

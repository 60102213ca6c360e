"""What repair decides with, without a network: pace, probation, retention, itinerary, what was taken."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from swarm.errors import Refused
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.pipeline.retention import Retention
from swarm.pipeline.trainer.hops import Receipt, RouteState
from swarm.pipeline.trainer.issued import IssuedTable
from swarm.pipeline.trainer.journey import IssuedMicrobatch
from swarm.pipeline.trainer.pace import YOUNG, JourneyDeadlines
from swarm.pipeline.wiring import FIRST_LEAVE_S, LEAVES_FOR, LONGEST_LEAVE_S, Wiring
from swarm.waiting import LATER_S, SLOWER
from tests.harness.rigs.common import NO_BATCH, issued, set_aside

A, B, C, D = (PeerId(name) for name in "abcd")
SIGNED = Receipt(b"signed")


def named(position: int) -> MicrobatchId:
    return MicrobatchId(PeerId("tr"), "00" * 8, 0, position)


# --- pace ------------------------------------------------------------------------------------------------------------


def test_pace_gives_all_the_time_there_is_until_something_was_measured() -> None:
    pace = JourneyDeadlines(ceiling_s=60.0)
    assert {pace.seconds(A, work) for work in ("forward", "backward", "adopt")} == {60.0}  # type: ignore[arg-type]


def test_pace_is_each_peers_own_in_each_direction_and_else_what_others_take() -> None:
    pace = JourneyDeadlines(floor_s=0.1, ceiling_s=60.0, factor=3.0)
    for _ in range(20):
        pace.observe(A, "forward", 1.0)
        pace.observe(B, "forward", 0.1)
    assert pace.seconds(A, "forward") == pytest.approx(3.0)
    assert pace.seconds(B, "forward") == pytest.approx(0.3)
    assert pace.seconds(C, "forward") == pytest.approx(3.0)
    assert pace.seconds(A, "backward") == 60.0


def test_pace_waits_for_nobody_much_longer_than_two_others_take_however_slowly_it_got_there() -> None:
    pace, seconds = JourneyDeadlines(), 0.1
    for _ in range(40):
        seconds = min(seconds * 1.25, pace.seconds(A, "forward"))
        pace.observe(A, "forward", seconds)
        pace.observe(B, "forward", 0.1)
    assert pace.seconds(A, "forward") == pace.ceiling_s, "of two nobody knows who is slow"
    pace.observe(C, "forward", 0.3)
    assert pace.seconds(A, "forward") == pytest.approx(0.2 + LATER_S)
    for _ in range(40):
        pace.observe(B, "forward", 2.0)
        pace.observe(C, "forward", 2.0)
    assert pace.seconds(A, "forward") == pytest.approx(SLOWER * 2.0)
    assert pace.seconds(B, "forward") == pytest.approx(6.0), "its own"


def test_pace_allows_a_takeover_both_directions_twice() -> None:
    pace = JourneyDeadlines(floor_s=0.1, factor=3.0)
    pace.observe(A, "forward", 1.0)
    pace.observe(A, "backward", 2.0)
    assert pace.seconds(A, "adopt") == pytest.approx(2 * (3.0 + 6.0))
    pace.observe(B, "adopt", 0.5)
    assert pace.seconds(A, "adopt") == pytest.approx(1.5)


def test_pace_of_a_stalled_peer_is_below_five_seconds_for_hops_of_a_second() -> None:
    pace = JourneyDeadlines()
    for seconds in [0.8, 1.0, 1.2] * 10:
        pace.observe(A, "forward", seconds)
    assert 1.2 < pace.seconds(A, "forward") <= 4.0


def test_pace_is_young_until_enough_was_measured_in_that_direction() -> None:
    pace = JourneyDeadlines()
    for _ in range(YOUNG):
        assert pace.young("forward")
        pace.observe(A, "forward", 0.5)
    assert (pace.young("forward"), pace.young("backward")) == (False, True)


def test_pace_forgets_who_has_left() -> None:
    pace = JourneyDeadlines(floor_s=0.0)
    pace.observe(A, "forward", 9.0)
    pace.observe(B, "forward", 1.0)
    pace.follow({B})
    pace.observe(B, "forward", 1.0)
    assert pace.seconds(A, "forward") == pytest.approx(27.0)  # the others' now, in whose window its 9 s still are
    assert pace.seconds(B, "forward") == pytest.approx(3.0)


# --- probation -------------------------------------------------------------------------------------------------------


def chosen(wiring: Wiring, now: float) -> set[PeerId]:
    return {wiring.choose(0, now=now)[0] for _ in range(6)}


def test_wiring_leaves_out_who_failed_then_tries_it_with_one_microbatch() -> None:
    wiring = Wiring([[A, B]], seed=1)
    assert wiring.fail(0, A, now=10.0) == FIRST_LEAVE_S
    assert chosen(wiring, 10.5) == {B}
    after = [wiring.choose(0, now=11.1)[0] for _ in range(6)]
    assert after.count(A) == 1
    wiring.claimed(0, A, 0.001, "forward")
    assert wiring.statistics()[0][A].on_probation, "it may have come late"
    wiring.in_time(0, A)
    assert not wiring.statistics()[0][A].on_probation
    assert chosen(wiring, 11.2) >= {A}


def test_wiring_doubles_the_leave_of_who_fails_again_within_bounds() -> None:
    wiring = Wiring([[A, B]], seed=1)
    now, leaves = 0.0, []
    for _ in range(9):
        leaves.append(wiring.fail(0, A, now=now))
        assert wiring.fail(0, A, now=now) == leaves[-1], "the same failure, seen by another journey"
        now += leaves[-1] + 0.1
        assert wiring.choose(0, exclude=[B], now=now)[0] == A
    assert leaves == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert leaves[-1] == LONGEST_LEAVE_S


def test_wiring_leaves_out_who_was_waited_for_in_vain_for_long_enough_that_trying_it_costs_little() -> None:
    wiring = Wiring([[A, B]], seed=1)
    assert wiring.fail(0, A, now=0.0, waited_s=LATER_S) == FIRST_LEAVE_S, "no longer than anybody may be late"
    now = FIRST_LEAVE_S + 0.1
    assert wiring.choose(0, exclude=[B], now=now)[0] == A
    assert wiring.fail(0, A, now=now, waited_s=2 * LATER_S) == LEAVES_FOR * 2 * LATER_S
    assert chosen(wiring, now + LEAVES_FOR * 2 * LATER_S - 0.1) == {B}


def test_wiring_tries_the_only_one_again_soon_however_long_its_leave() -> None:
    wiring = Wiring([[A]], seed=1)
    now = 0.0
    for _ in range(5):
        wiring.fail(0, A, now=now)
        with pytest.raises(Refused):
            wiring.choose(0, now=now + 0.9 * FIRST_LEAVE_S)
        now += FIRST_LEAVE_S
        assert wiring.choose(0, now=now)[0] == A


def test_wiring_knows_nothing_of_who_left_the_run() -> None:
    assert Wiring([[A]], seed=1).fail(0, B, now=0.0) == 0.0


# --- retention -------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    retained_bytes: int
    complete: bool = True

    def clear(self) -> None:
        self.retained_bytes = 0


def test_retention_drops_the_oldest_complete_ones_and_says_so() -> None:
    told: list[tuple[object, int]] = []
    retention = Retention(100, lambda held, size: told.append((held, size)))
    growing = Held(40, complete=False)
    first, second, third = Held(30), Held(30), Held(30)
    for held in (growing, first, second):
        retention.hold(held)
    assert (retention.bytes, told) == (100, [])
    retention.hold(third)
    assert told == [(first, 30)]
    assert (first.retained_bytes, growing.retained_bytes, retention.bytes) == (0, 40, 100)
    growing.retained_bytes = 120
    retention.hold(growing)
    assert retention.bytes == 120, "what is not complete is never dropped"
    growing.complete = True
    retention.hold(growing)
    assert retention.bytes == 0
    retention.forget(growing)
    assert retention.bytes == 0


# --- itinerary -------------------------------------------------------------------------------------------------------


def test_itinerary_takes_whoever_answers_first_and_later_reports_imply_earlier_ones() -> None:
    way = RouteState([A, B, C])
    way.move(1, D)
    assert (way.route, way.attempt) == ((A, D, C), 1)
    assert way.forwarded(1, B)
    assert (way.route, way.attempt) == ((A, B, C), 2)
    assert [way.done(at) for at in range(3)] == [True, True, False]
    assert not way.forwarded(1, D), "the second answer is no news"


def test_itinerary_moved_on_the_way_out_does_what_follows_again() -> None:
    way = RouteState([A, B, C])
    way.forwarded(1, B)
    way.move(0, D)
    assert not any(way.done(at) for at in range(3))


def test_itinerary_counts_the_receipt_of_whoever_is_on_the_route() -> None:
    way = RouteState([A, B])
    way.back, way.home = True, True
    assert way.contributed(1, B, SIGNED)
    way.move(1, C)
    assert not way.complete
    assert way.contributed(0, A, SIGNED)
    assert not way.complete
    way.contributed(1, C, SIGNED)
    assert way.complete
    attempt = way.attempt
    assert way.lost(C) == []
    assert way.attempt == attempt + 1, "of one attempt there is one route"
    assert (way.route, way.complete) == ((A, B), True), "the first one's contribution stands in"
    assert way.lost(B) == [1]
    assert not way.complete


def test_itinerary_knows_whose_turn_has_passed() -> None:
    way = RouteState([A, B])
    way.begin_turn(0, 10.0, 2.0, "forward")
    assert (way.overdue(11.9), way.overdue(12.0), way.next_due()) == ([], [0], 12.0)
    assert way.heard_of(0, A, 13.5) == ("forward", 3.5)
    assert way.heard_of(0, A, 14.0) is None


# --- what was taken --------------------------------------------------------------------------------------------------


def test_taken_knows_where_the_shard_continues() -> None:
    taken = IssuedTable()
    for position in range(5):
        taken.add(issued(1, named(position)))
    set_aside(taken, 1, named(0))
    assert taken.started(1) == tuple(named(i) for i in range(5))
    assert [row.work.microbatch for row in taken.keep(1, 3)] == [named(3), named(4)]
    assert taken.started(1) == (named(0), named(1), named(2))
    assert taken.first_left(1, {named(1)}) == (0, 2)
    assert taken.first_left(1, {named(1), named(2)}) == (0, 3)
    assert taken.first_left(1, {named(i) for i in range(1, 5)}) is None
    assert taken.first_left(7, ()) is None
    taken.drop_before(2)
    assert taken.started(1) == ()


def test_taken_again_counts_again_and_what_is_not_kept_is_not_set_aside_either() -> None:
    taken = IssuedTable()
    for position in range(4):
        taken.add(issued(1, named(position)))
    set_aside(taken, 1, named(2))
    assert [row.work.microbatch for row in taken.keep(1, 1)] == [named(1), named(2), named(3)]
    set_aside(taken, 1, named(1))
    assert taken.started(1) == (named(0),)
    assert taken.first_left(1, {named(0)}) == (0, 1)
    taken.add(issued(1, named(1)))
    assert [row.standing for row in taken] == ["counts", "counts", "left", "left"]
    assert taken.first_left(1, {named(0), named(1)}) == (0, 2)


def test_row_that_is_begun_anew_leaves_nothing_of_the_former_one_in_the_budget() -> None:
    taken, former = IssuedTable(), issued(1, named(0))
    former.output = b"12345678"
    taken.add(former)
    taken.hold(former)
    assert (taken.retained_bytes, taken._retention.bytes) == (8, 8)
    assert [row.work.microbatch for row in taken.forgo(1)] == [named(0)]
    assert (taken.started(1), taken.first_left(1, ())) == ((), None)
    taken.add(issued(1, named(0)))
    assert (taken.started(1), taken.retained_bytes, taken._retention.bytes) == ((named(0),), 0, 0)
    taken.hold(former)  # what of it is still under way
    assert taken._retention.bytes == 0


def test_rows_are_in_the_shards_order_where_one_fed_early_is_taken_again_behind_others() -> None:
    taken = IssuedTable()
    for position, early in ((5, True), (6, True), (7, False), (8, False)):
        taken.add(IssuedMicrobatch(StepWork(1, named(position), early), NO_BATCH))
    assert [row.work.microbatch.position for row in taken.keep(1, 0)] == [5, 6, 7, 8]
    for position in (5, 6, 7):
        taken.add(issued(1, named(position)))
    assert taken.started(1) == (named(5), named(6), named(7))
    assert [row.work.microbatch for row in taken.keep(1, 2)] == [named(7)], "those left are always its last ones"


def test_microbatch_that_was_fed_early_and_is_taken_again_is_one_row_of_its_step() -> None:
    taken, early = IssuedTable(), IssuedMicrobatch(StepWork(1, named(0), early=True), NO_BATCH, leased=False)
    taken.add(early)
    assert taken.keep(1, 0) == [early]
    assert taken.first_left(1, ()) == (0, 0)
    again = issued(1, named(0))
    taken.add(again)
    again.standing = "set aside"
    assert (taken.of(1), taken.first_left(1, ())) == ([again], None)
    assert taken.drop_before(2) == [early, again]

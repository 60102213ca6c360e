"""The pipeline's pure deciders: queue, wiring, flight, gate, deadline, health."""

import math
import random
import statistics
from collections import Counter

import pytest
import torch

from swarm.errors import Refused
from swarm.health.heartbeat import HeartbeatReply
from swarm.health.verdicts import ANEW_S, MISSES_TO_LOSE, SHORTEST_LOSS_S, STRANGER_BEATS, Health, watched
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.passes import Bound
from swarm.pipeline.compute import Bounds, NormGate
from swarm.pipeline.stage.table import WorkQueue
from swarm.pipeline.trainer.flight import FAST, WAITING, CongestionWindow, InFlight, journeys_in_flight
from swarm.pipeline.wiring import Wiring
from swarm.planning.costs import MIN_IN_FLIGHT, MOST_IN_FLIGHT, most_in_flight

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def of(step: int, *, early: bool = False) -> StepWork:
    return StepWork(step, MicrobatchId(A, "00" * 8, 0, 0), early)


def test_queue_gives_backward_before_forward_and_oldest_first() -> None:
    queue: WorkQueue[str] = WorkQueue(8)
    for kind, name in [("forward", "f1"), ("backward", "b1"), ("forward", "f2"), ("backward", "b2")]:
        queue.push(kind, of(1), name)  # type: ignore[arg-type]
    assert [queue.pop(1) for _ in range(5)] == ["b1", "b2", "f1", "f2", None]


def test_queue_holds_the_next_step_until_it_opens_and_drops_the_last() -> None:
    queue: WorkQueue[str] = WorkQueue(8)
    queue.push("forward", of(2), "next")
    queue.push("forward", of(1), "now")
    assert [queue.pop(1), queue.pop(1)] == ["now", None]
    queue.push("backward", of(1), "late")
    queue.drop_before(2)
    assert [queue.pop(2), queue.pop(2)] == ["next", None]


def test_queue_gives_early_work_of_the_next_step_after_all_of_the_open_one() -> None:
    queue: WorkQueue[str] = WorkQueue(8)
    queue.push("backward", of(2, early=True), "early back")
    queue.push("forward", of(2, early=True), "early")
    queue.push("forward", of(2), "next")
    queue.push("forward", of(1), "now")
    assert [queue.pop(1) for _ in range(4)] == ["now", "early back", "early", None]
    queue.push("forward", of(3, early=True), "far")
    assert [queue.pop(2) for _ in range(3)] == ["next", "far", None]


def test_queue_is_full_of_forwards_only() -> None:
    queue: WorkQueue[int] = WorkQueue(2)
    for item in range(5):
        queue.push("backward", of(1), item)
    assert not queue.full(1)
    queue.push("forward", of(1), 8)
    queue.push("forward", of(1), 9)
    assert queue.full(1)


def test_queue_full_of_the_next_step_takes_the_open_one() -> None:
    queue: WorkQueue[int] = WorkQueue(1)
    queue.push("forward", of(2), 0)
    assert (queue.full(2), queue.full(1)) == (True, False)


def told(wiring: Wiring, took: dict[PeerId, float], claims: dict[PeerId, float], count: int) -> Counter[PeerId]:
    """Work that takes each replica so long, one piece after the other, and what each claims of it."""
    chosen: Counter[PeerId] = Counter()
    ends = dict.fromkeys(took, 0.0)
    for _ in range(count):
        peer, _ = wiring.choose(0)
        began, ends[peer] = ends[peer], ends[peer] + took[peer]
        wiring.claimed(0, peer, claims[peer], "forward", (began, ends[peer]))
        chosen[peer] += 1
    return chosen


def choices(wiring: Wiring, seconds: dict[PeerId, float], count: int) -> Counter[PeerId]:
    """Whom it chooses when each takes so long, and says so."""
    return told(wiring, seconds, seconds, count)


def test_wiring_chooses_a_replica_twice_as_fast_twice_as_often() -> None:
    chosen = choices(Wiring([[A, B]], seed=1), {A: 1.0, B: 2.0}, 600)
    assert chosen[A] == pytest.approx(2 * chosen[B], rel=0.02)


def test_wiring_chooses_among_the_replicas_of_a_microbatchs_variant_and_floods_no_newcomer_to_it() -> None:
    a2, b2 = PeerId("a2"), PeerId("b2")
    wiring, variants = Wiring([[A, B]], seed=1), {A: (0, 2), B: (1, 2), a2: (0, 2), b2: (1, 2)}
    wiring.know_variants(variants)
    wiring.follow([[A, B]])
    for _ in range(100):
        assert [wiring.choose(0, choice=choice)[0] for choice in (0, 2, 4, 1)] == [A, A, A, B]
    wiring.follow([[A, B, a2, b2]])
    chosen = Counter(wiring.choose(0, choice=2)[0] for _ in range(20))
    assert chosen == {A: 10, a2: 10}
    assert [wiring.has_way({B}, choice) for choice in range(4)] == [True] * 4
    assert [wiring.has_way({B, b2}, choice) for choice in range(4)] == [True, False, True, False]
    wiring.know_variants({**variants, a2: (1, 2)})  # it moved
    wiring.follow([[A, B, a2, b2]])
    assert wiring.replicas(0, 0) == (A,)
    assert wiring.replicas(0, 1) == (B, b2, a2)


def test_wiring_follows_a_replica_that_slows_down() -> None:
    wiring = Wiring([[A, B]], seed=1)
    choices(wiring, {A: 1.0, B: 1.0}, 50)
    chosen = choices(wiring, {A: 9.0, B: 1.0}, 200)
    assert chosen[B] > 6 * chosen[A]


@pytest.mark.parametrize("claim", [0.0, 1e-9, 0.3, 0.7])
@pytest.mark.parametrize("others", [1, 2, 7])
def test_wiring_gives_who_overclaims_no_more_than_its_share_and_a_half(others: int, claim: float) -> None:
    liar, *honest = (PeerId(f"p{number}") for number in range(others + 1))
    took = dict.fromkeys([liar, *honest], 1.0)
    wiring = Wiring([[liar, *honest]], seed=1)
    for peer in took:  # else it would be asked by chance before anybody could be compared with
        wiring.claimed(0, peer, 1.0, "forward", (0.0, 1.0))
    chosen = told(wiring, took, {**took, liar: claim}, 800)
    assert chosen[liar] / 800 <= 1.5 / (others + 1)


def test_wiring_believes_who_overclaims_as_far_as_the_trainer_sees_it() -> None:
    took = {A: 0.1, B: 1.0, C: 1.0}
    chosen = told(Wiring([[A, B, C]], seed=1), took, took, 1200)
    assert chosen[A] == pytest.approx(10 * chosen[B], rel=0.1)


@pytest.mark.parametrize("turn", [None, (0.0, 1.0)])
def test_wiring_believes_a_lie_about_one_direction_no_more_than_about_both(turn: tuple[float, float] | None) -> None:
    wiring = Wiring([[A, B]], seed=1)
    for _ in range(9):
        wiring.claimed(0, B, 1.0, "forward", (0.0, 1.0))
        wiring.claimed(0, B, 2.0, "backward", (0.0, 2.0))
        assert wiring.claimed(0, A, 1.0, "forward", turn) >= 1.0
    assert wiring.claimed(0, A, 0.0, "backward", turn) >= 0.6


def test_wiring_does_not_flood_a_newcomer() -> None:
    wiring = Wiring([[A, B]], seed=1)
    choices(wiring, {A: 1.0, B: 1.0}, 100)
    wiring.add(0, C)
    chosen = choices(wiring, {A: 1.0, B: 1.0, C: 1.0}, 30)
    assert 9 <= chosen[C] <= 12


def test_wiring_does_not_flood_a_replica_that_was_away() -> None:
    a, b, c = map(PeerId, "abc")
    wiring = Wiring([[a, b, c]], seed=1)
    for away in [(), (a,), ()]:
        chosen: Counter[PeerId] = Counter()
        for _ in range(30):
            peer, _ = wiring.choose(0, away)
            wiring.claimed(0, peer, 0.1, "forward")
            chosen[peer] += 1
    assert set(chosen) == {a, b, c}
    assert max(chosen.values()) <= 11


@pytest.mark.parametrize(("works", "left_out"), [("", False), ("a", False), ("b", True), ("ab", False)])
def test_wiring_leaves_out_who_is_always_busy_while_another_works(works: str, left_out: bool) -> None:
    wiring, last = Wiring([[A, B]], seed=1), 8
    for now in range(last + 1):
        wiring.turned_away(0, A, now=float(now))
        for peer in works:
            wiring.claimed(0, PeerId(peer), 0.1, "forward", (now, now + 0.1))
    assert [one.peer for one in wiring.on_probation(now=last)] == [A] * left_out
    if left_out:
        (probation,) = wiring.on_probation(now=last)
        assert probation.reason == "busy each of the last 8 times that it was asked, for 7 s"
        assert wiring.choose(0, exclude={B}, now=last + 1.5)[1] == "tried again after 1 s"
        wiring.turned_away(0, A, now=last + 2.0)
        assert wiring.on_probation(now=last + 2.0)[0].left_s > 1, "each time for twice as long"


@pytest.mark.parametrize("faulty", [False, True])
def test_wiring_leaves_out_who_was_faulty_for_longer_each_time_whatever_it_does_between(*, faulty: bool) -> None:
    wiring, now, left = Wiring([[A, B]], seed=1), 0.0, list[float]()
    for _ in range(4):
        left.append(wiring.fail(0, A, now=now, reason="it differs", faulty=faulty))
        wiring.in_time(0, A)  # what it had begun before
        now += 100.0
        assert wiring.choose(0, exclude={B}, now=now)[0] == A
        wiring.in_time(0, A)
        assert not wiring.on_probation(now=now)
    assert (sorted(set(left)) == left) is faulty


def test_wiring_never_starves_a_slow_replica() -> None:
    assert choices(Wiring([[A, B]], seed=1), {A: 0.01, B: 1.0}, 1000)[B] >= 5


def test_wiring_is_determined_by_its_seed() -> None:
    runs = [[Wiring([[A, B, C]], seed=s).choose(0)[0] for _ in range(1)] for s in (3, 3, 4, 5, 6, 7)]
    assert runs[0] == runs[1]
    assert len({peer for run in runs for peer in run}) > 1


def test_wiring_without_a_replica_left_refuses() -> None:
    wiring = Wiring([[A, B]], seed=1)
    assert wiring.choose(0, exclude={A})[0] == B
    wiring.remove(0, A)
    with pytest.raises(Refused, match="stage 0"):
        wiring.choose(0, exclude={B})


def test_wiring_keeps_forward_and_backward_apart() -> None:
    wiring = Wiring([[A, B]], seed=1)
    wiring.claimed(0, A, 1.0, "forward")
    wiring.claimed(0, A, 2.0, "backward")
    wiring.claimed(0, B, 1.0, "forward")
    known = wiring.statistics()[0]
    assert known[A].average_s == pytest.approx(3.0)
    assert known[B].average_s == pytest.approx(3.0), "a forward is a third of it, as with the other"


def test_wiring_gives_a_replica_no_more_than_its_link_carries() -> None:
    wiring = Wiring([[A, B]], seed=1)
    wiring.know_links({A: 4.0, B: 0.5})
    chosen = choices(wiring, {A: 1.0, B: 1.0}, 500)
    assert chosen[B] == pytest.approx(4 * chosen[A], rel=0.02)
    assert wiring.rates() == pytest.approx([2.0]), "what they compute"


def test_wiring_rates_leave_out_who_is_on_probation_and_take_the_unmeasured_for_usual() -> None:
    wiring = Wiring([[A, B, C]], seed=1)
    wiring.claimed(0, A, 0.5, "forward")
    wiring.fail(0, B, now=1.0)
    assert wiring.rates() == pytest.approx([4.0])
    for peer in (A, C):
        wiring.fail(0, peer, now=1.0)
    assert wiring.rates()[0] > 0, "where all are, they are all there is"


def test_flight_covers_the_round_trip_of_the_slowest_stage() -> None:
    wanted, reason = journeys_in_flight(1.0, {0: 0.125, 1: 0.25}, [8.0, 4.0], trainers=1)
    assert wanted == math.ceil(4 + WAITING * 0.375 * 4) + 1, "under way, waiting, and one to spare"
    assert "stage 1" in reason
    assert journeys_in_flight(1.0, {0: 0.125, 1: 0.25}, [8.0, 4.0], trainers=90)[0] == MIN_IN_FLIGHT
    assert journeys_in_flight(900.0, {0: 0.1}, [10.0], trainers=1)[0] == MOST_IN_FLIGHT
    assert journeys_in_flight(900.0, {0: 0.1}, [10.0], trainers=1, most=7)[0] == 7


def test_flight_lets_as_many_wait_whatever_the_links_cost() -> None:
    stage_s, rates = dict.fromkeys(range(3), 0.09), [4 / 0.09] * 3
    near, far = (journeys_in_flight(0.27 + link, stage_s, rates, trainers=2)[0] for link in (0.0, 0.22))
    assert near == (12 + WAITING * 12) / 2 + 1, "one at each of the twelve replicas, and those that wait"
    assert far == near + 5


def test_flight_of_a_trainer_follows_what_its_journeys_took_and_who_is_there() -> None:
    wiring = Wiring([[A, B], [C, PeerId("d")]], seed=1)
    flight = InFlight(wiring, trainers=1)
    assert flight.limit() == 2 * MIN_IN_FLIGHT, "nothing is measured yet"
    for stage, peer in enumerate([A, C]):
        wiring.claimed(stage, peer, 0.1 * (1 + stage), "forward")
    for come_home in range(1, 81):
        flight.observe(1.0, {0: 0.1, 1: 0.2})
        assert flight.limit() <= 2 * MIN_IN_FLIGHT + FAST * come_home, "so many more for each at most"
    assert flight.limit() == journeys_in_flight(1.0, {0: 0.1, 1: 0.2}, [20.0, 10.0], trainers=1)[0]
    wiring.remove(1, C)
    flight.follow(2)
    assert flight.limit() == journeys_in_flight(1.0, {0: 0.1, 1: 0.2}, wiring.rates(), trainers=2)[0]
    assert InFlight(wiring, trainers=1, fixed=7).limit() == 7


def test_flight_is_carried_no_further_than_it_was_used() -> None:
    wiring = Wiring([[A, B], [C]], seed=1)
    flight = InFlight(wiring, trainers=1)
    for stage, peer in enumerate([A, C]):
        wiring.claimed(stage, peer, 0.1, "forward")
    for _ in range(1000):
        flight.observe(1.0, {0: 0.1, 1: 0.1})
    used = flight.limit()
    for now in range(1, 7):
        flight.late(C, now - 0.5, float(now))
    assert flight.limit() == MIN_IN_FLIGHT < used, "its stage has no other that could be late"


def test_flight_is_halved_when_two_replicas_are_late_and_not_for_one_that_hangs() -> None:
    window = CongestionWindow()
    while window.size < 31:
        window.came_home()
    grown = window.size
    for now in (1.0, 2.0, 3.0):
        window.late(A, 0.0, now)
    assert window.size == grown, "one that is late says something of itself"
    window.late(B, 0.0, 4.0)
    half = window.size
    assert half == grown / 2
    for peer in (A, B, C):
        window.late(peer, 3.9, 5.0)
    assert window.size == half, "these were under way when it was halved"
    window.came_home()
    assert half < window.size < half + 0.1, "from then on slowly"
    window.late(A, 4.5, 6.0, alone=True)
    assert window.size < half / 2 + 0.1, "nobody else could be late"
    for now in range(10, 90, 10):
        window.late(A, float(now), now + 1.0, alone=True)
    assert window.size == MIN_IN_FLIGHT


def test_flight_lets_more_wait_where_replicas_are_unlike() -> None:
    alike, some, many = (
        journeys_in_flight(1.0, {0: 0.25}, [8.0], trainers=1, unlike=unlike)[0] for unlike in (1.0, 1.5, 9.0)
    )
    assert (alike, some, many) == (8 + 3 * 2 + 1, 8 + 4.5 * 2 + 1, 8 + 6 * 2 + 1)
    wiring = Wiring([[A, B, C]], seed=1)
    assert wiring.unlike() == 1.0
    for peer, seconds in ((A, 0.1), (B, 0.1), (C, 0.3)):
        wiring.claimed(0, peer, seconds, "forward", (0.0, seconds))
    assert wiring.unlike() == pytest.approx(3.0)


def test_flight_is_bounded_by_what_journeys_retain() -> None:
    assert most_in_flight(1e3, 1 << 30) == MOST_IN_FLIGHT
    assert most_in_flight(32 << 20, 1 << 30) == 32
    assert most_in_flight(4 << 30, 1 << 30) == MIN_IN_FLIGHT


def test_gate_refuses_what_is_not_finite_and_does_not_learn_from_it() -> None:
    gate = NormGate(factor=10.0, warmup=4)
    assert all(gate.check(value) is not None for value in [math.nan, math.inf] * 8)
    assert all(gate.check(1.0) is None for _ in range(4))
    assert gate.check(11.0) is not None


def test_gate_refuses_only_after_it_has_seen_enough() -> None:
    gate = NormGate(factor=10.0, warmup=4)
    assert gate.check(1e9) is None
    for _ in range(8):
        assert gate.check(1.0) is None
    assert gate.check(11.0) == "gradient norm 11 exceeds 10, 10 times the median", "no matter who sent it"
    assert gate.check(9.0) is None


def test_gate_refuses_the_500_fold_of_what_is_usual_and_no_honest_norm() -> None:
    gate, rng = NormGate(), random.Random(1)
    honest = [math.exp(rng.gauss(0.0, 0.8)) for _ in range(512)]
    assert [gate.check(norm) for norm in honest] == [None] * 512
    assert gate.check(500 * statistics.median(honest)) is not None
    assert max(honest) > 8 * statistics.median(honest)


def come(
    bounds: Bounds, position: int, length: float, sender: PeerId, step: int = 5, gave: float | None = None
) -> tuple[float, float]:
    """How long a gradient is that came with this length for what we ``gave``, and what is told of its sender."""
    work = StepWork(step, MicrobatchId(PeerId("t"), "00" * 8, 0, position))
    if gave is not None:
        bounds.gave(work, torch.full((1,), gave))
    gradient, long = bounds.arrived(work, torch.full((1,), length))
    bounds.came(work, long)
    return float(gradient.abs().sum()), bounds.far(work, sender)


def test_bounds_scale_down_what_is_too_long_and_tell_of_who_sends_it_again_and_again() -> None:
    bounds = Bounds()
    assert come(bounds, 0, 1e9, A) == (1e9, 0.0), "nothing is bounded"
    bounds.open(4, (1.0, 2.0), 2.0)
    assert come(bounds, 0, -3.0, A) == (3.0, 0.0)
    assert [come(bounds, position, -100.0, A) for position in range(2)] == [(4.0, 0.0)] * 2, "it may be honest"
    assert come(bounds, 2, 31.0, A) == (4.0, 0.0), "not so long"
    assert come(bounds, 3, 100.0, B) == (4.0, 0.0), "another's"
    assert [come(bounds, position, 100.0, A)[1] for position in range(4, 7)] == [50.0, 0.0, 0.0], "once a step"
    bounds.open(5, (1.0, 2.0), 2.0)
    assert [come(bounds, position, 100.0, A, step=6)[1] for position in range(3)] == [50.0, 0.0, 0.0]
    bounds.open(20, (1.0, 2.0), 2.0)
    assert [come(bounds, position, 100.0, A, step=21)[1] for position in range(3)] == [0.0, 0.0, 50.0]


def test_who_sends_a_long_gradient_for_the_little_that_we_gave_is_not_told_of() -> None:
    bounds = Bounds()
    bounds.open(4, (1.0, 2.0), 2.0)
    assert {come(bounds, position, 2.0, A, gave=8.0)[1] for position in range(8)} == {0.0}
    assert {come(bounds, position, 100.0, A, gave=0.0)[1] for position in range(8, 12)} == {0.0}, "of nothing"
    assert {come(bounds, position, 100.0, A, gave=2.0)[1] for position in range(12, 14)} == {0.0}, "of a quarter"
    assert [come(bounds, position, 100.0, A, gave=16.0)[1] for position in range(16, 19)] == [0.0, 0.0, 50.0]


def test_bounds_of_what_no_record_knows_are_none() -> None:
    bounds, work = Bounds(), StepWork(1, MicrobatchId(PeerId("t"), "00" * 8, 0, 0))
    assert bounds.of(work) is None
    bounds.open(0, (0.0, 0.0), 2.0)
    assert come(bounds, 0, 1e9, A, step=1) == (1e9, 0.0)
    assert bounds.of(work) == Bound(math.inf, 1e9), "its length is measured, for the record"
    bounds.open(1, (3.0, 0.0), 2.0)
    assert bounds.of(StepWork(2, work.microbatch)) == Bound(6.0, 0.0)
    early = StepWork(2, work.microbatch, early=True)
    assert bounds.of(early) == Bound(math.inf, 0.0), "it is computed with the parameters of the record before"
    assert not bounds.on(StepWork(4, work.microbatch))


def misses(health: Health, times: list[float]) -> list[str | None]:
    return [health.missed(A, "silent", now) for now in times]


def test_health_needs_consecutive_misses() -> None:
    health = Health()
    assert misses(health, [0.0, 2.0]) == [None, None]
    health.answered(A)
    *before, verdict = misses(health, [4.0, 6.0, 8.0])
    assert before == [None, None]
    assert verdict == f"no answer to {MISSES_TO_LOSE} pings in a row: silent"


def test_health_needs_misses_over_some_time() -> None:
    health = Health()
    assert misses(health, [5.0, 5.1, 5.2, 5.9]) == [None] * 4
    assert misses(health, [5.0 + SHORTEST_LOSS_S]) != [None]


def test_health_takes_two_witnesses_and_one_miss() -> None:
    health = Health()
    health.told(A, B)
    assert misses(health, [1.0]) == [None]
    health.told(A, B)  # the same one again
    assert misses(health, [1.1]) == [None]
    health.told(A, C)
    (verdict,) = misses(health, [1.2])
    assert verdict == "no answer to 3 pings in a row, nor to 2 others: silent"


def test_health_forgets_witnesses_of_who_answers() -> None:
    health = Health()
    health.told(A, B)
    health.told(A, C)
    health.answered(A)
    assert misses(health, [1.0, 1.1]) == [None, None]
    assert health.missing == {A}
    health.answered(A)
    assert not health.missing


def test_health_loses_who_was_started_anew_for_good() -> None:
    health = Health()
    standing = HeartbeatReply(step=1, member=True, incarnation=7)
    assert [health.answered(A, standing) for _ in range(2)] == [None, None]
    anew = standing.model_copy(update={"incarnation": 8})
    verdicts = [health.answered(A, anew, now) for now in (10.0, 9.9 + ANEW_S, 10.0 + ANEW_S, 99.0)]
    assert verdicts == [None, None, *["it was started anew"] * 2]
    assert health.answered(A, standing, 100.0) is None
    assert health.answered(A, anew, 100.0) is None, "the other had ended"
    health.forget([A])
    assert health.answered(A, anew) is None


def test_health_loses_who_says_long_enough_that_it_does_not_take_part() -> None:
    health = Health()
    out, inside = (HeartbeatReply(step=1, member=member, incarnation=7) for member in (False, True))
    assert [health.answered(A, out) for _ in range(STRANGER_BEATS - 1)] == [None] * (STRANGER_BEATS - 1)
    assert health.answered(A, inside) is None
    verdicts = [health.answered(A, out) for _ in range(STRANGER_BEATS + 1)]
    assert verdicts == [None] * (STRANGER_BEATS - 1) + ["it does not take part any more"] * 2
    assert health.answered(A, inside) is None


def test_watched_gives_everybody_as_many_watchers() -> None:
    roster = [PeerId(f"p{i}") for i in range(7)]
    watchers = Counter(peer for me in roster for peer in watched(me, roster, 3))
    assert set(watchers.values()) == {3}
    assert all(me not in watched(me, roster) for me in roster)
    assert set(watched(A, [A, B], 3)) == {B}


def test_wiring_gives_a_straggler_nothing_that_the_rest_of_a_step_would_wait_for() -> None:
    wiring = Wiring([[A, B, C]], seed=1)
    for peer, seconds in ((A, 0.1), (B, 0.1), (C, 1.0)):
        wiring.claimed(0, peer, seconds, "forward", (0.0, seconds))
    wiring.hurry(5.0)
    early = choices(wiring, {A: 0.1, B: 0.1, C: 1.0}, 60)
    wiring.hurry(1.9)
    late = choices(wiring, {A: 0.1, B: 0.1, C: 1.0}, 60)
    assert early[C] > 0
    assert late[C] == 0
    wiring.hurry(5.0)
    assert choices(wiring, {A: 0.1, B: 0.1, C: 1.0}, 12)[C] <= 2, "what it was left out of is not owed to it"
    for peer in (A, B):
        wiring.remove(0, peer)
    wiring.hurry(0.0)
    assert wiring.choose(0)[0] == C, "who is alone is no straggler"


def test_flight_has_wiring_know_how_much_of_a_step_is_left() -> None:
    wiring = Wiring([[A, B]], seed=1)
    flight = InFlight(wiring, trainers=2, fixed=4)
    for peer, seconds in ((A, 0.5), (B, 2.0)):
        wiring.claimed(0, peer, seconds, "forward", (0.0, seconds))
    flight.begins(40, 20)
    assert Counter(wiring.choose(0)[0] for _ in range(10))[B] > 0, "nothing came home: nothing is known"
    flight.observe(1.0, {0: 0.5})
    wiring.claimed(0, B, 6.0, "forward", (2.0, 8.0))
    flight.begins(40, 20)
    assert Counter(wiring.choose(0)[0] for _ in range(10))[B] == 0

"""Schedules: the trees they make, the exact mean they give, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.schedules import SCHEDULES, Schedule
from swarm.averaging.schedules.auto import ScheduleInputs, UnavailableSchedule, choose, shares, steady
from swarm.averaging.schedules.costs import LinkCost, Vector, load, seconds
from swarm.averaging.schedules.patterns import MAX_PARTS
from swarm.averaging.schedules.routes import Routes
from swarm.errors import BugError
from swarm.ids import PeerId
from tests.harness.rigs.averaging import names

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
ALL = list(SCHEDULES.values())
BY_NAME = pytest.mark.parametrize("schedule", ALL, ids=[schedule.name for schedule in ALL])


def routes(schedule: Schedule, weights: list[int], given: list[int] | None = None, turn: int = 0) -> Routes:
    """Of members p0 …; ``given`` are their shares."""
    members = names(len(weights))
    said = dict(zip(members, weights, strict=True))
    sizes = dict(zip(members, given, strict=True)) if given else {peer: int(w > 0) for peer, w in said.items()}
    return Routes(schedule, members, said, sizes, turn)


def interpret(plan: Routes, root: PeerId, numbers: Mapping[PeerId, int]) -> tuple[dict[PeerId, int], int]:
    """One part's result at every member, and how many messages it took: the schedule carried out in memory."""
    held, messages = {peer: numbers[peer] for peer in plan.members}, 0
    for peer in sorted(plan.members, key=lambda peer: -plan.depth(peer, root)):
        parent = plan.parent(peer, root)
        if parent is not None:
            held[parent] += held[peer]
            messages += 1
    for level in range(plan.levels):
        held |= {peer: held[peer] + held[plan.partner(peer, level)] for peer in plan.core}
        messages += len(plan.core)
    for peer in sorted(plan.members, key=lambda peer: plan.depth(peer, root)):
        parent = plan.parent(peer, root)
        if parent is not None:
            held[peer] = held[parent]
            messages += 1
    return held, messages


@BY_NAME
@pytest.mark.parametrize("count", range(1, 18))
def test_every_member_gets_the_sum_of_all_whoever_may_be_asked(schedule: Schedule, count: int) -> None:
    for able in {1, (count + 1) // 2, count}:
        plan = routes(schedule, [1] * count, [int(rank % count < able) for rank in range(count)], turn=count)
        numbers = {peer: 10**rank for rank, peer in enumerate(plan.members)}
        for root in plan.roots:
            held, _ = interpret(plan, root, numbers)
            assert set(held.values()) == {sum(numbers.values())}
            assert {plan.parent(peer, root) for peer in plan.members} - {None} <= set(plan.core)
            assert all(plan.shares[peer] for peer in plan.core)


@BY_NAME
@QUICK
@given(data=st.data(), weights=st.lists(st.integers(0, 9), min_size=1, max_size=17).filter(any))
def test_weights_of_what_arrives_add_up_to_those_of_all(
    schedule: Schedule, data: st.DataObject, weights: list[int]
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=len(weights), max_size=len(weights)).filter(any))
    plan = routes(schedule, weights, sizes, turn=data.draw(st.integers(0, 20)))
    for root in plan.roots:
        tops = [peer for peer in plan.members if plan.parent(peer, root) is None]
        assert sum(plan.weight(peer, root) for peer in tops) == sum(weights)
        assert len(tops) == (len(plan.core) if plan.levels else 1)
    for level in range(plan.levels):
        both = {plan.traded_weight(p, level) + plan.traded_weight(plan.partner(p, level), level) for p in plan.core}
        if level == plan.levels - 1:
            assert both == {sum(weights)}


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_bytes_and_hops_are_the_formulas_of_the_docstrings(count: int) -> None:
    vector, bits = Vector(elements=count * 1000, chunk_elements=100), count.bit_length() - 1
    size = vector.elements * 4
    even = 2 * (count - 1) * size // count
    hops = {"direct": 2, "ring": 2 * (count - 1), "tree": 2 * bits, "halving": 2 * bits, "butterfly": bits}
    for name, schedule in SCHEDULES.items():
        plan = routes(schedule, [1] * count)
        asked = load(plan, vector)
        sent = {peer: asked.bytes_of(peer) for peer in plan.members}
        assert plan.hops == hops[name], name
        partners = {peer: {b for a, b in asked.sent if a == peer} for peer in plan.members}
        if name in ("direct", "halving"):
            assert set(sent.values()) == {(even, even)}
            assert {len(those) for those in partners.values()} == {count - 1 if name == "direct" else bits}
        elif name == "ring":
            assert set(sent.values()) == {(even, even)}
            assert all(len(those) <= 2 for those in partners.values())
        elif name == "butterfly":
            assert set(sent.values()) == {(bits * size, bits * size)}
        else:
            assert sent[plan.members[0]] == (bits * size, bits * size)
            assert sum(asked.calls.values()) == (count - 1) * count * 10, "K-1 calls for each chunk of the group"


@BY_NAME
@pytest.mark.parametrize("count", range(1, 18))
def test_counters_are_what_the_interpreter_counts(schedule: Schedule, count: int) -> None:
    plan = routes(schedule, [1] * count)
    asked = load(plan, Vector(elements=len(plan.roots), chunk_elements=1))
    messages = sum(interpret(plan, root, dict.fromkeys(plan.members, 1))[1] for root in plan.roots)
    assert sum(asked.sent.values()) == 4 * messages
    calls = Counter({pair: 0 for pair in asked.sent}) + asked.calls
    trades = len(plan.core) * plan.levels
    assert sum(calls.values()) == (messages - trades) // 2 + trades, "a tree's answer is no call"


def test_no_two_members_have_more_parts_between_them_than_may_be_open() -> None:
    for schedule in ALL:
        plan = routes(schedule, [1] * 150)
        between = Counter((peer, plan.parent(peer, root)) for root in plan.roots for peer in plan.members)
        assert max(count for (_, parent), count in between.items() if parent is not None) <= MAX_PARTS


def test_routes_without_anybody_to_reduce_are_a_bug() -> None:
    with pytest.raises(BugError):
        routes(SCHEDULES["ring"], [1, 1], [0, 0])


# --- shares ----------------------------------------------------------------------------------------------------------


def sized(*rates: int) -> list[int]:
    return list(shares(dict(zip(names(len(rates)), rates, strict=True)), len(rates)).values())


def test_equal_links_reduce_equal_parts_and_a_slow_one_none() -> None:
    assert sized(*[10] * 5) == [1] * 5
    assert sized(*[10] * 7, 1) == [1] * 7 + [0]
    assert sized(10, 1) == [1, 1], "between two members nothing is gained"
    assert sized(20, 10, 10, 10) == [7, 1, 1, 1]
    assert sized(20, 10, 10) == [1, 0, 0], "sending their sums takes the others as long"


@QUICK
@given(rates=st.lists(st.integers(1, 1000), min_size=3, max_size=12))
def test_no_other_shares_let_the_slowest_reducer_be_done_earlier(rates: list[int]) -> None:
    count, given = len(rates), sized(*rates)
    whole = sum(given)
    times = [(1 + (count - 2) * share / whole) / rate for share, rate in zip(given, rates, strict=True)]
    taking = [time for time, share in zip(times, given, strict=True) if share]
    assert max(taking) - min(taking) < 1e-9 * max(taking), "all are done at the same time"
    assert all(1 / rate >= max(taking) * (1 - 1e-9) for rate, share in zip(rates, given, strict=True) if not share)


def test_steady_takes_no_notice_of_what_measurements_differ_by() -> None:
    noisy = steady(dict(zip(names(7), [100, 190, 51, 110, 30, 20, 450], strict=True)))
    assert [rate / 1024 for rate in noisy.values()] == [1, 1, 1, 1, 0.5, 0.25, 4]
    assert max(steady({PeerId("a"): 1, PeerId("b"): 10**15, PeerId("c"): 1}).values()) == 1 << 20
    for wrong in ({}, {PeerId("a"): 0}):
        with pytest.raises(BugError):
            steady(wrong)
        with pytest.raises(BugError):
            shares(wrong, 2)


# --- choosing --------------------------------------------------------------------------------------------------------


def situation(count: int, elements: int, ms: float, mib_s: int, sites: int = 0) -> ScheduleInputs:
    """Equal links; each member at a site of its own, or side by side at so many."""
    members = names(count) if count <= 10 else tuple(PeerId(f"p{rank:02}") for rank in range(count))
    site = [str(rank * sites // count if sites else rank) for rank in range(count)]
    links = {
        peer: LinkCost(latency_s=ms / 1e3, bytes_per_s=mib_s << 20, site=where)
        for peer, where in zip(members, site, strict=True)
    }
    return ScheduleInputs(
        members=members, weights=dict.fromkeys(members, 1), vector=Vector(elements=elements), links=links
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (situation(4, 25_000_000, ms=1, mib_s=200), "direct"),
        (situation(16, 1000, ms=50, mib_s=10), "direct"),
        (situation(16, 100, ms=0.5, mib_s=200), "butterfly"),
        (situation(16, 10_000_000, ms=50, mib_s=10, sites=2), "halving"),
        (situation(12, 10_000_000, ms=30, mib_s=20, sites=2), "ring"),
        (situation(4, 4_000_000, ms=1, mib_s=100, sites=1), "direct"),
    ],
)
def test_auto_takes_the_one_that_these_links_favour(case: ScheduleInputs, expected: str) -> None:
    choice = choose(case)
    assert choice.schedule == expected
    assert "s expected" in choice.reason
    assert choice == choose(case)


def test_unmeasured_links_give_direct_and_say_so() -> None:
    case = situation(3, 100, 1, 1)
    choice = choose(ScheduleInputs(members=case.members, weights=case.weights, vector=case.vector))
    assert (choice.schedule, set(choice.shares.values())) == ("direct", {1})
    assert "measured" in choice.reason


def test_what_the_manifest_wants_is_taken_with_parts_by_bandwidth() -> None:
    case = situation(4, 100, 1, 100)
    links = dict(case.links) | {PeerId("p3"): LinkCost(latency_s=0.001, bytes_per_s=1 << 20)}
    choice = choose(
        ScheduleInputs(members=case.members, weights=case.weights, vector=case.vector, links=links),
        UnavailableSchedule("ring", "asked"),
    )
    assert choice.schedule == "ring"
    assert list(choice.shares.values()) == [1, 1, 1, 0]
    assert choice.reason.startswith("asked; ")
    assert "too slow" in choice.reason


def test_members_that_can_only_dial_out_and_observers_reduce_nothing() -> None:
    case = situation(4, 100, 1, 100)
    weights = dict(case.weights) | {PeerId("p0"): 0}
    for links in ({}, case.links):
        told = ScheduleInputs(
            members=case.members, weights=weights, vector=case.vector, links=links, dial_only={PeerId("p2")}
        )
        assert {peer for peer, share in choose(told).shares.items() if share} == {PeerId("p1"), PeerId("p3")}
    alone = ScheduleInputs(members=case.members, weights=weights, vector=case.vector, dial_only=set(case.members[1:3]))
    assert set(choose(alone).shares) == {PeerId("p3")}
    nobody = ScheduleInputs(members=case.members, weights=weights, vector=case.vector, dial_only=set(case.members))
    assert len(choose(nobody).shares) == 3, "somebody must"


def test_seconds_grow_with_bytes_and_latency() -> None:
    for schedule in ALL:
        times = []
        for elements, ms in ((10, 1.0), (10**6, 1.0), (10**6, 50.0)):
            case = situation(6, elements, ms, 10)
            plan = Routes(schedule, case.members, case.weights, case.weights)
            times.append(seconds(plan, case.vector, case.links))
        assert times == sorted(set(times))

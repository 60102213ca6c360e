"""Strategies: who is with whom, and how fast that mixes, as their docstrings say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest

from swarm.averaging.gossip.pushing import PushSum
from swarm.averaging.strategies import STRATEGIES, Strategy, strategy_at
from swarm.averaging.strategies.exact import Everyone, Hierarchy, Plain, Server
from swarm.averaging.strategies.groups import Group
from swarm.averaging.strategies.swapping import ButterflyGroups, Grid, RandomGroups
from swarm.errors import BugError, RoundFailed
from swarm.ids import PeerId

SIZES = (*range(1, 18), 23, 32, 48, 64, 100, 127)
MIXING = (2, 3, 4, 5, 7, 8, 12, 13, 16, 17, 32, 45, 64, 100)


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"{number:04d}") for number in range(count)]


def regions(count: int) -> dict[PeerId, str]:
    return {peer: "abc"[number % 7 % 3] for number, peer in enumerate(peers(count))}


def every() -> list[Strategy]:
    return [*STRATEGIES.values(), Grid(3), ButterflyGroups(4), RandomGroups(3), Hierarchy(regions(127))]


def mix(values: np.ndarray, groups: tuple[Group, ...]) -> np.ndarray:
    """The values after one round in which all groups finish."""
    mixed = values.copy()
    for group in groups:
        heard = [int(peer) for peer in group.members if peer not in group.silent]
        mixed[[int(peer) for peer in group.members]] = values[heard].mean(axis=0)
    return mixed


def distance(values: np.ndarray, mean: np.ndarray) -> float:
    return float(((values - mean) ** 2).sum())


@pytest.mark.parametrize("strategy", every(), ids=repr)
def test_groups_are_disjoint_cover_all_and_are_the_same_for_everybody(strategy: Strategy) -> None:
    for count in SIZES:
        replicas = peers(count)
        for step, round in ((0, 0), (0, 1), (3, 2), (7, 5)):
            groups = strategy.groups(replicas, step, round, 5)
            assert sorted(peer for group in groups for peer in group.members) == replicas
            assert all(group.silent < set(group.members) for group in groups)
            assert all(set(group.reducers) <= set(group.members) - group.silent for group in groups)
            assert strategy.groups(replicas[::-1], step, round, 5) == groups


@pytest.mark.parametrize("strategy", every(), ids=repr)
def test_nobody_makes_no_groups_and_nobody_is_there_twice(strategy: Strategy) -> None:
    assert strategy.groups([], 0, 0, 0) == ()
    with pytest.raises(BugError, match="twice"):
        strategy.groups([PeerId("a"), PeerId("a")], 0, 0, 0)


@pytest.mark.parametrize("strategy", every(), ids=repr)
def test_rounds_that_are_said_to_be_exact_are(strategy: Strategy) -> None:
    rng = np.random.default_rng(1)
    for count in SIZES:
        rounds = strategy.exact_after(count)
        if rounds is None:
            continue
        assert strategy.left_after(rounds, count) == 0
        values = rng.standard_normal((count, 3))
        sizes = np.ones(count)  # how many replicas' values are in a replica's sum
        sums = values.copy()
        for round in range(rounds):
            groups = strategy.groups(peers(count), 4, round, 9)
            sums, sizes = added(sums, groups), added(sizes, groups)
        assert np.allclose(sums / sizes[:, None], values.mean(axis=0), atol=1e-12), "whatever the groups' sizes"


def added(values: np.ndarray, groups: tuple[Group, ...]) -> np.ndarray:
    """As :func:`mix`, with sums."""
    total = values.copy()
    for group in groups:
        heard = [int(peer) for peer in group.members if peer not in group.silent]
        total[[int(peer) for peer in group.members]] = values[heard].sum(axis=0)
    return total


@pytest.mark.parametrize("strategy", [Grid(), Grid(3), ButterflyGroups(), ButterflyGroups(2), RandomGroups()], ids=repr)
def test_swapped_groups_mix_as_fast_as_theory_has_it(strategy: Strategy) -> None:
    """The mean over many lots and many coordinates is within a few of its own standard errors."""
    for count in MIXING:
        left = np.array([lot(strategy, count, seed) for seed in range(24)])
        for rounds in range(1, 5):
            theory, measured = strategy.left_after(rounds, count), left[:, rounds]
            error = measured.std() / len(measured) ** 0.5
            assert abs(measured.mean() - theory) <= 5 * error + 1e-12, (count, rounds)


def lot(strategy: Strategy, count: int, seed: int) -> list[float]:
    """What one run's rounds leave, from the beginning on."""
    values = np.random.default_rng(seed).standard_normal((count, 200))
    mean = values.mean(axis=0)
    left = [distance(values, mean)]
    for round in range(4):
        values = mix(values, strategy.groups(peers(count), 0, round, seed))
        left.append(distance(values, mean))
    return [one / left[0] for one in left]


def test_groups_of_a_cycle_bring_every_two_together_at_most_once_on_a_full_grid() -> None:
    met: set[tuple[PeerId, PeerId]] = set()
    for round in range(3):
        for group in Grid(3).groups(peers(60), 0, round, 0):
            pairs = set(combinations(sorted(group.members), 2))
            assert not met & pairs
            met |= pairs


@pytest.mark.parametrize(
    ("count", "dimensions", "sides"),
    [
        (1, 2, (1,)),
        (3, 2, (3,)),
        (6, 2, (3, 2)),
        (7, 2, (4, 2)),
        (16, 2, (4, 4)),
        (900, 2, (30, 30)),
        (60, 3, (5, 4, 3)),
    ],
)
def test_grid_is_full_where_it_can_be(count: int, dimensions: int, sides: tuple[int, ...]) -> None:
    assert Grid(dimensions).sides(count) == sides


def test_butterfly_is_the_published_example_and_does_not_repeat_a_bit_where_it_wraps() -> None:
    def at(round: int) -> list[list[int]]:
        groups = ButterflyGroups(4).groups(peers(8), 0, round, 0)
        return [[int(peer) for peer in group.members] for group in groups]

    assert at(0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert at(1) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert at(2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert at(3) == at(0)


def test_steps_go_on_with_the_rounds_where_one_is_not_exact() -> None:
    for strategy in (Grid(), ButterflyGroups()):
        first, later = strategy.groups(peers(13), 0, 1, 0), strategy.groups(peers(13), 1, 0, 0)
        assert first == later
        assert strategy.groups(peers(13), 2, 0, 0) != strategy.groups(peers(13), 0, 0, 0), "places are drawn anew"


def test_server_is_one_that_can_be_reached_and_takes_turns() -> None:
    able = [PeerId("0001"), PeerId("0003")]
    only_call = frozenset(peers(5)) - frozenset(able)
    groups = [Server({*only_call, PeerId("elsewhere")}).groups(peers(5), step, 0, 0)[0] for step in range(4)]
    assert [group.reducers for group in groups] == [(able[step % 2],) for step in range(4)]
    assert {group.outgoing for group in groups} == {only_call}
    assert Server().groups(peers(5), 0, 0, 0)[0].outgoing == frozenset()


def test_server_of_replicas_that_nobody_can_call_is_refused_unless_there_is_one() -> None:
    with pytest.raises(RoundFailed, match="can be called"):
        Server(peers(3)).groups(peers(3), 0, 0, 0)
    assert Server(peers(1)).groups(peers(1), 0, 0, 0)[0].reducers == tuple(peers(1))


@dataclass(frozen=True)
class There:
    region: str = ""
    outgoing: bool = False


def test_strategy_at_sites_knows_who_is_where() -> None:
    a, b, c = peers(3)
    assert strategy_at("server", {a: There(), b: There(outgoing=True)}) == Server(frozenset({b}))
    two = {a: There("x"), b: There("x"), c: There()}
    assert strategy_at("hierarchy", two) == Hierarchy({a: "x", b: "x", c: ""}, frozenset())
    for flat in ({}, {a: There("x")}, {a: There("x"), b: There("x")}, {a: There("x"), b: There("y")}):
        assert strategy_at("hierarchy", flat).name == "everyone"
    assert strategy_at("grid", two) == STRATEGIES["grid"]


def test_hierarchy_sends_one_replica_of_each_region_across() -> None:
    within, across, back = (Hierarchy(regions(14)).groups(peers(14), 2, round, 0) for round in range(3))
    assert [len(group.members) for group in within] == [6, 4, 4]
    delegates = set(across[0].members)
    assert (len(delegates), len(across)) == (3, 12)
    assert [set(group.members) - group.silent for group in back] == [{peer} for peer in across[0].members]
    assert [group.members for group in back] == [group.members for group in within]
    other = Hierarchy(regions(14)).groups(peers(14), 3, 1, 0)
    assert not delegates & set(other[0].members), "another one carries the next step"


def test_hierarchy_sends_across_whom_others_can_call_where_there_is_one() -> None:
    there = {peer: "ab"[number // 3] for number, peer in enumerate(peers(6))}
    outgoing = {*peers(2), *peers(6)[3:]}
    across = [Hierarchy(there, outgoing).groups(peers(6), step, 1, 0)[0].members for step in range(3)]
    assert {members[0] for members in across} == {peers(3)[2]}
    assert {members[1] for members in across} == set(peers(6)[3:])


# --- push-sum --------------------------------------------------------------------------------------------------------


def pushed(count: int, rounds: int, lost: Callable[[int, int], bool] = lambda sender, round: False) -> list[np.ndarray]:
    """(sum, weight) of everybody after each round; what is lost on the way stays with its sender."""
    strategy, replicas = PushSum(), peers(count)
    held = np.column_stack([np.random.default_rng(3).standard_normal((count, 4)), np.ones(count)])
    seen = [held]
    for round in range(rounds):
        after = held.copy()
        for sender, peer in enumerate(replicas):
            target = strategy.target(peer, replicas, round, 7)
            if target is not None and not lost(sender, round):
                after[sender] -= held[sender] / 2
                after[int(target)] += held[sender] / 2
        held = after
        seen.append(held)
    return seen


def test_everybody_is_sent_to_by_one_other_in_every_round() -> None:
    for count in SIZES:
        for step in range(8):
            targets = [PushSum().target(peer, peers(count), step, 1) for peer in peers(count)]
            if count == 1:
                assert targets == [None]
            else:
                assert sorted(str(target) for target in targets) == peers(count)
                assert all(target != peer for target, peer in zip(targets, peers(count), strict=True))


def test_push_sum_mixes_as_theory_has_it_and_keeps_its_mass() -> None:
    for count in MIXING:
        seen = pushed(count, 8)
        for held in seen:
            assert np.allclose(held.sum(axis=0), seen[0].sum(axis=0))
        exact = PushSum().exact_after(count)
        if exact is not None:
            values = seen[exact][:, :-1] / seen[exact][:, -1:]
            assert np.allclose(values, seen[0][:, :-1].mean(axis=0), atol=1e-12)
            assert PushSum().left_after(exact, count) < 1e-20
        identity = np.eye(count)
        for round in range(8):
            moved = identity / 2
            for sender, peer in enumerate(peers(count)):
                moved[int(str(PushSum().target(peer, peers(count), round, 7)))] += identity[sender] / 2
            identity = moved
            left = ((identity**2).sum() - 1) / (count - 1)
            assert np.isclose(left, PushSum().left_after(round + 1, count), atol=1e-12)


def test_push_sum_tends_to_the_mean_though_a_third_of_all_messages_is_lost() -> None:
    rng = np.random.default_rng(5)
    seen = pushed(13, 60, lambda sender, round: rng.random() < 1 / 3)
    values = seen[-1][:, :-1] / seen[-1][:, -1:]
    assert np.allclose(values, seen[0][:, :-1].mean(axis=0), atol=1e-5)


def test_everyone_is_one_group_by_rank() -> None:
    assert Everyone().groups(peers(3)[::-1], 9, 9, 9) == (Group(tuple(peers(3))),)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_plain_rounds_leave_another_without_anything_to_reduce_in_each_turn(count: int) -> None:
    replicas = peers(count)
    idle = list[PeerId]()
    for turn in range(count):
        (group,) = Plain(turn).groups(replicas, 3, 0, 1)
        assert set(group.members) == set(replicas)
        idle += set(replicas) - set(group.reducers)
    assert sorted(idle) == sorted(replicas)


def test_plain_rounds_are_never_reduced_by_who_can_only_call() -> None:
    first, second, third = replicas = peers(3)
    for turn in range(3):
        (group,) = Plain(turn, outgoing={first}).groups(replicas, 3, 0, 1)
        assert first not in group.reducers
        assert (len(group.reducers), group.outgoing) == (1, {first})
        (group,) = Plain(turn, outgoing={first, second}).groups(replicas, 3, 0, 1)
        assert group.reducers == (third,)
    with pytest.raises(RoundFailed, match="none of 3 replicas"):
        Plain(0, outgoing=replicas).groups(replicas, 3, 0, 1)

"""What a strategy's rounds leave of the differences between replicas, in simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.averaging.gossip.pushing import PushSum
from swarm.averaging.strategies import Strategy
from swarm.ids import PeerId

Values = NDArray[np.float64]
COORDINATES = 32
"""Independent numbers that each replica holds: their mean distance scatters less than one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``failing`` is the chance that a replica fails in a round: its group's round is void, and nobody's value changes;
    what is pushed to it stays with its sender."""

    replicas: int
    failing: float
    seed: int


def distances(strategy: Strategy | PushSum, setting: Setting) -> Iterator[float]:
    """Mean squared distance from the mean after each round, of what was unit noise before the first."""
    rng = np.random.default_rng(setting.seed)
    values = rng.standard_normal((setting.replicas, COORDINATES))
    mean = values.mean(axis=0)
    peers = [PeerId(f"{number:05d}") for number in range(setting.replicas)]
    place = {peer: number for number, peer in enumerate(peers)}
    weights = np.ones((setting.replicas, 1))
    round = 0
    while True:
        down = rng.random(setting.replicas) < setting.failing
        if isinstance(strategy, PushSum):
            targets = [place[_some(strategy.target(peer, peers, round, setting.seed))] for peer in peers]
            values, weights = _push(values, targets, down), _push(weights, targets, down)
        else:
            for group in strategy.groups(peers, 0, round, setting.seed):
                members = [place[peer] for peer in group.members]
                if not down[members].any():
                    values[members] = values[members].mean(axis=0)
        round += 1
        yield float(((values / weights - mean) ** 2).mean())


def _push(held: Values, targets: list[int], down: Any) -> Values:
    """Half of what each holds goes to its target, where both are there."""
    sent = np.where((down | down[targets])[:, None], 0.0, held / 2)
    after = held - sent
    np.add.at(after, targets, sent)
    return after


def _some(peer: PeerId | None) -> PeerId:
    assert peer is not None, "nobody is alone here"
    return peer


def rounds_until(strategy: Strategy | PushSum, setting: Setting, bound: float, most: int) -> int:
    """Rounds until the mean squared distance is below ``bound``; ``most`` when it is not by then."""
    for number, left in enumerate(distances(strategy, setting), start=1):
        if left < bound or number >= most:
            return number
    raise AssertionError("distances have no end")


def contraction(strategy: Strategy | PushSum, setting: Setting, rounds: int) -> list[float]:
    """What is left after each of the first rounds, as a share of what there was."""
    values = distances(strategy, setting)
    first = np.random.default_rng(setting.seed).standard_normal((setting.replicas, COORDINATES))
    before = float(((first - first.mean(axis=0)) ** 2).mean())
    return [next(values) / before for _ in range(rounds)]


def theory(strategy: Strategy | PushSum, setting: Setting) -> tuple[float, float] | None:
    """What one and two rounds leave, in expectation over noise and failures: with mixing matrices M and N that are
    independent projections, (tr E[M] - 1)/(P-1) and (tr E[M]E[N] - 1)/(P-1). None where failures break that: what is
    pushed is no projection."""
    if isinstance(strategy, PushSum):
        if setting.failing:
            return None
        return strategy.left_after(1, setting.replicas), strategy.left_after(2, setting.replicas)
    first, second = (_expected(strategy, setting, round) for round in range(2))
    if not setting.failing:
        return strategy.left_after(1, setting.replicas), strategy.left_after(2, setting.replicas)
    other = setting.replicas - 1
    one = (float(np.trace(first)) - 1) / other
    if strategy.name == "random":  # another lot has forgotten the first
        return one, one * one
    return one, (float((first * second).sum()) - 1) / other


def _expected(strategy: Strategy, setting: Setting, round: int) -> Values:
    peers = [PeerId(f"{number:05d}") for number in range(setting.replicas)]
    mixing = np.zeros((setting.replicas, setting.replicas))
    for group in strategy.groups(peers, 0, round, setting.seed):
        members = [int(peer) for peer in group.members]
        whole = (1 - setting.failing) ** len(members)
        mixing[np.ix_(members, members)] = whole / len(members)
        mixing[members, members] += 1 - whole
    return mixing

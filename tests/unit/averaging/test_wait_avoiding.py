"""Rounds that wait for nobody: what a late member ends with, what is conserved, and that nothing too old is mixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm.averaging.gossip.wait_avoiding import Published, Settled, WaitAvoiding
from swarm.averaging.strategies.swapping import ButterflyGroups
from swarm.errors import BugError, Violation
from swarm.ids import PeerId

A, B, C, D = members = [PeerId(name) for name in "abcd"]
RULES = WaitAvoiding(most_stale=3)


def at(version: int, *values: float, weight: int = 1) -> Published:
    return Published(version, torch.tensor(values, dtype=torch.float32), weight)


def settled(published: dict[PeerId, Published], round: int, me: PeerId, own: Published) -> Settled:
    mixture, _ = RULES.mix(members, published, round)
    assert mixture is not None
    return RULES.settle(mixture, me, own)


def test_members_in_time_all_take_the_mean_and_conserve_the_sum() -> None:
    published = {peer: at(5, float(number), 8.0) for number, peer in enumerate(members)}
    mixture, reason = RULES.mix(members, published, 5)
    assert mixture is not None
    assert reason == "round 5: all in time"
    for peer in members:
        after = RULES.settle(mixture, peer, published[peer])
        assert (after.how, after.version) == ("in it", 5)
        assert torch.equal(after.vector, torch.tensor([1.5, 8.0]))


def test_late_member_counts_as_published_and_adds_what_it_has_now_by_one_in_s_plus_one() -> None:
    published = {A: at(5, 4.0), B: at(5, 8.0), C: at(5, 12.0), D: at(3, 0.0)}
    mixture, reason = RULES.mix(members, published, 5)
    assert mixture is not None
    assert reason == "round 5: d with an older version"
    assert mixture.versions == {A: 5, B: 5, C: 5, D: 3}
    assert RULES.settle(mixture, A, published[A]).vector.item() == 6.0
    late = RULES.settle(mixture, D, at(5, 16.0))
    assert (late.how, late.version, late.vector.item()) == ("added", 5, (24.0 + 16.0) / 5)
    assert RULES.settle(mixture, D, published[D]).how == "in it", "it has done nothing since"


def test_late_members_sum_is_what_the_docstring_says() -> None:
    p, v, others = 2.0, 10.0, (4.0, 8.0, 6.0)
    weights = {A: 2, B: 1, C: 1, D: 4}
    published = {peer: at(5, value, weight=weights[peer]) for peer, value in zip((A, B, C), others, strict=True)}
    published[D] = at(4, p, weight=weights[D])
    mixture, _ = RULES.mix(members, published, 5)
    assert mixture is not None
    now = published | {D: at(5, v, weight=weights[D])}
    m, total, w = mixture.mean.item(), mixture.weight, weights[D]
    before = sum(weights[peer] * now[peer].vector.item() for peer in members)
    after = sum(weights[peer] * RULES.settle(mixture, peer, now[peer]).vector.item() for peer in members)
    assert total == 8
    assert before == total * m + w * (v - p)
    assert after == pytest.approx(total * m + w * w / (total + w) * (v - m), rel=1e-6)


def test_member_beyond_the_bound_is_left_out_and_loses_its_own() -> None:
    published = {A: at(9, 3.0), B: at(9, 5.0), D: at(5, 100.0)}
    mixture, reason = RULES.mix(members, published, 9)
    assert mixture is not None
    assert reason == "round 9: without c, d: no version that counts"
    assert mixture.mean.item() == 4.0
    gone = RULES.settle(mixture, D, at(5, 100.0))
    assert (gone.how, gone.version, gone.vector.item()) == ("too old", 9, 4.0)
    assert RULES.settle(mixture, D, at(6, 10.0)).how == "added", "at the bound it still counts"


def test_versions_from_the_future_count_for_nothing() -> None:
    mixture, reason = RULES.mix(members, {A: at(2, 1.0), B: at(10**9, 5.0)}, 2)
    assert mixture is not None
    assert mixture.mean.item() == 1.0
    assert "without b" in reason


def test_round_of_nobody_has_no_mixture() -> None:
    assert RULES.mix(members, {A: at(1, 1.0)}, 9) == (None, "round 9: nobody published for it or the 3 before it")


def test_mixing_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BugError, match="float32 vectors of one size"):
        RULES.mix(members, {A: at(1, 1.0), B: at(1, 1.0, 2.0)}, 1)
    with pytest.raises(BugError, match="weights"):
        RULES.mix(members, {A: at(1, 1.0, weight=0)}, 1)
    with pytest.raises(Violation, match="b: "):
        RULES.mix(members, {A: at(1, 1.0), B: at(1, float("nan"))}, 1)
    with pytest.raises(BugError, match="cannot settle"):
        settled({A: at(1, 1.0)}, 1, A, at(2, 1.0))


class Rounds:
    """Eight members in swapping pairs. Member 2 sleeps, and is late in the round in which it wakes."""

    MEMBERS, SLEEPER = [PeerId(str(number)) for number in range(8)], PeerId("2")

    def __init__(self, asleep: range) -> None:
        self.asleep = asleep
        self.held = {peer: Published(0, torch.zeros(1)) for peer in self.MEMBERS}
        self.published = dict(self.held)
        self.lags: list[int] = []
        self.how: dict[int, str] = {}

    def play(self, rounds: int) -> None:
        for round in range(1, rounds + 1):
            awake = [peer for peer in self.MEMBERS if peer != self.SLEEPER or round not in self.asleep]
            for peer in awake:
                base = self.held[peer]
                version = round if base.version == round - 1 else base.version + 1
                self.held[peer] = Published(version, base.vector + 1)
            in_time = [peer for peer in awake if self.held[peer].version == round]
            for group in ButterflyGroups(2).groups(self.MEMBERS, 0, round, 0):
                self._close(round, group.members, in_time)

    def _close(self, round: int, group: tuple[PeerId, ...], in_time: list[PeerId]) -> None:
        self.published |= {peer: self.held[peer] for peer in group if peer in in_time}
        mixture, _ = RULES.mix(group, self.published, round)
        assert mixture is not None
        self.lags += [round - version for version in mixture.versions.values()]
        for peer in group:
            if peer == self.SLEEPER and round in self.asleep:
                continue
            end = RULES.settle(mixture, peer, self.held[peer])
            self.held[peer] = Published(end.version, end.vector)
            if peer == self.SLEEPER:
                self.how[round] = end.how


def spread(vectors: list[Tensor]) -> float:
    return float(torch.stack(vectors).std())


def test_sleeping_member_comes_back_within_the_bound() -> None:
    world = Rounds(asleep=range(5, 12))
    world.play(30)
    assert set(world.lags) == {0, 1, 2, 3}, "it counted for three rounds and then no more"
    assert world.how[12] == "too old"
    assert {world.how[round] for round in range(14, 31)} == {"in it"}
    assert world.held[Rounds.SLEEPER].version == 30
    assert spread([one.vector for one in world.held.values()]) < 0.01 * float(world.held[Rounds.SLEEPER].vector)


def test_member_that_dozes_adds_what_it_has() -> None:
    world = Rounds(asleep=range(5, 7))
    world.play(9)
    assert world.how[7] == "added"
    assert max(world.lags) == 3, "in round 7 it was still counted as of round 4, for the others did not wait"
    assert world.held[Rounds.SLEEPER].version == 9

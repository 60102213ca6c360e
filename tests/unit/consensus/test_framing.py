"""No single trainer has an honest one lose its quota, whatever it makes of that one's microbatches: in directions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from swarm.consensus.records import Contribution
from swarm.consensus.roster import Roster
from swarm.consensus.trials import Trial, checked_words, failed, following
from swarm.ids import MicrobatchId, PeerId
from swarm.optim.accumulate import pulls
from swarm.schema import FEWEST_TRAINERS, WHOLE_WORD
from tests.harness.rigs.consensus import listed

DIMENSIONS, REPLICAS, STEPS = 32, "abc", 40
Shares = Tensor
"""(steps, replicas, trainers, DIMENSIONS): the victim is the first trainer, the liar the last."""
Lie = Callable[[Shares], Tensor]
"""What the liar's share is, (steps, replicas, DIMENSIONS): it knows all others'. A length says nothing."""


def honest(trainers: int, alike: float, unlike: float, seed: int) -> Shares:
    """Directions whose cosines are ``alike`` in the mean, but the first one's with the others: − ``unlike`` times that,
    or as the others' where it is 0. The rest of each is its own, and drawn anew for each replica and step."""
    drawn = torch.Generator().manual_seed(seed)
    common = torch.full((trainers, 1), alike**0.5)
    if unlike:
        common[0] = -unlike * alike**0.5
    own = normalize(torch.randn(STEPS, len(REPLICAS), trainers, DIMENSIONS - 1, generator=drawn), dim=-1)
    return torch.cat([common.expand(STEPS, len(REPLICAS), trainers, 1), (1 - common**2).sqrt() * own], dim=-1)


def mixed(victim: float, others: float, common: float) -> Lie:
    """So much of the victim's direction, of the sum of the other honest ones', and of what all have in common."""

    def lie(shares: Shares) -> Tensor:
        way = torch.eye(DIMENSIONS)[0]
        return victim * shares[:, :, 0] + others * shares[:, :, 1:-1].sum(dim=2) + common * way

    return lie


def by_turns(of_with: Lie, of_against: Lie) -> Lie:
    """One where the honest others are with the victim, the other one where they are not."""

    def lie(shares: Shares) -> Tensor:
        against = (shares[:, :, 1:-1] @ shares[:, :, 0, :, None]).sum(dim=2) < 0
        return torch.where(against, of_against(shares), of_with(shares))

    return lie


def drawn_lies(count: int) -> list[Lie]:
    drawn = torch.Generator().manual_seed(7)
    mixes = [mixed(*row) for row in (2 * torch.randn(2 * count, 3, generator=drawn)).tolist()]
    return [by_turns(*pair) for pair in zip(mixes[::2], mixes[1::2], strict=True)]


FRAMERS = [
    *(mixed(-1.0, 0.0, weight) for weight in (0.0, 0.2, 0.4, 0.6, 1.0)),
    *(mixed(-1.0, weight, 0.0) for weight in (0.2, 0.5, 1.0)),
    by_turns(mixed(0.0, 1.0, 0.0), mixed(-1.0, 0.3, 0.3)),
    by_turns(mixed(-1.0, 0.3, 0.3), mixed(0.0, 1.0, 0.0)),
    *drawn_lies(10),
]


def first_to_fail(shares: Shares) -> tuple[int, set[str]]:
    """Which trainers fail first, and in which step; (0, none) if none does."""
    names = "EFGHJKLM"[: shares.shape[2]]
    roster = Roster(
        [*(listed(f"0{one}", part="stage-0") for one in REPLICAS), *(listed(one, "trainer", "ends") for one in names)]
    )
    committed = [
        Contribution(
            microbatch=MicrobatchId(PeerId(name), "00" * 8, 0, at), tokens=8, loss_sum=1.0, route=(f"0{replica}",)
        )
        for name in names
        for at, replica in enumerate(REPLICAS)
    ]
    known = dict[str, Trial]()
    for step, found in enumerate(shares, start=1):
        said = {
            f"0{by}": tuple(round(WHOLE_WORD * pull) for pull in pulls(of))
            for by, of in zip(REPLICAS, found, strict=True)
        }
        known = following(known, step, roster, committed, checked_words(roster, committed, said))
        if out := failed(known, step):
            return step, {"victim" if one == "E" else "liar" if one == names[-1] else one for one in out}
    return 0, set()


@pytest.mark.parametrize("trainers", [3, 4, 5, 6])
@pytest.mark.parametrize(("alike", "unlike"), [(0.05, 0.0), (0.2, 0.0), (0.4, 0.0), (0.4, 0.2)])
def test_nobody_has_an_honest_trainer_fail_by_what_it_makes_of_its_microbatches(
    trainers: int, alike: float, unlike: float
) -> None:
    turned = 0
    for number, lie in enumerate(FRAMERS):
        shares = honest(trainers, alike, unlike, seed=number)
        shares[:, :, -1] = normalize(lie(shares), dim=-1)
        turned += bool((shares[:, :, 0] * shares[:, :, -1]).sum(dim=-1).mean() < -0.2)
        assert first_to_fail(shares)[1] <= {"liar"}, number
    assert turned >= 6, "so many point away from it"


@pytest.mark.parametrize("alike", [0.2, 0.4])
@pytest.mark.parametrize("trainers", [5, 6, 8])
def test_who_turns_its_own_gradients_around_fails_all_the_same(trainers: int, alike: float) -> None:
    for seed in range(5):
        shares = honest(trainers, alike, 0.0, seed)
        shares[:, :, -1] *= -10.0
        step, found = first_to_fail(shares)
        assert found == {"liar"}
        assert 8 <= step <= 20, "within 60 microbatches"


def test_of_few_trainers_nobody_is_judged() -> None:
    shares = honest(FEWEST_TRAINERS - 1, 0.4, 0.0, seed=0)
    shares[:, :, -1] *= -1.0
    assert first_to_fail(shares) == (0, set())

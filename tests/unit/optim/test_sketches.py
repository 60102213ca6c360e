"""How far trainers' shares of a sum point where the others' do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import MicrobatchId, StepWork
from swarm.optim.accumulate import COORDINATES, MOST_TRAINERS, Accumulator, Sketches, pulls
from swarm.schema import WHOLE_WORD
from tests.unit.optim.test_accumulate import LAYOUT, gradients


def shares(trainers: int, seed: int = 0, common: float = 1.0) -> torch.Tensor:
    """What trainers bring of one direction, each with as much of its own."""
    drawn = torch.Generator().manual_seed(seed)
    return common * torch.randn(1024, generator=drawn) + torch.randn(trainers, 1024, generator=drawn)


@given(st.integers(3, 9), st.integers(0, 9))
def test_pull_is_the_mean_of_the_cosines_with_the_others_without_the_lowest(trainers: int, seed: int) -> None:
    rows = shares(trainers, seed)
    for at, found in enumerate(pulls(rows)):
        others = torch.cat([rows[:at], rows[at + 1 :]])
        cosines = torch.cosine_similarity(rows[at], others, dim=1).sort().values
        assert found == pytest.approx(float(cosines[1:].mean()), abs=1e-5)


@given(st.integers(3, 9), st.integers(0, 9), st.lists(st.floats(-9, 9), min_size=9, max_size=9))
def test_no_other_row_lowers_a_pull_below_the_mean_of_its_cosines_with_the_rest(
    trainers: int, seed: int, mix: list[float]
) -> None:
    rows = shares(trainers, seed, common=0.2)
    rows[-1] = torch.tensor(mix[: trainers - 1]) @ rows[:-1] + 1e-3 * rows[-1]
    for at, found in enumerate(pulls(rows)[:-1]):
        others = torch.cat([rows[:at], rows[at + 1 : -1]])
        assert found >= float(torch.cosine_similarity(rows[at], others, dim=1).mean()) - 1e-5


@given(st.integers(4, 9), st.integers(0, 9), st.sampled_from([-1.0, -10.0, -1e30]))
def test_one_that_turns_around_pulls_against_the_others_and_they_do_not(trainers: int, seed: int, by: float) -> None:
    rows = shares(trainers, seed)
    rows[0] *= by
    liar, *others = pulls(rows)
    assert liar < -0.3
    assert min(others) > 0.3


def test_noise_is_on_nobodys_side_and_spoils_no_other_word_whatever_its_length() -> None:
    rows = shares(4)
    rows[0] = 1e30 * torch.randn(1024, generator=torch.Generator().manual_seed(9))
    noise, *others = pulls(rows)
    assert abs(noise) < 0.15
    assert min(others) > 0.3


def test_who_is_only_unlike_the_others_pulls_less_and_with_them() -> None:
    own = shares(1, seed=1, common=0.0)
    rows = torch.cat([shares(4), 0.4 * shares(1)[:1] + own])
    *others, unlike = pulls(rows)
    assert 0.1 < unlike < min(others)


@pytest.mark.parametrize("rows", [torch.zeros(3, 8), torch.full((3, 8), torch.inf), torch.full((3, 8), torch.nan)])
def test_what_has_no_direction_says_nothing(rows: torch.Tensor) -> None:
    assert pulls(rows) == [0.0, 0.0, 0.0]


def test_words_are_about_what_is_in_the_sum_and_of_five_trainers_at_least() -> None:
    # Of two devices: one sum in two vectors.
    total = torch.zeros(40)
    sums = [total[:12], total[12:]]
    sketches = Sketches(sums, 1)
    said = dict(zip("abcde", torch.eye(5, 40) + 1.0, strict=True))
    for trainer, share in said.items():
        assert sketches.words("abcde") == ()
        with sketches.seeing(trainer, sums):
            total += share
    found = sketches.words("abcde")
    assert all(0 < word <= WHOLE_WORD for word in found)
    with sketches.seeing("a", sums):
        total -= 2 * said["a"]
    turned = sketches.words("abcde")
    assert turned[0] < 0
    assert sketches.words("abcd") == (), "of four nobody can be judged"
    with sketches.seeing("a", sums):
        total += said["a"]
    assert sketches.words("abcde") == (), "nothing of it is in the sum"
    sketches.draw()
    assert sketches.words("abcde") == ()


def test_long_sum_is_seen_at_places_that_the_secret_draws_anew_for_each_step() -> None:
    one, same, other = (Sketches([torch.zeros(COORDINATES * 4)], secret) for secret in (1, 1, 2))
    (first,) = one._at
    assert len(first) == COORDINATES
    assert torch.equal(first, same._at[0])
    assert not torch.equal(first, other._at[0])
    one.draw()
    assert not torch.equal(first, one._at[0])


def test_of_more_trainers_than_there_is_room_for_the_rest_is_not_judged() -> None:
    total = torch.zeros(8)
    sums = [total]
    sketches = Sketches(sums, 1)
    names = [f"{number:04}" for number in range(MOST_TRAINERS + 1)]
    for name in names:
        with sketches.seeing(name, sums):
            total += 1.0
    assert sketches.words(names) == (*[WHOLE_WORD] * MOST_TRAINERS, 0)


def test_accumulator_takes_what_it_removes_out_of_its_trainers_share() -> None:
    seen = Accumulator(LAYOUT, "float64", torch.device("cpu"))
    assert seen.words("abcde") == ()
    seen.see_trainers(1)
    plain = Accumulator(LAYOUT, "float64", torch.device("cpu"))
    works: list[StepWork] = [StepWork(1, MicrobatchId(one, "0" * 16, 0, at)) for at, one in enumerate("abcdea")]
    for number, work in enumerate(works):
        for accumulator in (seen, plain):
            accumulator.add(work, gradients(number))
    six = seen.words("abcde")
    assert len(six) == 5
    seen.remove(works[5], gradients(5))
    five = seen.words("abcde")
    assert five != six
    seen.add(works[5], gradients(5))
    assert seen.words("abcde") == six
    assert torch.equal(seen.total, plain.total)
    seen.reset()
    assert seen.words("abcde") == ()

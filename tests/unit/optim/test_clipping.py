"""One corrupt mean does not stop the others, whatever is wrong with it; in an honest step nothing is capped."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import PartName
from swarm.optim.clipping import FAR_OUT, FASTEST, Clipping, clip_factor, clip_parts, factor, usual_lengths

HONEST = {"ends": 4.0, "stage-0": 9.0, "stage-1": 1.0}


def clipped(squares: dict[str, float], clip_norm: float = 1.0) -> Clipping:
    return clip_parts({PartName(part): square for part, square in squares.items()}, clip_norm)


def left(squares: dict[str, float], part: str, clip_norm: float = 1.0) -> float:
    """The norm with which a part's mean goes into the step."""
    found = clipped(squares, clip_norm)
    return math.sqrt(squares[part]) * factor(found.clip, found.caps.get(PartName(part), 1.0))


@given(st.lists(st.floats(1.0, FAR_OUT * 0.99), min_size=1, max_size=9), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_parts_of_like_size_are_clipped_by_one_factor_and_nothing_else(
    norms: list[float], size: float, clip_norm: float
) -> None:
    squares = {f"stage-{number}": (norm * size) ** 2 for number, norm in enumerate(norms)}
    total = 0.0
    for square in squares.values():
        total += square
    assert clipped(squares, clip_norm) == Clipping(math.sqrt(total), clip_factor(math.sqrt(total), clip_norm), {})


@pytest.mark.parametrize("corrupt", [1e30, 1e38, 1e50])
@pytest.mark.parametrize("liar", HONEST)
def test_one_corrupt_part_of_three_leaves_the_others_what_they_had(liar: str, corrupt: float) -> None:
    squares = {**HONEST, liar: corrupt**2}
    found = clipped(squares)
    assert list(found.caps) == [liar]
    assert left(squares, liar) <= 1.0
    for part in HONEST.keys() - {liar}:
        assert left(squares, part) >= 0.5 * left(HONEST, part)
    today = clip_factor(math.sqrt(sum(squares.values())), 1.0)
    assert today < 1e-29, "one factor for all would have left nothing of the others"


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e9, math.inf])
@pytest.mark.parametrize("lie", [1e-160, 1e-30, 1e30])
def test_of_two_parts_the_honest_one_keeps_what_it_would_have_alone(lie: float, clip_norm: float) -> None:
    squares = {"ends": 4.0, "stage-0": lie**2}
    alone = left({"ends": 4.0}, "ends", clip_norm)
    if clip_norm < math.inf or lie < 1.0:  # without a bound nobody knows which of two is too large
        assert left(squares, "ends", clip_norm) >= 0.5 * alone


def test_variants_that_saw_little_do_not_make_who_saw_much_far_out() -> None:
    """Three of four saw a microbatch each, of hundreds: all together they are a stage like the others."""
    few = {f"stage-1.v{each}of4": 1e-4 for each in range(1, 4)}
    squares = {"ends": 4.0, "stage-0": 1.0, "stage-1.v0of4": 9.0, **few}
    assert math.sqrt(1e-4) * FAR_OUT < 1.0, "the lower median of all parts would have capped all others"
    assert clipped(squares).caps == {}
    liar = {**squares, "stage-1.v2of4": 1e60}
    assert list(clipped(liar).caps) == ["stage-1.v2of4"]
    alone = {f"stage-0.v{each}of4": 1.0 for each in range(4)}
    assert list(clipped({**alone, "stage-0.v3of4": 1e60}).caps) == ["stage-0.v3of4"]


def test_parts_without_any_gradient_say_nothing_about_the_others() -> None:
    assert clipped({"ends": 4.0, "stage-0": 0.0, "stage-1": 0.0}).caps == {}
    assert clipped({"ends": 0.0, "stage-0": 0.0}) == Clipping(0.0, 1.0, {})


def test_norms_in_another_order_give_the_same_bits() -> None:
    squares = {f"stage-{number}": 0.1 * number + 1e-3 for number in range(9)} | {"ends": 1e60}
    assert clipped(squares) == clipped(dict(reversed(squares.items())))


def test_factor_below_the_smallest_float32_leaves_nothing() -> None:
    assert factor(0.5, 1e-30) == 5e-31
    assert factor(0.5, 1e-39) == 0.0


# --- what is usual of microbatches -----------------------------------------------------------------------------------

lengths = st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))


@given(st.lists(lengths, min_size=1, max_size=9), lengths)
def test_usual_is_what_a_replica_said_or_a_bounded_step_towards_it(
    said: list[tuple[float, float]], before: tuple[float, float]
) -> None:
    usual = usual_lengths(before, said)
    for at in range(2):
        told = sorted(one[at] for one in said if one[at])
        if not told:
            assert usual[at] == before[at]
        elif before[at]:
            assert before[at] / FASTEST <= usual[at] <= before[at] * FASTEST
        else:
            assert usual[at] == told[(len(told) - 1) // 2]


def test_one_replica_of_three_moves_what_is_usual_no_further_than_the_others_are() -> None:
    for lie in (1e-30, 0.0, 1e30):
        assert 1.0 <= usual_lengths((1.0, 1.0), [(1.0, 1.0), (1.2, 1.2), (lie, lie)])[0] <= 1.2
    assert usual_lengths((1.0, 0.0), [(1e-30, 0.0)] * 3) == (0.5, 0.0)
    assert usual_lengths((0.0, 0.0), []) == (0.0, 0.0)

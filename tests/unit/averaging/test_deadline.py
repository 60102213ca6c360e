"""How long a part's averaging may take: by bytes and links, from below by any question, and bounded for liars."""

from __future__ import annotations

import pytest

from swarm.averaging.deadline import LONGEST_S, MARGIN, SLOWER, UNMEASURED_BYTES_PER_S, rate_needed, round_deadline

MB = 1_000_000
ORDINARY_S = 120.0


@pytest.mark.parametrize("rates", [[], [5], [0, 0], [12 * MB, 12 * MB, 12 * MB]])
def test_small_parts_have_what_any_question_has(rates: list[int]) -> None:
    found = round_deadline(10 * MB, rates, ordinary_s=ORDINARY_S)
    assert found.seconds == ORDINARY_S
    assert found.reason


@pytest.mark.parametrize(
    ("rates", "one_reduces", "seconds"),
    [
        ([1_250_000, 1_250_000], False, 2 * 2 * 80),
        ([0, 0], False, 2 * 2 * 80),  # nobody has been measured: 10 Mbit/s
        ([0, 1_250_000, 625_000, 1_250_000], False, 2 * 4 * 160),
        ([1_250_000] * 8, False, 2 * 6 * 80),
        ([1_250_000] * 8, True, 2 * 7 * 80),
        ([1_250_000] * 2, True, 2 * 2 * 80),
    ],
)
def test_large_parts_have_what_their_bytes_take_on_the_slowest_link(
    rates: list[int], one_reduces: bool, seconds: float
) -> None:
    found = round_deadline(100 * MB, rates, ordinary_s=ORDINARY_S, one_reduces=one_reduces)
    assert found.seconds == pytest.approx(seconds)
    assert "100000000 bytes" in found.reason


@pytest.mark.parametrize("members", range(2, 40))
def test_deadline_leaves_a_round_of_a_star_on_equal_links_more_than_it_takes(members: int) -> None:
    rate, share = 1_250_000, 0.8  # of which a member's own round has so much
    takes_s = 2 * (members - 1) / members * 100 * MB / rate
    assert share * round_deadline(100 * MB, [rate] * members, ordinary_s=0.0).seconds >= 1.5 * takes_s


def test_one_that_claims_a_byte_a_second_gains_some_times_what_the_others_need() -> None:
    honest, liar = 12_500_000, 1
    fair_s = round_deadline(100 * MB, [honest] * 4, ordinary_s=0.0).seconds
    assert round_deadline(100 * MB, [honest] * 3 + [liar], ordinary_s=0.0).seconds == pytest.approx(SLOWER * fair_s)
    assert round_deadline(100 * MB, [honest, liar], ordinary_s=0.0).seconds <= SLOWER * fair_s


def test_all_that_claim_a_byte_a_second_get_a_bounded_time() -> None:
    least = UNMEASURED_BYTES_PER_S / SLOWER
    expected = MARGIN * 2 * 10 * MB / least
    assert round_deadline(10 * MB, [1, 1], ordinary_s=ORDINARY_S).seconds == pytest.approx(expected)
    found = round_deadline(10**12, [1, 1], ordinary_s=ORDINARY_S)
    assert found.seconds == LONGEST_S
    assert "more than any round may take" in found.reason
    assert round_deadline(10**12, [1, 1], ordinary_s=2 * LONGEST_S).seconds == 2 * LONGEST_S


def test_limit_far_below_the_links_of_the_others_is_too_low_and_one_that_deadlines_follow_is_not() -> None:
    thin, thick = 125_000, 12_500_000
    needed = rate_needed(500 * MB, [thick], thin, ordinary_s=ORDINARY_S)
    assert thin < needed <= thick / SLOWER, "the deadline follows a slow link no further"
    assert not rate_needed(500 * MB, [thick], needed, ordinary_s=ORDINARY_S)
    assert not rate_needed(100 * MB, [2 * thin], thin, ordinary_s=ORDINARY_S)
    assert not rate_needed(10 * MB, [thick], thin, ordinary_s=ORDINARY_S), "any question may take as long"
    assert not rate_needed(500 * MB, [], thin, ordinary_s=ORDINARY_S), "it averages with nobody"
    assert rate_needed(100 * MB, [0, 0], thin, ordinary_s=0.0) == 0, "nothing was measured: it gets the time"
    assert rate_needed(5_000 * MB, [0], thin, ordinary_s=0.0), "longer than any round may take"

"""How fast a donor gives: as fast as its own work can bear."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from swarm.state.transfer import BURST_BYTES, LEAST_BYTES_S, MAX_BYTES_S, Donation

Seconds = Callable[[Donation], float]


def steps(donation: Donation, count: int, seconds: Seconds, *, giving: bool, now: float = 0.0) -> float:
    """So many steps, each with a download in it or not; the time after them."""
    for _ in range(count):
        if giving:
            donation.give(1, now)
        now += seconds(donation)
        donation.step_closed(now)
    return now


@pytest.mark.parametrize("harmless", [4 << 20, 20 << 20])
def test_donation_finds_the_rate_at_which_steps_take_no_longer(harmless: int) -> None:
    """Every byte a second above what is harmless costs the step time."""
    donation = Donation()

    def seconds(donation: Donation) -> float:
        return 2.0 * (1.0 + max(0.0, donation.bytes_s / harmless - 1.0))

    now = steps(donation, 8, lambda _: 2.0, giving=False)
    taken = []
    for _ in range(200):
        before = now
        now = steps(donation, 1, seconds, giving=True, now=now)
        taken.append(now - before)
    assert sum(taken[20:]) / len(taken[20:]) < 2.0 * 1.10
    assert 0.6 * harmless < donation.bytes_s < 1.3 * harmless


def test_donation_that_always_harms_goes_on_slowly() -> None:
    donation = Donation()
    now = steps(donation, 8, lambda _: 2.0, giving=False)
    now = steps(donation, 30, lambda _: 3.0, giving=True, now=now)
    assert donation.bytes_s == LEAST_BYTES_S
    steps(donation, 30, lambda _: 2.0, giving=True, now=now)
    assert donation.bytes_s == MAX_BYTES_S


def test_donation_does_not_take_noise_for_harm() -> None:
    donation, rng = Donation(), random.Random(3)

    def noisy(_: Donation) -> float:
        return 2.0 * rng.uniform(0.85, 1.15)

    now = steps(donation, 32, noisy, giving=False)
    rates = []
    for _ in range(300):
        now = steps(donation, 1, noisy, giving=True, now=now)
        rates.append(donation.bytes_s)
    assert sorted(rates)[len(rates) // 2] > MAX_BYTES_S / 2


def test_donation_gives_a_burst_and_then_waits_for_more() -> None:
    donation = Donation(most=BURST_BYTES)
    donation.give(100 * BURST_BYTES, 0.0)
    assert donation.pause_s(BURST_BYTES, 1.0) == 0.0, "the run has not begun"
    donation = Donation(most=BURST_BYTES)
    donation.step_closed(0.0)
    assert donation.pause_s(BURST_BYTES, 0.0) == 0.0
    donation.give(BURST_BYTES, 0.0)
    assert donation.pause_s(BURST_BYTES // 4, 0.0) == pytest.approx(0.25)
    assert donation.pause_s(BURST_BYTES // 4, 0.25) == pytest.approx(0.0)
    assert donation.pause_s(3 * BURST_BYTES, 0.5) == pytest.approx(0.5), "never more than a full burst"

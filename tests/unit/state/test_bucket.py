"""A rate, and the bytes that may go at once."""

from __future__ import annotations

import pytest

from swarm.state.transfer import BURST_BYTES
from swarm.waiting import TokenBucket


def test_bucket_lets_a_burst_go_and_then_keeps_to_its_rate() -> None:
    bucket = TokenBucket(1 << 20, BURST_BYTES)
    assert bucket.pause_s(BURST_BYTES, 0.0) == 0.0
    bucket.take(BURST_BYTES, 0.0)
    assert bucket.pause_s(1 << 20, 0.0) == pytest.approx(1.0)
    assert bucket.pause_s(1 << 20, 0.75) == pytest.approx(0.25)
    assert bucket.pause_s(1 << 20, 1.0) == 0.0


def test_bucket_saves_up_a_burst_and_no_more() -> None:
    bucket = TokenBucket(1 << 20, BURST_BYTES)
    bucket.take(2 * BURST_BYTES, 1e6)
    assert bucket.pause_s(10 * BURST_BYTES, 1e6) == pytest.approx(2 * BURST_BYTES / (1 << 20)), "a full one will do"


def test_bucket_at_another_rate_owes_what_it_gave_at_the_one_before() -> None:
    bucket = TokenBucket(1 << 20, BURST_BYTES)
    bucket.take(BURST_BYTES, 0.0)
    bucket.change(2 << 20, 1.0)
    assert (bucket.rate, bucket.pause_s(2 << 20, 1.0)) == (2 << 20, pytest.approx(0.5))

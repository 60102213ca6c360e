"""What the benchmark ``loop`` makes of its peers' reports."""

from __future__ import annotations

import pytest

from tests.benchmarks.loop import combine, figures_of, situations
from tests.benchmarks.runner import Size

BUSY = {
    "seconds": 2.0,
    "jobs": 10,
    "sent_bytes": 4 << 20,
    "received_bytes": 6 << 20,
    "cpu_s": 1.0,
    "loop_cpu_s": 0.25,
    "loop_preempted": 8,
    "daemon_cpu_s": 0.5,
    "machine_cpu_s": 3.0,
    "p50_ms": 0.1,
    "p99_ms": 3.0,
    "max_ms": 5.0,
}
PARTNER = BUSY | {"cpu_s": 0.5, "daemon_cpu_s": 0.25}


def test_figures_of_a_round_are_rates_and_cores() -> None:
    found = figures_of(BUSY, PARTNER)
    assert (found["in_mib_s"], found["out_mib_s"], found["jobs_s"]) == (3, 2, 5)
    assert (found["loop_cpu"], found["other_threads_cpu"], found["partner_cpu"]) == (0.125, 0.375, 0.25)
    assert found["strangers_cpu"] == pytest.approx((3.0 - 2.25) / 2)


def test_combine_of_rounds_takes_medians_and_the_largest_maximum() -> None:
    rounds = [figures_of(BUSY | {"p99_ms": lag, "max_ms": 10 * lag}, PARTNER) for lag in (1.0, 2.0, 9.0)]
    found = combine(rounds)
    assert (found["lag_p99_ms"], found["lag_max_ms"]) == (2, 90)


def test_situations_ask_the_partner_for_no_device_work() -> None:
    assert [situation.order(measured=False)["device"] for situation in situations(Size.DEFAULT)] == [""] * 5
    assert situations(Size.DEFAULT)[0].order(measured=True)["device"] == "stage"

"""What a round tells about links."""

from __future__ import annotations

import pytest

from swarm.averaging.allreduce.meter import (
    MAX_BYTES_PER_S,
    MAX_LATENCY_US,
    MEASURED_BYTES,
    LinkMeasurement,
    RoundMeter,
    heard_in_all,
)
from swarm.averaging.allreduce.plan import RoundResult
from swarm.ids import PeerId
from swarm.sim.links import Links, Traffic
from swarm.sim.network import SimNetwork
from tests.harness.rigs.averaging import LoopClock, Network, make_plan, names, play, whole_numbers

A, B = PeerId("a"), PeerId("b")
MIB = 1 << 20


def test_payloads_that_come_at_the_same_time_count_their_time_once() -> None:
    meter = RoundMeter()
    meter.answered(A, 0.02)
    meter.begins(A, MIB, 1.0)
    meter.begins(A, MIB, 1.5)
    meter.arrived(A, MIB, 2.0)
    meter.arrived(A, MIB, 3.0)
    meter.begins(A, MIB, 10.0)  # nothing came meanwhile
    meter.arrived(A, MIB, 11.0)
    assert meter.heard() == {A: LinkMeasurement(10_000, MIB)}


def test_small_payloads_and_instant_ones_say_nothing_of_bandwidth() -> None:
    meter = RoundMeter()
    meter.answered(A, 0.001)
    meter.begins(A, MEASURED_BYTES - 1, 1.0)
    meter.arrived(A, MEASURED_BYTES - 1, 2.0)
    meter.arrived(A, MIB, 2.0)
    meter.begins(B, MIB, 3.0)
    meter.arrived(B, MIB, 3.0)
    assert meter.heard() == {A: LinkMeasurement(500, 0)}


def test_what_is_measured_has_bounds() -> None:
    meter = RoundMeter()
    meter.answered(A, 1e9)
    meter.begins(A, MIB, 0.0)
    meter.arrived(A, MIB, 1e-9)
    meter.answered(B, 0.0)
    assert meter.heard() == {A: LinkMeasurement(MAX_LATENCY_US, MAX_BYTES_PER_S), B: LinkMeasurement(1, 0)}


def test_later_round_that_could_not_measure_a_link_takes_nothing_back() -> None:
    first, second = (
        {A: LinkMeasurement(10, MIB), B: LinkMeasurement(7, 0)},
        {A: LinkMeasurement(20, 0), B: LinkMeasurement(0, 5)},
    )
    assert (
        heard_in_all([first, second])
        == heard_in_all([second, first])
        == {A: LinkMeasurement(10, MIB), B: LinkMeasurement(7, 5)}
    )
    assert heard_in_all([]) == {}


@pytest.mark.parametrize("schedule", ["direct", "ring"])
async def test_round_over_shaped_links_finds_the_slow_one(schedule: str) -> None:
    members = names(4)
    description = {
        "default": {"latency_ms": 10, "mbit_per_s": 800},
        "machine": [{"peer": members[3], "up_mbit_per_s": 8}],
    }
    network = Network(slowest_s=0.0)
    network._sim = SimNetwork(LoopClock(), traffic=Traffic(Links.parse(description)))
    plan = make_plan([1] * 4, 4 << 18, chunk_elements=1 << 16, schedule=schedule)
    results = await play(network, plan, whole_numbers(plan))
    before = {0: 3, 1: 0, 2: 1, 3: 2}
    for rank, peer in enumerate(members):
        result = results[peer]
        assert isinstance(result, RoundResult)
        for other, heard in result.heard.items():
            assert 10_000 <= heard.latency_us < 10_100
            if schedule == "direct" or members.index(other) == before[rank]:
                assert 0 < heard.bytes_per_s < MIB if other == members[3] else heard.bytes_per_s > 10 * MIB
            else:
                assert heard.bytes_per_s == 0

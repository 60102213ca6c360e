"""What a probe of a link measures, and what strangers may ask of it."""

from __future__ import annotations

import pytest

from swarm.errors import Busy, Violation
from swarm.ids import PeerId, RunId
from swarm.network.reach.probe import (
    ALL_BYTES_AT_ONCE,
    ALL_BYTES_S,
    MAX_PROBE_BYTES,
    PROBE,
    PROBES_A_MINUTE,
    Probe,
    ProbedLink,
    ProbeService,
    probe_link,
)
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.clocks import FakeClock, LoopClock, in_virtual_time

RUN = RunId("ab" * 32)
ME, OTHER = PeerId("me"), PeerId("other")


async def two(seconds_a_byte: float) -> tuple[LoopClock, SimEndpoint, SimEndpoint]:
    """Two peers whose link takes so long for each byte, after 10 ms; the other one has the service."""
    clock = LoopClock()
    network = SimNetwork(clock, delay=lambda source, target, size: 0.01 + size * seconds_a_byte)
    me, other = network.endpoint(ME), network.endpoint(OTHER)
    await me.enter(RUN)
    await other.enter(RUN)
    other.mount(ProbeService(clock))
    return clock, me, other


def probed(seconds_a_byte: float) -> tuple[ProbedLink, float]:
    """What is measured of such a link in 3 s, and how long that takes."""

    async def play() -> tuple[ProbedLink, float]:
        clock, me, _ = await two(seconds_a_byte)
        began = clock.monotonic()
        return await probe_link(me, OTHER, clock, within_s=3), clock.monotonic() - began

    return in_virtual_time(play())


def test_probe_link_of_a_quick_link_is_measured_with_a_mebibyte_each_way() -> None:
    link, _ = probed(1e-8)
    assert (link.up_bytes, link.down_bytes, link.problem) == (MAX_PROBE_BYTES, MAX_PROBE_BYTES, "")
    assert 3e7 < link.up < 1e8
    assert 3e7 < link.down < 1e8


def test_probe_link_of_a_thin_link_has_the_small_one_only() -> None:
    link, _ = probed(1e-5)
    assert (link.up_bytes, link.down_bytes, link.problem) == (64 << 10, 64 << 10, "")
    assert 9e4 < link.up < 1e5


def test_probe_link_too_thin_for_the_time_says_so_and_ends() -> None:
    link, took = probed(1e-3)
    assert (link.up, link.down) == (0, 0)
    assert "not all in 3 s" in link.problem
    assert took <= 3.1


def test_probe_link_of_a_peer_without_the_service_says_why() -> None:
    async def play() -> ProbedLink:
        clock, me, other = await two(1e-8)
        other.unmount(ProbeService(clock))
        return await probe_link(me, OTHER, clock, within_s=3)

    link = in_virtual_time(play())
    assert (link.up, "no method" in link.problem) == (0, True)


def test_probe_of_more_than_the_limit_is_refused_before_it_is_taken() -> None:
    async def play() -> None:
        _, me, _ = await two(1e-8)
        with pytest.raises(Violation):
            await me.call(OTHER, PROBE, Probe(answer_bytes=0), payload=bytes(MAX_PROBE_BYTES + 1), timeout_s=60)

    in_virtual_time(play())


def admitted(service: ProbeService, caller: PeerId, size: int) -> bool:
    """Whether a caller may send so much and have it back."""
    (method,) = service.methods()
    assert method.admit is not None
    try:
        method.admit(caller, Probe(answer_bytes=size), size)
    except Busy:
        return False
    return True


def test_probe_service_lets_one_caller_probe_a_few_times_a_minute() -> None:
    clock = FakeClock()
    service = ProbeService(clock)
    assert [admitted(service, ME, 1) for _ in range(PROBES_A_MINUTE + 1)] == [True] * PROBES_A_MINUTE + [False]
    assert admitted(service, OTHER, 1)
    clock.now += 61
    assert admitted(service, ME, 1)


def test_probe_service_has_one_budget_of_bytes_for_all_strangers() -> None:
    clock = FakeClock()
    service = ProbeService(clock)
    at_once = ALL_BYTES_AT_ONCE // (2 * MAX_PROBE_BYTES)
    taken = [admitted(service, PeerId(f"stranger-{number}"), MAX_PROBE_BYTES) for number in range(3 * at_once)]
    assert sum(taken) == at_once
    clock.now += 2 * MAX_PROBE_BYTES / ALL_BYTES_S
    assert [admitted(service, PeerId(f"late-{number}"), MAX_PROBE_BYTES) for number in range(2)] == [True, False]

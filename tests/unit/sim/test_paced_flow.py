"""Whole simulations by shares of throughput: what a step takes, and what coming and going does to it."""

from __future__ import annotations

from typing import Any

import pytest

from peers.chaos.schedule import Removal
from swarm.planning.workload import PartNeeds, PeerClass, Workload
from swarm.sim.flow import PacedFlow
from swarm.sim.simulation import SimulationCase, SimulationResult, quantile
from swarm.sim.turnover import FlowCase, SimMachine, Turnover


def case(*trace: Removal, speeds: tuple[float, ...] = (1.0,), hosts: int = 8, **more: Any) -> SimulationCase:
    """Two stages of four hosts, a trainer, steps of 400 microbatches; a layer takes a second at speed 1. ``even``: each
    stage has as many of each speed; else what the founder makes of it."""
    even = more.pop("even", False)
    work = Workload(
        layers=2, layer=PartNeeds(flops=1e9 / 3, parameters=1e6), embedding=PartNeeds(), head=PartNeeds(), hosted=False,
        context=1, rows=more.pop("microbatches", 400), rows_asked=1, activation_bytes=1e3, gradient_bytes=1e3,
    )  # fmt: skip
    classes = tuple(
        PeerClass(name=f"{speed:g} x", count=hosts, flops=speed * 1e9, memory=1e12, round_trip_s=0.01)
        for speed in speeds
    )
    turnover = FlowCase(
        places=hosts, stages=2, until_s=0.0, copy_s=10.0, download_s=20.0, copies_follow=True,
        rule=more.pop("rule", "none"), seed=more.pop("seed", 1),
        machines=tuple(
            SimMachine(place % len(speeds), speeds[place % len(speeds)], stage=place // 2 % 2 if even else None)
            for place in range(hosts)
        ),
    )  # fmt: skip
    kinds = {"steps": 3, "until_s": 1e6, "stages": (1, 1), "rows": 1, **more}
    return SimulationCase(work=work, classes=classes, trainers=(0,), turnover=turnover, trace=trace, **kinds)


def play(*trace: Removal, **more: Any) -> SimulationResult:
    return PacedFlow(case(*trace, **more)).run()


def gone(at_s: float, *places: int, back_s: float = 1e9) -> Removal:
    return Removal(at_s, places, (back_s,) * len(places), noticed=False)


def test_death_slows_its_stage_and_its_work_is_done_again() -> None:
    whole = play().steps[0].seconds
    found = play(gone(whole / 2, 0))
    assert found.steps[0].seconds > whole * 1.15, "a third less for half of the step, and an eighth of it again"
    assert found.steps[1].seconds == pytest.approx(whole * 4 / 3, rel=0.02)


def test_another_machine_is_let_in_with_a_record() -> None:
    found = play(gone(5.0, 0, back_s=150.0), steps=4)
    assert found.counts["joins"] == 1
    assert found.steps[3].seconds == pytest.approx(play().steps[0].seconds)


def test_lost_stage_is_given_up_and_goes_on_from_a_copy() -> None:
    there = Turnover(case(hosts=4).turnover)
    first = tuple(there.place_of[peer] for peer in there.computing()[there.parts[0]])
    found = play(gone(20.0, *first), hosts=4, steps=2)
    assert found.counts["given up"] == 1
    assert len(found.steps) == 2


def test_it_ends_when_its_time_is_over() -> None:
    whole = play().steps[0].seconds
    found = play(until_s=2.5 * whole, steps=100)
    assert len(found.steps) == 2
    assert found.ended_s == 2.5 * whole


@pytest.mark.parametrize("rule", ["none", "ours"])
def test_strong_machines_are_counted_by_speed(rule: str) -> None:
    """The first of two classes is ten times as fast; a stage that loses two of these gets one back by a move alone."""
    there = Turnover(case(speeds=(10.0, 1.0)).turnover)
    fast = [
        there.place_of[peer]
        for peer in there.computing()[there.parts[0]]
        if there.machine(peer).speed == 10.0
    ]  # fmt: skip
    found = play(gone(1.0, *fast), speeds=(10.0, 1.0), rule=rule, steps=4)
    assert (found.counts["moves"] > 0) == (rule == "ours")


def test_quantile_of_three() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0

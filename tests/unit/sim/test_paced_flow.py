"""Whole simulations by shares of throughput: what a step takes, and what coming and going does to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peers.chaos.schedule import Removal
from swarm.columns import stage_parts
from swarm.ids import shared_part, stage_part
from swarm.planning.workload import PartNeeds, PeerClass, Workload
from swarm.sim.flow import PacedFlow
from swarm.sim.journeys import JourneysPlay
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


LAW, CODE = stage_part(1, 0, 2), stage_part(1, 1, 2)


def of_variants(*trace: Removal, **more: Any) -> SimulationCase:
    """As :func:`case`, with two variants of the second stage: three of four microbatches pass the first."""
    plain, loads = case(*trace, **more), {LAW: 0.75, CODE: 0.25}
    turnover = replace(plain.turnover, parts=stage_parts(2, (1, 2)), load=loads)
    return replace(plain, turnover=turnover, work=replace(plain.work, loads=((1.0,), (0.75, 0.25))), kinds=(0.75, 0.25))


def shared_until(step: int, *trace: Removal, **more: Any) -> SimulationCase:
    plain = case(*trace, **more)
    turnover = replace(plain.turnover, parts=(shared_part(2),), delink_at=step)
    return replace(plain, turnover=turnover, work=replace(plain.work, alike=1, shared=not step))


@pytest.mark.parametrize("played", [PacedFlow, JourneysPlay])
def test_rule_moves_hosts_to_the_variant_that_more_microbatches_pass(
    played: type[PacedFlow | JourneysPlay],
) -> None:
    still, moved = (played(of_variants(hosts=9, steps=6, rule=rule)).run() for rule in ("none", "ours"))
    assert (still.held[LAW], still.held[CODE]) == (3, 3)
    assert moved.held[LAW] > moved.held[CODE] >= 1
    assert moved.kinds == pytest.approx((0.75, 0.25), abs=0.03)
    assert moved.steps[-1].seconds < still.steps[-1].seconds


@pytest.mark.parametrize("played", [PacedFlow, JourneysPlay])
def test_stages_part_with_a_record_and_lose_nothing_but_the_spare_host(
    played: type[PacedFlow | JourneysPlay],
) -> None:
    found = played(shared_until(3, hosts=5, steps=6)).run()
    assert found.held == {stage_part(0): 3, stage_part(1): 2}
    assert found.steps[1].fewest == 5
    assert found.steps[4].seconds > 1.15 * found.steps[1].seconds, "five halves before, two after"
    assert played(shared_until(0, hosts=5, steps=6)).run().held == {shared_part(2): 5}


def test_stages_that_are_to_part_wait_for_a_host_each() -> None:
    found = PacedFlow(shared_until(2, gone(1.0, 0, back_s=900.0), hosts=2, steps=4)).run()
    assert len(found.steps) == 4
    assert found.steps[1].closed_s > 900.0 > found.steps[0].closed_s
    assert found.held == {stage_part(0): 1, stage_part(1): 1}


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

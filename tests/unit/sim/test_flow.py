"""Runs of many peers, record by record: what is counted, and that the same seed gives the same run anywhere."""

from __future__ import annotations

import hashlib
import heapq
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from peers.chaos.schedule import Removal, spot_trace
from swarm.consensus.rebalance import RuleName
from swarm.sim.turnover import FlowCase, MachineRemoval, Turnover, machine_changes
from tests.harness.sources import ROOT


@dataclass(frozen=True, slots=True)
class FlowResult:
    """What came of a case. ``ratio`` is the throughput over that of the same ready peers, placed perfectly and at once;
    ``digest`` is of every record's roster and moves."""

    ratio: float
    records: int
    moves: int
    joins: int
    given_up: int
    digest: str


@dataclass(slots=True)
class Account:
    """Throughput so far, and the best that the ready peers could have had."""

    stages: int
    now_s: float = 0.0
    done: float = 0.0
    best: float = 0.0

    def pass_to(self, at_s: float, slowest: int, ready: int) -> None:
        """Until then the slowest stage had so many peers, of so many ready ones."""
        span = at_s - self.now_s
        self.done += slowest * span
        self.best += ready // self.stages * span
        self.now_s = at_s


@dataclass(slots=True)
class Flow:
    """Plays a ``case`` on a ``trace``: machines come and go at any time, the roster changes at records."""

    case: FlowCase
    trace: Sequence[MachineRemoval]
    turnover: Turnover = field(init=False)

    def __post_init__(self) -> None:
        self.turnover = Turnover(self.case)

    def run(self) -> FlowResult:
        """Play to the end."""
        case, there, account, digest = self.case, self.turnover, Account(self.case.stages), hashlib.sha256()
        changes, step = machine_changes(self.trace), 0
        while account.now_s < case.until_s:
            record_s, resumed_s = (step + 1) * case.step_s, there.resumes_s
            at_s = min(record_s, changes[0][0] if changes else math.inf, resumed_s, case.until_s)
            account.pass_to(at_s, there.fewest, there.ready)
            if resumed_s <= at_s:
                there.resume(at_s)
            elif changes and changes[0][0] <= at_s:
                _, _, place, removal = heapq.heappop(changes)
                _ = there.comes(place, at_s) if removal is None else there.goes(place, removal)
            elif record_s <= at_s:
                step += 1
                moves = there.close(step, at_s).moves
                held = sorted(Counter(member.part or "" for member in there.roster.members).items())
                digest.update(f"{step}|{held}|{moves}".encode())
        counts = there.counts
        ratio = account.done / account.best
        return FlowResult(ratio, step, counts["moves"], counts["joins"], counts["given up"], digest.hexdigest())


def play(*trace: Removal, **more: Any) -> FlowResult:
    """Four peers of two stages for ten steps."""
    return Flow(FlowCase(**({"places": 4, "stages": 2, "until_s": 300.0} | more)), trace).run()


def gone(at_s: float, *places: int, back_s: float = 1e9, noticed: bool = False) -> Removal:
    """These places lose their machines, for ever unless it is said when they have others."""
    return Removal(at_s, places, (back_s,) * len(places), noticed)


def test_death_costs_its_stage_at_once_and_is_replaced_with_a_record() -> None:
    """One of six: ⌊5/2⌋ is what the others could do, so nothing is lost by that alone."""
    assert play(gone(75.0, 0), places=6).ratio == 1.0
    found = play(gone(75.0, 0, back_s=95.0))
    assert (found.joins, found.ratio) == (1, 1.0)
    two = play(gone(70.0, 0, 2), places=8, until_s=140.0)
    assert two.ratio == pytest.approx((4 * 70 + 2 * 70) / (4 * 70 + 3 * 70)), "both were of the first stage"


def test_copies_let_a_peer_move_where_two_are_lost() -> None:
    lost = (gone(70.0, 0, 2),)
    found = play(*lost, places=8, rule="ours")
    assert found.moves == 1
    assert found.ratio > play(*lost, places=8).ratio
    swarm = play(*lost, places=8, rule="swarm", every_s=60.0)
    assert swarm.moves > 0, "the published rule moves one, too, which downloads first"
    assert swarm.ratio < found.ratio


def test_stage_that_is_lost_goes_on_from_a_copy() -> None:
    found = play(gone(70.0, 1, 3), places=5)
    assert found.given_up == 1
    assert 0 < found.ratio < 1


def test_noticed_machine_stays_to_the_end_of_the_step() -> None:
    trace = (gone(75.0, 0, 2, noticed=True),)
    assert play(*trace, places=8, notices=True, until_s=90.0).ratio == 1.0
    assert play(*trace, places=8, until_s=90.0).ratio < 1.0


def case(rule: RuleName, seed: int = 3) -> FlowResult:
    """Half an hour of a spot market."""
    trace = spot_trace(places=60, churn=0.02, step_s=30.0, until_s=1800.0, seed=seed)
    periods = {"swarm": 60.0}
    flow = FlowCase(
        places=60, stages=6, until_s=1800.0, rule=rule, every_s=periods.get(rule, 0.0), notices=True, seed=seed
    )
    return Flow(flow, trace).run()


def test_same_seed_gives_the_same_records_whatever_strings_hash_to() -> None:
    here = [case("swarm"), case("ours")]
    code = "from tests.unit.sim.test_flow import case; print([case('swarm'), case('ours')])"
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert there.stdout == f"{here}\n", there.stderr
    assert all(found.moves > 0 for found in here)
    assert case("ours", seed=4).digest != here[1].digest

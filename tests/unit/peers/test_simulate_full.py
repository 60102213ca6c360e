"""Simulations with all of a peer: beside the journeys of the same case, and machines that are taken."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from peers.cli.app import run
from peers.exit_codes import EXIT_USAGE
from peers.simulate import full
from peers.simulate.full import FullPlay
from peers.simulate.scenario_file import case_of, read_scenario
from swarm.sim.journeys import JourneysPlay
from swarm.sim.loop import run_world
from swarm.sim.simulation import SimulationCase

SCENARIO = """
model = "tiny"
steps = 3
stages = 2
microbatches = 12
rows = 2
[[peers]]
name = "home"
count = 5
train = 1
flops = 1e9
memory_gib = 4
round_trip_ms = 20
"""


def scenario(folder: Path, more: str = "") -> SimulationCase:
    path = folder / "scenario.toml"
    path.write_text(SCENARIO + more)
    return case_of(read_scenario(path), path, "full", 1)[0]


def test_full_is_as_fast_as_its_journeys(tmp_path: Path) -> None:
    case = scenario(tmp_path)
    found, journeys = FullPlay(case).run(), JourneysPlay(case).run()
    assert [step.step for step in found.steps] == [1, 2, 3]
    assert found.steps[-1].seconds == pytest.approx(journeys.steps[-1].seconds, rel=0.1)
    assert (found.counts["joins"], found.steps[-1].fewest) == (0, 2)


def test_full_takes_machines_and_repeats_itself(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("3, 1, 2\n")
    case = scenario(tmp_path, '[churn]\nfile = "trace.csv"\n')
    found = FullPlay(case).run()
    assert found.more["killed"] == 1
    assert len(found.steps) == 3
    assert FullPlay(case).run() == found


def test_full_moves_hosts_by_the_rule_ours(tmp_path: Path) -> None:
    """One of the three of the second stage goes where there is one."""
    path = tmp_path / "scenario.toml"
    more = SCENARIO.replace("count = 5", "count = 4\nstage = 1").replace("steps = 3", "steps = 6")
    one = '[[peers]]\nname = "one"\nflops = 1e9\nmemory_gib = 4\nstage = 0\n'
    path.write_text('rebalance = "ours"\n' + more + one)
    case = case_of(read_scenario(path), path, "full", 1)[0]
    found = FullPlay(case).run()
    assert found.counts["moves"] == 1
    assert found.steps[-1].fewest == 2


VARIANTS = """
[run]
start_when = { stage_hosts = 3, trainers = 2 }
[split]
stages = 2
variants = [1, 2]
route_by = "domain"
domains = ["law", "code"]
"""


def test_full_plays_variants_and_stages_that_part(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(VARIANTS)
    path, model = tmp_path / "scenario.toml", str(tmp_path / "run.toml")
    path.write_text(
        SCENARIO.replace("tiny", model).replace("stages = 2", "kinds = [1, 2]").replace("train = 1", "train = 2")
    )
    found = FullPlay(case_of(read_scenario(path), path, "full", 1)[0]).run()
    assert found.held == dict.fromkeys(("stage-0", "stage-1.v0of2", "stage-1.v1of2"), 1)
    assert len(found.steps) == 3
    assert sum(found.kinds) == pytest.approx(1.0)
    assert min(found.kinds) > 0.1, "each trainer brings one kind"
    (tmp_path / "run.toml").write_text('[run]\nsteps = 9\n[model]\nshare = "stages"\ndelink_at = 2\n')
    path.write_text(SCENARIO.replace("tiny", model).replace("steps = 3", "steps = 4"))
    parted = FullPlay(case_of(read_scenario(path), path, "full", 1)[0]).run()
    assert [step.fewest for step in parted.steps] == [4, 2, 2, 2]
    assert parted.held == {"stage-0": 2, "stage-1": 2}


def test_full_has_the_rule_that_peers_have_and_no_crowds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text('rebalance = "swarm"\n' + SCENARIO)
    assert run(["simulate", str(path), "--fidelity", "full"]) == EXIT_USAGE
    assert "rebalance = 'swarm'" in capsys.readouterr().err
    path.write_text(SCENARIO.replace("count = 5", "count = 65"))
    assert run(["simulate", str(path), "--fidelity", "full"]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert "at most 64 peers, and there are 65" in told
    assert "--fidelity journeys" in told


def test_signal_ends_the_world_and_not_the_task_that_runs_just_then() -> None:
    """What a handler raises inside a task is that task's own end, which its border may swallow."""
    heard: list[int] = []

    async def swallows() -> None:
        with contextlib.suppress(BaseException):  # as a border that lets nothing through
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(1000.0)
        pytest.fail("the world went on")

    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with full._stopped_by_signals():
            run_world(swallows())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]

"""The number of steps of a local run: by a measurement, within the minutes, and not where somebody says it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.commands.quickstart import plan_run
from peers.founding_files import pending
from peers.home.run_directory import RunDirectory
from peers.local.launch import PeerGroup
from peers.local.pace import (
    AROUND,
    CLOSING_S,
    CLOSING_TOKENS,
    ENOUGH_STEPS,
    FEWEST_STEPS,
    FILLED,
    MINUTES,
    MOST_READINGS,
    Pace,
    Speed,
    fitting,
)
from peers.local.progress import RunView
from peers.local.run import LocalRun
from peers.options.foundation import Foundation
from peers.options.local import LocalOptions
from peers.presets import load_preset
from swarm.config import Manifest, parse_manifest
from swarm.errors import ConfigError
from swarm.monitoring.reader import EventTail
from tests.harness.rigs.clocks import FakeClock

LARGE = 10**12
NOTHING: frozenset[str] = frozenset()


def tiny(**tables: Mapping[str, Any]) -> Manifest:
    """The preset of a quickstart, with two replicas of each stage and two trainers."""
    document = load_preset("tiny")
    tables = {"run": {"start_when": {"stage_hosts": 4, "trainers": 2}}} | tables
    changed = {name: document.get(name, {}) | said for name, said in tables.items()}
    return parse_manifest(pending(document | changed), "the test")


def speed(microbatch_s: float) -> Speed:
    """That of a machine on which messages cost nothing besides a fixed time."""
    return Speed(microbatch_s=microbatch_s, flops=1e12)


def paced(microbatch_s: float, minutes: float = 1.5, *, said: frozenset[str] = NOTHING, tokens: int = LARGE) -> Pace:
    """What is chosen for the preset."""
    return fitting(tiny(), speed(microbatch_s), minutes, said=said, tokens=tokens)


def test_steps_are_those_that_fit_into_the_minutes() -> None:
    pace = paced(0.02)
    assert pace.batch.tokens == 16 * 8 * 128
    assert pace.step_s == pytest.approx((16 * 1024 + 2 * CLOSING_TOKENS) * 0.02 * AROUND / 1024 + CLOSING_S)
    assert pace.steps == int(90 * FILLED / pace.step_s) >= ENOUGH_STEPS
    late = fitting(tiny(), speed(0.01), 1.5, said=NOTHING, tokens=LARGE, late_s=45)
    assert late.steps == pytest.approx(0.9 * pace.steps, abs=5)
    assert paced(0.02, minutes=6).steps == pytest.approx(4 * pace.steps, abs=4)


@pytest.mark.parametrize(
    ("microbatch_s", "said", "shape"),
    [
        (0.001, NOTHING, (16, 8, 128)),
        (0.1, NOTHING, (4, 8, 128)),
        (1.0, NOTHING, (2, 1, 128)),
        (0.1, frozenset({"microbatches"}), (16, 2, 128)),
        (0.3, frozenset({"microbatches", "rows", "context"}), (16, 8, 128)),
    ],
)
def test_slower_machines_have_smaller_batches_unless_they_are_said(
    microbatch_s: float, said: frozenset[str], shape: tuple[int, int, int]
) -> None:
    batch = paced(microbatch_s, said=said).batch
    assert (batch.microbatches, batch.rows, batch.context) == shape


def test_minutes_that_are_too_few_for_a_handful_of_steps_say_how_many_are_not() -> None:
    with pytest.raises(ConfigError) as refused:
        paced(2.0, 0.5, said=frozenset({"microbatches", "rows"}))
    error = refused.value
    assert (error.key, error.value) == ("--minutes", 0.5)
    assert "here a step takes about " in error.why
    assert "--batch or --rows" in error.remedy
    enough = float(error.allowed.split()[0])
    assert paced(2.0, enough, said=frozenset({"microbatches", "rows", "context"})).steps >= FEWEST_STEPS


def test_little_text_is_not_learned_by_heart() -> None:
    pace = paced(0.001, tokens=500_000)
    assert pace.full
    assert pace.steps * pace.batch.tokens == pytest.approx(MOST_READINGS * 500_000, rel=0.01)
    assert "8 times" in pace.described("cpu", 1.5)


def test_steps_of_a_run_that_trains_apart_are_rounds() -> None:
    apart = tiny(averaging={"mode": "local", "local": {"steps": 8}})
    pace = fitting(apart, speed(0.02), 1.5, said=NOTHING, tokens=LARGE)
    in_rounds = paced(0.02).steps / 8
    assert in_rounds <= pace.steps <= 1.3 * in_rounds  # a round is closed once


@pytest.mark.parametrize(
    ("said", "steps", "minutes"),
    [
        ({}, None, MINUTES),
        ({"minutes": 3.0}, None, 3.0),
        ({"steps": 5}, None, None),
        ({"reproducible": True}, None, None),
        ({"preset": "small"}, None, MINUTES),
        ({"strategy": "grid", "mode": "overlap"}, None, MINUTES),
        ({"local_steps": 4}, None, MINUTES),
        ({}, 7, None),
        ({"minutes": 2.0}, 7, 2.0),
    ],
    ids=str,
)
def test_who_says_the_steps(tmp_path: Path, said: dict[str, Any], steps: int | None, minutes: float | None) -> None:
    foundation = {key: value for key, value in said.items() if key != "minutes"}
    if steps is not None:
        peers = "start_when = { stage_hosts = 4, trainers = 2 }"
        (tmp_path / "RUN.toml").write_text(f"[run]\nsteps = {steps}\n{peers}\n")
        foundation["file"] = tmp_path / "RUN.toml"
    planned = plan_run(Foundation(**foundation), LocalOptions(minutes=said.get("minutes")))
    assert planned.minutes == minutes
    if steps is not None:
        assert planned.manifest.run.steps == steps


def test_run_whose_time_is_up_ends_once_there_are_trained_weights(tmp_path: Path) -> None:
    clock, view = FakeClock(), RunView()
    directory, group = RunDirectory(tmp_path), PeerGroup(tmp_path / "launch.log")
    tail, ends = EventTail({}), clock.wall() + 60
    run = LocalRun(manifest=tiny(), directory=directory, device="cpu", group=group, tail=tail, view=view, clock=clock,
                   on_change=lambda: None, ends=ends)  # fmt: skip
    found = []
    for step, seconds in ((0, 30.0), (0, 60.0), (12, 0.0)):
        clock.now += seconds
        view.checkpoint_steps.add(step)
        found.append(run.time_is_up)
    assert found == [False, False, True]
    run.ends = None
    assert not run.time_is_up


def test_batch_of_a_file_is_said_and_that_of_a_preset_is_not(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text("[batch]\nmicrobatch_size = 4\n[run]\nstart_when = { stage_hosts = 4 }\n")
    in_file = plan_run(Foundation(file=tmp_path / "RUN.toml"), LocalOptions(minutes=1.0))
    assert in_file.batch_said == {"rows", "context"}
    assert plan_run(Foundation(batch=4), LocalOptions()).batch_said == {"microbatches", "context"}

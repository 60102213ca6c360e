from __future__ import annotations

import json
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from peers.manifest_file import render_manifest
from peers.plot import loss_svg, ticks
from peers.prepare import RunShape, make_manifest
from peers.report import Evaluation, Outcome, RunFacts, build_report, render_report, write_report
from peers.run_directory import create_run_directory, find_run_directory
from peers.run_view import RunView, StepView
from peers.words import one_line
from swarm.clock import SystemClock
from swarm.config import parse_manifest
from swarm.errors import ConfigError, StateError

FACTS = RunFacts(run=None, directory="d", peers=2, stages=2, trainers=1, steps_wanted=5, began=10.0, ended=20.0)
FAILED = Outcome(exit_reason="peer_failed", exit_code=3, message="a died", blamed="a")
SHAPE = RunShape(steps=5, peers=3, stages=2, trainers=1, seed=7, ends="hosted", reproducible=True)


def test_report_run_that_never_started_is_complete_and_null() -> None:
    report = build_report(FACTS, RunView(), Evaluation(), FAILED)
    assert report["steps"] == 0
    assert all(report[key] is None for key in ("loss_first", "loss_last", "tokens_per_s", "seconds_to_first_step"))
    assert report["failed_peer"] == "a"
    assert json.loads(render_report(report)) == report


def test_report_diverged_loss_is_null_in_strict_json() -> None:
    view = RunView()
    view.steps[1] = StepView(1, float("nan"), 10, 12.0, 1.0, {})
    text = render_report(build_report(FACTS, view, Evaluation(), FAILED))
    assert json.loads(text)["losses"] == [None]


def test_write_report_replaces_whole_or_explains(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_report({"a": 1}, path)
    write_report({"a": 2}, path)
    assert json.loads(path.read_text()) == {"a": 2}
    with pytest.raises(StateError, match="not written"):
        write_report({}, path / "below-a-file.json")
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_loss_svg_is_well_formed_and_holds_every_value() -> None:
    text = loss_svg("a < b & c", [(1, 7.5), (2, float("inf")), (3, 4.25)], [(0, 7.6), (3, 4.5)])
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b & c", "7.60", "4.50", "loss (nats per token)", "held-out text"} <= set(words)
    assert text.count(",") >= 2


@pytest.mark.parametrize("points", [[], [(1, 3.0)], [(1, 3.0), (2, 3.0)]])
def test_loss_svg_degenerate_run_still_draws(points: list[tuple[int, float]]) -> None:
    ElementTree.fromstring(loss_svg("t", points, []))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 60), (3.2, 7.9), (-0.001, 0.001), (1e6, 3e6)])
def test_ticks_any_range_are_few_and_inside(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 8
    assert all(low <= mark <= high * (1 + 1e-9) for mark in marks)


def test_manifest_file_read_back_is_the_same_run() -> None:
    manifest = make_manifest(SHAPE, "a" * 64)
    assert parse_manifest(tomllib.loads(render_manifest(manifest)), "test").run_id == manifest.run_id
    assert manifest.run.stage_hosts == 3


def test_run_directory_default_is_new_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="quickstart"):
        find_run_directory(None)
    made = create_run_directory(None, SystemClock())
    made.manifest.touch()
    assert made.root.parent == Path("out")
    assert find_run_directory(None) == made


def test_one_line_any_text_is_harmless() -> None:
    assert one_line("a\n\x1b[31mb\x00  c") == "a [31mb c"
    assert len(one_line("x" * 1000)) == 300

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from peers.commands.preflight import check_device
from peers.console.words import age_of_checkpoint, command_name, one_line
from peers.local.plot import loss_svg, loss_text
from peers.local.progress import RunView
from peers.local.report import Evaluation, RunFacts, RunOutcome, build_report, closed_steps, render_report, write_report
from swarm.errors import ConfigError, StateError
from swarm.events import Committed, Event, JourneyStarted, StepClosed
from swarm.ids import PeerId
from swarm.monitoring.reader import Recorded, RecordedEvent
from tests.harness.rigs.peers import batch

FACTS = RunFacts(run=None, directory="d", peers=2, stages=2, trainers=1, steps_wanted=5, began=10.0, ended=20.0)
FAILED = RunOutcome(exit_reason="peer_failed", exit_code=3, message="a died", blamed="a")


def _view(*events: Event) -> RunView:
    view = RunView()
    for event in events:
        view.add(RecordedEvent("a", Recorded(12.0, 12.0, PeerId("A"), event)))
    return view


def _closed(step: int, **changes: Any) -> StepClosed:
    fields: dict[str, Any] = {
        "step": step, "loss": 5.0, "tokens": 10, "microbatches": 2, "grad_norm": 1.0, "clip": 1.0, "lr": 0.1,
        "digests": {}, "leader": PeerId("A"), "record": "r", "seconds": 1.0,
    }  # fmt: skip
    return StepClosed(**(fields | changes))


def test_report_run_that_never_started_is_complete_and_null() -> None:
    report = build_report(FACTS, RunView(), Evaluation(), FAILED)
    assert report["steps"] == 0
    assert all(report[key] is None for key in ("loss_first", "loss_last", "tokens_per_s", "seconds_to_first_step"))
    assert report["failed_peer"] == "a"
    assert json.loads(render_report(report)) == report


def test_report_documentation_names_every_key() -> None:
    documented = build_report.__doc__ or ""
    missing = [key for key in build_report(FACTS, RunView(), Evaluation(), FAILED) if f"``{key}``" not in documented]
    assert missing == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"steps": null}'])
def test_closed_steps_of_no_usable_report_are_unknown(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert closed_steps(path) is None
    write_report(build_report(FACTS, _view(_closed(1)), Evaluation(), FAILED), path)
    assert closed_steps(path) == 1


@pytest.mark.parametrize(
    ("step", "closed", "said"),
    [
        (0, None, "step 0, the untrained weights"),
        (0, 1, "the untrained weights; the run closed 1 step"),
        (20, 33, "step 20; the run closed 33 steps"),
    ],
)
def test_age_of_checkpoint_untrained_or_old_is_said(step: int, closed: int | None, said: str) -> None:
    assert (age_of_checkpoint(step, closed) or "").endswith(said)


def test_check_device_gpu_without_a_driver_is_refused(tmp_path: Path) -> None:
    check_device("cpu", tmp_path)
    with pytest.raises(ConfigError, match="no GPU driver"):
        check_device("cuda:1", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    check_device("cuda:1", tmp_path)


@pytest.mark.parametrize("device", ["banana", "cuda:", "cuda:0\n", "", "CPU"])
def test_check_device_wrong_form_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="cpu, cuda or cuda:N"):
        check_device(device)


def test_report_diverged_loss_is_null_in_strict_json() -> None:
    text = render_report(build_report(FACTS, _view(_closed(1, loss=float("nan"))), Evaluation(), FAILED))
    assert json.loads(text)["losses"] == [None]


def test_report_run_that_ended_early_calls_nothing_lost_that_is_not() -> None:
    issued = [JourneyStarted(step=1 + position // 3, microbatch=batch(position), route=()) for position in range(5)]
    report = build_report(
        FACTS, _view(*issued, Committed(step=1, microbatches=(batch(0), batch(1))), _closed(1)), Evaluation(), FAILED
    )
    counts = {key: report[f"microbatches_{key}"] for key in ("issued", "committed", "lost", "uncommitted")}
    assert counts == {"issued": 5, "committed": 2, "lost": 1, "uncommitted": 2}
    assert report["microbatches_uncommitted_reason"] == "2 of a step that was open when the run ended"


def test_report_closed_step_without_its_list_says_so() -> None:
    view = _view(JourneyStarted(step=1, microbatch=batch(0), route=()), _closed(1))
    report = build_report(FACTS, view, Evaluation(), FAILED)
    assert (report["microbatches_lost"], report["microbatches_uncommitted"]) == (0, 1)
    assert "list of microbatches is in no event" in report["microbatches_uncommitted_reason"]


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


def test_loss_text_falls_from_the_top_left_to_the_bottom_right() -> None:
    lines = loss_text([(1, 8.0), (2, float("nan")), (3, 6.0), (4, 4.0)], rows=3)
    assert lines == ["   8.00 |*", "        |  *", "   4.00 |   *", "        +----", "   step  1  4"]
    assert loss_text([(1, 3.0)]) == []
    assert len(loss_text([(1, 3.0), (2, 3.0)])) == 10


def test_one_line_any_text_is_harmless() -> None:
    assert one_line("a\n\x1b[31mb\x00  c") == "a [31mb c"
    assert len(one_line("x" * 1000)) == 300


@pytest.mark.parametrize(
    ("program", "on_path", "typed"),
    [
        ("venv/bin/swarm", False, "venv/bin/swarm"),
        ("venv/bin/swarm", True, "swarm"),
        ("peers/cli/__main__.py", False, "venv/bin/swarm"),
        ("peers/cli/__main__.py", True, "swarm"),
    ],
)
def test_command_name_is_what_the_shell_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, on_path: bool, typed: str
) -> None:
    command = tmp_path / "venv" / "bin" / "swarm"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [program])
    monkeypatch.setattr("sys.executable", str(command.with_name("python")))
    monkeypatch.setenv("PATH", os.pathsep.join(["/nowhere", *([str(command.parent)] if on_path else [])]))
    assert command_name() == typed


def test_command_name_without_a_command_is_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["peers/cli/__main__.py"])
    monkeypatch.setattr("sys.executable", str(tmp_path / "a b" / "python"))
    assert command_name() == f"'{tmp_path}/a b/python' -m peers.cli"

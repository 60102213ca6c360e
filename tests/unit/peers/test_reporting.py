"""``--report-to``: what trackers get of a run, with stand-ins for their libraries, and that they cost it nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from peers.commands.preflight import check_reporting
from peers.commands.quickstart import plan_run, quickstart
from peers.manifest_file import render_manifest
from peers.options.foundation import Foundation
from peers.options.local import LocalOptions
from peers.options.model import PeerOptions
from peers.options.reading import blaming, read_peer_options
from peers.reporting import reporter
from peers.reporting.reporter import Reporting, StepFigures, reporting_of
from peers.reporting.trackers import without_secrets
from swarm.clock import SystemClock
from swarm.errors import ConfigError, install_command
from swarm.events import (
    Event,
    EventList,
    LinkUsage,
    LoopLag,
    PeerStopped,
    RosterChanged,
    RunFound,
    RunStarted,
    Waiting,
)
from swarm.ids import PeerId, RunId
from swarm.monitoring.recorder import Recorder
from tests.harness.rigs.clocks import FakeClock
from tests.harness.rigs.peers import KeptRun
from tests.harness.rigs.peers import closed as closed_in
from tests.harness.settings import peer_settings

pytestmark = pytest.mark.usefixtures("clean_environment", "elsewhere")

RUN = RunId("5a" * 32)
KEY = "0123456789abcdef0123456789abcdef01234567"
FOUND = RunFound(run=RUN, name="tiny", stages=2, steps=9, wire=2, source=PeerId("a"))
STARTED = RunStarted(run=RUN, stages=2, roster=({}, {}, {}), parameters=10)
STOPPED = PeerStopped(reason="the run is over", exit_code=0)


def closed(step: int, **changes: Any) -> Event:
    fields = {"loss": 4.0, "microbatches": 4, "grad_norm": 2.0, "clip": 0.5, "lr": 0.25, "seconds": 2.0}
    return closed_in(step, **(fields | changes)).record.event


EVENTS: tuple[Event, ...] = (
    FOUND, STARTED, LoopLag(p50_ms=1.0, p99_ms=2.0, max_ms=3.0), closed(1),
    LinkUsage(step=1, bytes_sent=7, bytes_received=8),
)  # fmt: skip
STEP = {
    "tokens": 100, "microbatches": 4, "lr": 0.25, "loss": 4.0, "grad_norm": 2.0, "tokens_per_s": 50.0, "step_s": 2.0,
    "members": 3, "loop_lag_p50_ms": 1.0, "loop_lag_max_ms": 3.0,
}  # fmt: skip
BYTES = {"bytes_sent": 7, "bytes_received": 8}


def told(names: str, directory: Path, *events: Event) -> EventList:
    """Report these events, and the end, from the first to the last."""
    sink = EventList()
    reporting = Reporting(sink, names.split(","), directory, "otter", FakeClock())
    for event in (*events, STOPPED):
        reporting.emit(event)
    reporting.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "reporting"], "it ended"
    return sink


# --- the figures -----------------------------------------------------------------------------------------------------


def test_members_follow_the_roster() -> None:
    figures = StepFigures()
    assert "members" not in figures.take(closed(1))[1], "nobody knows before the first roster"
    for event in (STARTED, RosterChanged(step=2, joined=({}, {}), left=({},))):
        assert figures.take(event) is None
    assert figures.take(closed(2))[1]["members"] == 4


def test_what_is_no_number_or_no_whole_step_is_left_out() -> None:
    figures = StepFigures()
    given_up = figures.take(closed(1, microbatches=0, loss=float("nan")))[1]
    assert not {"loss", "grad_norm"} & given_up.keys()
    assert "loss" not in figures.take(closed(2, loss=float("inf")))[1]
    assert not {"tokens_per_s", "step_s"} & figures.take(closed(3, whole=False))[1].keys()
    assert figures.take(Waiting(what="")) is None


# --- each tracker ----------------------------------------------------------------------------------------------------


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for the three, which note what is asked of them."""
    noted: list[Any] = []

    def note(name: str, result: Any = None) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            noted.append((name, given, named))
            return result

        return called

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None, origin=f"{name}.py")
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    writer = SimpleNamespace(add_text=note("text"), add_scalar=note("scalar"), close=note("close"))
    module("tensorboard")
    module("torch.utils.tensorboard", SummaryWriter=note("writer", writer))
    run = SimpleNamespace(define_metric=note("metric"), log=note("log"), finish=note("finish"))
    module("wandb", init=note("init", run), Settings=note("settings", "settings"), teardown=note("teardown"))
    client = SimpleNamespace(
        get_experiment_by_name=note("experiment"), create_experiment=note("create", "7"),
        create_run=note("run", SimpleNamespace(info=SimpleNamespace(run_id="r1"))),
        log_batch=note("batch"), set_terminated=note("terminated"),
    )  # fmt: skip
    module("mlflow", MlflowClient=note("client", client))
    module("mlflow.entities", Param=lambda *given: given, Metric=lambda *given: given)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", KEY)
    for name in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "false")  # they are set where they are not, and put back by this
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return noted


FACTS = {"name": "tiny", "run": RUN, "steps": 9, "stages": 2, "wire": 2, "peer": "otter"}


def test_tensorboard_gets_scalars_by_step(libraries: list[Any], tmp_path: Path) -> None:
    told("tensorboard", tmp_path, *EVENTS)
    scalars = {given[0]: given[1:] for name, given, named in libraries if name == "scalar"}
    assert scalars == {name: (value, 1) for name, value in (STEP | BYTES).items()}
    assert libraries[0] == ("writer", (), {"log_dir": str(tmp_path / "tensorboard")})
    assert libraries[-1][0] == "close"


def test_wandb_gets_figures_by_step_and_nothing_of_this_machine(libraries: list[Any], tmp_path: Path) -> None:
    told("wandb", tmp_path, *EVENTS)
    by_name = {name: (given, named) for name, given, named in libraries}
    settings = by_name["settings"][1]
    assert settings["x_disable_meta"] is True, "the command line may have an invite"
    assert settings["console"] == "off"
    started = by_name["init"][1]
    assert started == {
        "project": "swarm", "name": "tiny-otter", "config": FACTS, "dir": str(tmp_path / "wandb"),
        "settings": "settings",
    }  # fmt: skip
    assert [given[0] for name, given, _ in libraries if name == "log"] == [STEP | {"step": 1}, BYTES | {"step": 1}]
    assert [name for name, *_ in libraries][-2:] == ["finish", "teardown"]


def test_mlflow_gets_figures_by_step_in_files_or_where_its_variable_says(
    libraries: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told("mlflow", tmp_path, *EVENTS)
    assert libraries[0] == ("client", (), {"tracking_uri": (tmp_path / "mlflow").as_uri()})
    assert ("run", ("7",), {"run_name": "tiny-otter"}) in libraries
    first, *batches = [(given, named) for name, given, named in libraries if name == "batch"]
    assert first == (("r1",), {"params": [(key, str(value)) for key, value in FACTS.items()]})
    metrics = [metric for _, named in batches for metric in named["metrics"]]
    assert metrics == [(name, value, 0, 1) for name, value in (STEP | BYTES).items()]
    assert libraries[-1] == ("terminated", ("r1",), {})
    libraries.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker.invalid")
    told("mlflow", tmp_path, *EVENTS)
    assert libraries[0] == ("client", (), {"tracking_uri": "http://tracker.invalid"})


# --- nothing that they do costs the peer -----------------------------------------------------------------------------


def failing(libraries: list[Any], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise RuntimeError(f"no entry for {KEY} at https://me:pass@tracker.invalid/\x1b[2J\nsecond line")

    if where == "open":
        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    else:
        run = SimpleNamespace(define_metric=lambda *given, **named: None, log=fail, finish=fail)
        monkeypatch.setattr(sys.modules["wandb"], "init", lambda **named: run)


@pytest.mark.parametrize("where", ["open", "log"])
def test_a_tracker_that_fails_costs_one_line_without_keys_and_the_others_go_on(
    where: str, libraries: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(libraries, monkeypatch, where)
    sink = told("wandb,tensorboard", tmp_path, *EVENTS, closed(2))
    assert sink.events == [*EVENTS, closed(2), STOPPED]
    (line,) = [record.getMessage() for record in caplog.records if record.name == reporter.__name__]
    assert line.startswith("stopped reporting to wandb; the run goes on: RuntimeError: no entry for (WANDB_API_KEY)")
    assert "pass" not in line
    assert "\x1b" not in line
    assert "\n" not in line
    assert len([name for name, *_ in libraries if name == "scalar"]) == 2 * len(STEP) + len(BYTES)


def test_a_tracker_that_stands_still_holds_nobody_up(
    libraries: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def stand(**named: Any) -> Any:
        entered.set()
        go_on.wait()
        raise RuntimeError("late")

    monkeypatch.setattr(sys.modules["wandb"], "init", stand)
    monkeypatch.setattr(reporter, "MAX_WAITING", 2)
    monkeypatch.setattr(reporter, "FLUSH_S", 0.0)
    sink = EventList()
    reporting = Reporting(sink, ["wandb"], tmp_path, "otter", FakeClock())
    thread = reporting._thread
    reporting.emit(FOUND)
    entered.wait()
    for step in range(1, 9):
        reporting.emit(closed(step))
    reporting.emit(STOPPED)
    reporting.close()
    assert len(sink.events) == 10
    assert [record.getMessage() for record in caplog.records] == [
        "trackers are too slow: they lack the figures of some steps"
    ]
    go_on.set()
    reporting._waiting.get()  # room for the end
    reporting._waiting.put(None)
    thread.join()


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    before = threading.active_count()
    sink = EventList()
    reporting = reporting_of(peer_settings(home=tmp_path, role="trainer"), sink, FakeClock())
    assert threading.active_count() == before
    reporting.emit(FOUND)
    reporting.close()
    assert sink.events == [FOUND]


# --- before the start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_one_that_is_not_installed_is_an_error_that_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.reporting.trackers.find_spec", lambda module: None)
    options = read_peer_options("join", {"report_to": name})
    with pytest.raises(ConfigError) as caught, blaming(options):
        check_reporting(options.report_to, options.report_dir)
    assert (caught.value.key, caught.value.value) == ("--report-to", name)
    assert install_command(name) in caught.value.remedy


def test_a_directory_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.reporting.trackers.find_spec", lambda module: ModuleSpec(module, None))
    with pytest.raises(ConfigError, match="installed"):
        check_reporting("wandb", None)


def test_wandb_without_a_key_is_refused_unless_it_is_offline(
    libraries: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_reporting("wandb,tensorboard,mlflow", None)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError) as caught:
        check_reporting("wandb", None)
    assert "WANDB_MODE=offline" in caught.value.remedy
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_reporting("wandb", None)


def test_a_directory_that_cannot_be_or_has_no_use_is_refused(libraries: list[Any], tmp_path: Path) -> None:
    check_reporting("mlflow", tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == [], "tried, and nothing left"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="report-dir"):
        check_reporting("mlflow", tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="only together"):
        check_reporting(None, tmp_path)


def test_quickstart_refuses_before_it_makes_anything(tmp_path: Path) -> None:
    options = plan_run(Foundation(), LocalOptions(out=tmp_path / "out", report_to="comet"))
    with pytest.raises(ConfigError, match="some of tensorboard, wandb, mlflow"):
        quickstart(options, SystemClock())
    assert not (tmp_path / "out").exists()


# --- keys ------------------------------------------------------------------------------------------------------------


def test_no_key_of_the_environment_is_in_what_a_peer_writes(
    run: KeptRun,
    libraries: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SWARM_REPORT_TO", "wandb,mlflow")
    failing(libraries, monkeypatch, "log")
    options = read_peer_options("join", {"invite": ["/ip4/1.2.3.4/tcp/5"]})
    assert options.report_to == "wandb,mlflow"
    settings = peer_settings(home=tmp_path, role="stage", bootstrap=(), options=options)
    recorder = Recorder(tmp_path / "events.jsonl", PeerId("a"), SystemClock())
    reporting = reporting_of(settings, recorder, FakeClock())
    for event in (*EVENTS, STOPPED):
        reporting.emit(event)
    reporting.close()
    recorder.close()
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    (tmp_path / "run.toml").write_text(render_manifest(run.manifest))
    (tmp_path / "said.txt").write_text("\n".join([repr(options), repr(settings), caplog.text]))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"events.jsonl", "settings.json", "run.toml", "said.txt"}
    assert "stopped reporting to wandb" in (tmp_path / "said.txt").read_text()
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    told_of = [repr(given) + repr(named) for name, given, named in libraries]
    assert not [one for one in told_of if KEY in one], "a library finds its own key"
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["kind"] == "RunFound"
    names = [field.name for field in dataclasses.fields(PeerOptions)]
    assert not [name for name in names if "key" in name or name.endswith("token")]


def test_secrets_are_replaced_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hush-hush")
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert (
        without_secrets("401 for hush-hush at https://me:hush@h/x")
        == "401 for (MLFLOW_TRACKING_PASSWORD) at https://h/x"
    )

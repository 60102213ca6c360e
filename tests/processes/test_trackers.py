"""``--report-to`` with the trackers themselves, offline: ``make test-extras``."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from peers.reporting.reporter import Reporting
from peers.reporting.trackers import check_trackers
from swarm.clock import SystemClock
from swarm.events import LinkUsage, NullSink, PeerStopped, RunFound, StepClosed
from swarm.ids import PeerId, RunId

pytestmark = pytest.mark.extras

KEY = "0123456789abcdef0123456789abcdef01234567"
INVITE = "swarm1:itisasecret"
LOSSES = {1: 5.0, 2: 4.0, 3: 3.5}
NAMES = "tensorboard,wandb,mlflow"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def read_tensorboard(directory: Path) -> dict[int, float]:
    read = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(directory))
    read.Reload()
    return {scalar.step: scalar.value for scalar in read.Scalars("loss")}


def read_mlflow(directory: Path) -> dict[int, float]:
    client = import_module("mlflow").MlflowClient(tracking_uri=directory.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("swarm").experiment_id])
    assert run.info.status == "FINISHED"
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_real_trackers_get_each_step_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["swarm", "join", INVITE])
    check_trackers(NAMES)
    reporting = Reporting(NullSink(), NAMES.split(","), tmp_path / "reports", "otter", SystemClock())
    reporting.emit(RunFound(run=RunId("5a" * 32), name="tiny", stages=2, steps=9, wire=2, source=PeerId("a")))
    for step, loss in LOSSES.items():
        fields = {"tokens": 9, "microbatches": 4, "grad_norm": 2.0, "clip": 0.5, "lr": 0.25, "digests": {}}
        reporting.emit(StepClosed(step=step, loss=loss, leader=PeerId("a"), record="", seconds=2.0, **fields))
        reporting.emit(LinkUsage(step=step, bytes_sent=7, bytes_received=8))
    thread = reporting._thread
    reporting.emit(PeerStopped(reason="", exit_code=0))
    thread.join()
    assert not [record for record in caplog.records if "stopped reporting" in record.getMessage()]
    assert read_tensorboard(tmp_path / "reports" / "tensorboard") == LOSSES
    assert read_mlflow(tmp_path / "reports" / "mlflow") == LOSSES
    (written,) = (tmp_path / "reports" / "wandb").rglob("run-*.wandb")
    assert b"grad_norm" in written.read_bytes()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path
        assert INVITE.encode() not in path.read_bytes(), path


@pytest.mark.usefixtures("offline")
def test_quickstart_reports_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "peers.cli", "quickstart", "--steps", "2", "--peers", "2", "--trainers", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    done = subprocess.run(
        [*command, "--out", str(out), "--report-to", NAMES], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(read_tensorboard(out / "reports" / "tensorboard")) == [1, 2]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert list(read_mlflow(out / "reports" / "mlflow")) == [1, 2]
    assert list((out / "reports" / "wandb").rglob("run-*.wandb"))
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path

"""The trackers of experiments that ``--report-to`` names: TensorBoard, Weights & Biases, MLflow.

Each writes into a directory of its own unless its own variables name a server. Their keys come from the environment,
where their libraries look for them (``WANDB_API_KEY``, ``MLFLOW_TRACKING_TOKEN``, …); nothing here reads, keeps or
repeats one. Nor is one told how this program was called: an invite may be in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarm.errors import ConfigError, install_command

if TYPE_CHECKING:
    from swarm.clock import Clock  # it imports asyncio: not for who only checks what is asked for

FACTS = ("name", "run", "steps", "stages", "wire")
"""What a tracker is told of a run, beside the name of the peer that reports."""
_OFFLINE = ("offline", "disabled", "dryrun")
_SECRET = re.compile(r"(WANDB|MLFLOW|AWS|AZURE|GOOGLE|DATABRICKS)_\w+|\w*(PASSWORD|SECRET|TOKEN|API_KEY)\w*")


class Tracker(Protocol):
    """One of them, open. Any call may raise whatever its library does."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take figures of a step; more may follow of the same."""

    def close(self) -> None:
        """Hand on what waits."""


class TensorBoardTracker:
    """Event files, for ``tensorboard --logdir``."""

    def __init__(self, directory: Path, facts: Mapping[str, Any], clock: Clock) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._clock, self._writer = clock, writer(log_dir=str(directory))
        self._writer.add_text("run", "  \n".join(f"{key}: {value}" for key, value in facts.items()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See :class:`Tracker`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=self._clock.wall())

    def close(self) -> None:
        """See :class:`Tracker`."""
        self._writer.close()


class WandbTracker:
    """A run at Weights & Biases, or files for ``wandb sync`` with ``WANDB_MODE=offline``."""

    def __init__(self, directory: Path, facts: Mapping[str, Any], clock: Clock) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._library = wandb = import_module("wandb")
        settings = wandb.Settings(
            console="off",  # what this peer prints, its arguments, its machine and its code are its own affair
            silent=True,
            save_code=False,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        project = os.environ.get("WANDB_PROJECT") or "swarm"
        self._run = wandb.init(
            project=project, name=f"{facts['name']}-{facts['peer']}", config=dict(facts), dir=str(directory),
            settings=settings,
        )  # fmt: skip
        # Steps may be closed anew after a time without a majority, and wandb's own count never goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See :class:`Tracker`."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """See :class:`Tracker`."""
        self._run.finish()
        self._library.teardown()  # or a process of its own would stay as long as this one


class MlflowTracker:
    """A run at the server that ``MLFLOW_TRACKING_URI`` names, else files for ``mlflow server``."""

    def __init__(self, directory: Path, facts: Mapping[str, Any], clock: Clock) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or directory.absolute().as_uri()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for a database otherwise
        self._entities, self._clock = import_module("mlflow.entities"), clock
        self._client = import_module("mlflow").MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "swarm"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run = self._client.create_run(experiment, run_name=f"{facts['name']}-{facts['peer']}")
        self._id = run.info.run_id
        params = [self._entities.Param(key, str(value)) for key, value in facts.items()]
        self._client.log_batch(self._id, params=params)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See :class:`Tracker`."""
        now = round(self._clock.wall() * 1000)
        said = [self._entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=said)

    def close(self) -> None:
        """See :class:`Tracker`."""
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, type[TensorBoardTracker | WandbTracker | MlflowTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""By their names, which are those of the extras and of the packages, too."""


def names_of(given: str | None) -> Sequence[str]:
    """Return the trackers that a setting names, each once."""
    return tuple(dict.fromkeys((given or "").split(","))) if given else ()


def check_trackers(given: str | None) -> None:
    """Refuse a tracker that is not installed or that would ask for its key, before anybody is called. Imports none of
    them. Raises ConfigError."""
    for name in names_of(given):
        if name not in TRACKERS:
            raise ConfigError("--report-to", name, f"some of {', '.join(TRACKERS)}", "Correct the name.")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a mere directory of that name is none: wandb makes them
            remedy = f"Install it: {install_command(name)}"
            raise ConfigError("--report-to", name, "a tracker that is installed", remedy, why=f"{name} is not")
        environment = os.environ
        if name == "wandb" and not environment.get("WANDB_API_KEY") and environment.get("WANDB_MODE") not in _OFFLINE:
            remedy = "Set WANDB_API_KEY, or WANDB_MODE=offline for files that wandb sync sends later."
            raise ConfigError("--report-to", name, "wandb with a key in WANDB_API_KEY", remedy, why="there is none")


def without_secrets(text: str) -> str:
    """Return an error's text with what the environment says of trackers left out: a key, a password in an address."""
    for name, value in sorted(os.environ.items(), key=lambda one: -len(one[1])):
        if len(value) >= 4 and _SECRET.fullmatch(name):
            text = text.replace(value, f"({name})")
    return re.sub(r"://[^/@\s]*@", "://", text)

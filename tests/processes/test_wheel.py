"""The wheel is all that a machine without a checkout needs: what is installed from it trains, started elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from peers.version import commit_of_checkout
from swarm import __version__
from tests.harness.by_hand import some_text
from tests.harness.sources import PACKAGES, ROOT

pytestmark = pytest.mark.process


def run(installed: Path, cwd: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "SWARM_HOME": str(cwd / "home")}
    ended = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.promise("a wheel installs and runs")
def test_wheel_has_our_packages_alone_and_trains_where_there_is_no_checkout(tmp_path: Path) -> None:
    """Its packages are unpacked, as pip does; dependencies are those of the tests."""
    built, installed, report = tmp_path / "built", tmp_path / "site", tmp_path / "report.json"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("swarm_trainer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == set(PACKAGES)
    (entries,) = installed.glob("*.dist-info/entry_points.txt")
    assert "swarm = peers.cli:main" in entries.read_text(), "what pipx puts on the path"
    commit = commit_of_checkout(ROOT)
    said = run(installed, tmp_path, "-m", "peers.cli", "--version")
    assert said == f"swarm {__version__}{f' (commit {commit})' if commit else ''}\n"
    where = run(installed, tmp_path, "-c", "import peers, swarm; print(peers.__file__, swarm.__file__)").split()
    assert where == [str(installed / package / "__init__.py") for package in ("peers", "swarm")]

    text = some_text(tmp_path)  # prepared sooner than the one that comes with it
    shape = ["--steps", "1", "--peers", "1", "--stages", "1", "--trainers", "1", "--text", str(text)]
    run(installed, tmp_path, "-m", "peers.cli", "quickstart", *shape, "--out", "out", "--report", str(report))
    figures = json.loads(report.read_text())
    assert (figures["steps"], figures["microbatches_lost"], figures["exit_reason"]) == (1, 0, "completed")

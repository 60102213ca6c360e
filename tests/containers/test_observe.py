"""Prometheus of compose.yaml reads a founder's dashboard, and has data for every expression of Grafana's board."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.containers.conftest import docker, made
from tests.harness import in_engine
from tests.harness.expect import NotInTime, wait_until
from tests.harness.rigs.dashboard import board_expressions, eventful_exposition
from tests.harness.sources import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.process, pytest.mark.timeout(3000)]

IN_PROJECT = "label=com.docker.compose.project"
WITHIN_S = 300.0
"""A rate needs two looks, five seconds apart."""


@pytest.fixture
def founder(base: str, cleared: None, tmp_path: Path) -> str:
    """An image whose ``swarm`` serves the metrics of a run that is over."""
    shutil.copy(Path(__file__).with_name("stand_in_founder.py"), tmp_path)
    (tmp_path / "peers" / "dashboard").mkdir(parents=True)
    shutil.copy(ROOT / "peers" / "dashboard" / "access.py", tmp_path / "peers" / "dashboard")
    (tmp_path / "exposition").write_text(eventful_exposition())
    (tmp_path / "swarm").write_text("#!/bin/sh\nexec python3 /stand-in/stand_in_founder.py\n")
    (tmp_path / "swarm").chmod(0o755)
    (tmp_path / "Dockerfile").write_text(f'FROM {base}\nCOPY . /stand-in\nENTRYPOINT ["/stand-in/swarm"]\n')
    name = f"swarm-stand-in-founder:test-{in_engine.test_id()}"
    made("build.sh", "--label", in_engine.label(), "--tag", name, str(tmp_path))
    return name


def is_ready(place: str) -> bool:
    """Whether Prometheus answers queries; until then it refuses the connection, or answers 503."""
    try:
        with urllib.request.urlopen(f"http://{place}/-/ready", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_prometheus_has_data_for_every_expression_of_the_board(founder: str) -> None:
    project = in_engine.project()
    environment = os.environ | {
        "PROJECT": project,
        "SWARM_IMAGE": founder,
        "SWARM_OBSERVE": made("base-image.sh", "--observe"),
        "SWARM_PORT": "0",
        "SWARM_PROMETHEUS_PORT": "0",
        "SWARM_DASHBOARD": "0.0.0.0:7300",
        "SWARM_DASHBOARD_TOKEN": "the-token-of-this-test",
    }

    def script(name: str, *arguments: str) -> None:
        command = [ROOT / "docker" / name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        script("compose.sh", "--profile", "observe", "up", "-d", "bootstrap", "prometheus")
        by_project = ("--filter", f"{IN_PROJECT}={project}", "--filter", "name=prometheus")
        place = docker("port", docker("ps", "--quiet", *by_project), "9090")
        assert place.startswith("127.0.0.1:"), "for this machine alone"

        def series(expression: str) -> list[Any]:
            asked = expression.replace("$instance", "bootstrap").replace("$__rate_interval", "1m")
            url = f"http://{place}/api/v1/query?{urllib.parse.urlencode({'query': asked})}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])

        def without_data() -> list[str]:
            return [expression for expression in board_expressions() if not series(expression)]

        wait_until(lambda: is_ready(place), deadline_s=WITHIN_S, what="Prometheus has started")
        try:
            wait_until(lambda: not without_data(), deadline_s=WITHIN_S)
        except NotInTime:
            raise AssertionError(f"no data for {without_data()}") from None
        assert [one["value"][1] for one in series('swarm_step{instance="$instance"}')] == ["6"]
        parts = {one["metric"]["part"] for one in series('swarm_part_live_replicas{instance="$instance"}')}
        assert parts == {"ends", "stage-0"}
    finally:
        script("down.sh")

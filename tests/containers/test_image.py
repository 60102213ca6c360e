"""The image, made from this checkout, and the swarm of compose.yaml with it: what users run."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.containers.conftest import docker
from tests.harness.expect import wait_until
from tests.harness.in_engine import project as project_of_tests
from tests.harness.sources import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.process, pytest.mark.timeout(3000)]

PEERS = 9
IN_PROJECT = "label=com.docker.compose.project"
STEP = re.compile(r"step (\d+)/\d+ +loss")


def test_image_runs_as_nobody_special_and_says_what_it_was_made_from(image: str) -> None:
    said = docker(
        "run", "--rm", "--network", "none", "--entrypoint", "sh", image, "-c", "id -u; ls -ld /data; swarm --version"
    )
    assert said.splitlines()[0] == "10001"
    assert "drwx------" in said
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    revision = docker("inspect", "-f", '{{index .Config.Labels "org.opencontainers.image.revision"}}', image)
    assert revision.removesuffix("-changed") == commit.strip()
    assert f"(commit {revision})" in said


def test_image_holds_this_checkout(image: str) -> None:
    code = "import peers.chaos.engine as it; print(open(it.__file__).read())"
    inside = docker("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", code)
    assert inside.strip() == (ROOT / "peers" / "chaos" / "engine.py").read_text().strip()


def test_health_of_a_container_without_a_peer_is_bad(image: str) -> None:
    command = ["docker", "run", "--rm", "--network", "none", image, "status", "--healthy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 3
    assert "no peer runs here" in done.stderr


def test_compose_swarm_closes_steps_survives_kills_and_leaves_nothing(image: str, base: str) -> None:
    project = project_of_tests()
    environment = os.environ | {"PROJECT": project, "SWARM_IMAGE": image, "SWARM_PORT": "0"}

    def script(name: str, *arguments: str) -> str:
        command = [ROOT / "docker" / name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def container(service: str) -> str:
        return docker("ps", "--quiet", "--filter", f"{IN_PROJECT}={project}", "--filter", f"name={service}", "--all")

    def step(service: str) -> int:
        return int(STEP.findall(docker("logs", container(service)))[-1])

    def goes_on(service: str, steps: int = 2) -> None:
        before = step(service)
        wait_until(lambda: step(service) >= before + steps, what="the steps go on")

    try:
        assert "the first step is closed" in script("up.sh")
        assert len(docker("ps", "--quiet", "--filter", f"{IN_PROJECT}={project}").split()) == PEERS
        docker("exec", container("stage-1-b"), "swarm", "status", "--healthy")
        assert "127.0.0.1:" in docker("port", container("bootstrap")), "nobody elsewhere is let in unasked"
        docker("kill", container("bootstrap"))
        goes_on("stage-0-a")
        docker("stop", "--time", "75", container("stage-0-b"))
        assert docker("inspect", "-f", "{{.State.ExitCode}}", container("stage-0-b")) == "75"
        goes_on("stage-0-a")
        docker("start", container("bootstrap"))
        wait_until(lambda: "READY" in docker("logs", container("bootstrap")), what="the founder is a member")
    finally:
        script("down.sh")
    for kind in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
        assert not docker(*kind, "--quiet", "--filter", f"{IN_PROJECT}={project}")

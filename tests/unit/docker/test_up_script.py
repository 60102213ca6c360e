"""docker/up.sh with a stand-in for the engine, and what compose.yaml promises to anyone who does not read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.harness.rigs.docker import Place
from tests.harness.sources import ROOT


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path, "docker/up.sh", "docker/compose.sh", "docker/compose.yaml", "docker/run.toml")
    place.answers({"run": (0, "text\n"), "logs": (0, "step 1/9  loss 7\n"), "compose": (0, "one\n")})
    return place


def test_up_makes_what_peers_can_read_whatever_the_umask(place: Place) -> None:
    done = place.run("docker/up.sh", umask=0o077, SWARM_IMAGE="some-image")
    assert done.returncode == 0, done.stderr
    data = place.root / "docker" / "data"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (data / "one", data / "one" / "topics.txt")}
    assert modes == {"one": 0o755, "topics.txt": 0o644}


@pytest.mark.parametrize("hidden", ["run.toml", "theirs/notes.txt"])
def test_up_says_what_peers_cannot_read_before_anything_is_made(place: Place, hidden: str) -> None:
    path = place.root / "docker" / hidden
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(0o600)
    done = place.run("docker/up.sh", SWARM_IMAGE="some-image", SWARM_DATA_2="./theirs" if "/" in hidden else "")
    assert done.returncode == 1
    assert f"peers cannot read {place.root}/docker/" in done.stderr
    assert "chmod -R a+rX" in done.stderr
    assert not place.calls()


def test_up_says_that_data_is_not_there(place: Place) -> None:
    done = place.run("docker/up.sh", SWARM_IMAGE="some-image", SWARM_DATA_1="/nowhere")
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "SWARM_DATA_1" in done.stderr


def test_compose_publishes_to_this_machine_only_and_names_the_driver_of_its_log_options() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    lines = [line.strip() for line in text.splitlines()]
    ports = [port for service in yaml.safe_load(text)["services"].values() for port in service.get("ports", ())]
    assert [port.partition(":$")[0] for port in ports] == [
        "${SWARM_HOST:-127.0.0.1}", "127.0.0.1", "${SWARM_RELAY_HOST:-127.0.0.1}", "127.0.0.1"
    ]  # fmt: skip
    assert all("driver:" in line for line in lines if "max-size" in line)

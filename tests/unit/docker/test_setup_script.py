""".ci/setup, with the real pip and an index-less world of small wheels: what the locks do not name is not installed."""

from __future__ import annotations

import base64
import hashlib
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.rigs.docker import Place

pytestmark = pytest.mark.timeout(900)

# A build backend of the tree's own makes the editable project of what a wheel is made of here.
BACKEND = """from __future__ import annotations
import base64, hashlib, zipfile
from pathlib import Path
{wheel}
def build_editable(directory, settings=None, metadata=None):
    return wheel(Path(directory), "swarm-trainer", "0.1").name
build_wheel = build_editable
def get_requires_for_build_editable(settings=None):
    return []
"""
PROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "swarm-trainer"
version = "0.1"
"""


def wheel(folder: Path, name: str, version: str, says: str = "") -> Path:
    """Make a wheel that holds one module, which says who it is."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": f"WHO = {says or version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    made = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record + f"{info}/RECORD,,\n"}).items():
            archive.writestr(path, text)
    return made


def pin(made: Path) -> str:
    """Return the line of a lock for a wheel."""
    name, version = made.name.split("-")[:2]
    return f"{name}==={version} \\\n    --hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}\n"


# An environment with its pip is made once, and copied for anyone who asks for one: that is most of what a set-up takes.
COPYING = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then exec cp -a '{venv}' "$3"; fi
exec '{python}' "$@"
"""


class World:
    """A checkout with locks, and the folder where its wheels are."""

    def __init__(self, tmp_path: Path, venv: Path) -> None:
        self.place = Place(tmp_path, ".ci/setup")
        self.python = self.place.program("python", COPYING.format(venv=venv, python=sys.executable))
        self.folder = tmp_path / "shared" / "wheels"
        self.folder.mkdir(parents=True)
        (root := self.place.root).joinpath("locks").mkdir()
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "backend.py").write_text(BACKEND.format(wheel=inspect.getsource(wheel)))
        self.locked = wheel(self.folder, "one", "1.0")
        builder, torch = wheel(self.folder, "builder", "1.0"), wheel(self.folder, "torch", "2.0")
        self.cpu = wheel(self.folder, "torch", "2.0+cpu")
        locks = {"build": builder, "dev": self.locked, "torch-cpu": self.cpu, "torch-cuda": torch}
        locks["tensorboard"] = wheel(self.folder, "tensorboard", "1.0")
        for name, made in locks.items():
            (root / "locks" / f"{name}.txt").write_text(pin(made))

    def setup(self, extras: str = "") -> subprocess.CompletedProcess[str]:
        return self.place.run(
            ".ci/setup",
            EXTRAS=extras,
            PYTHON=str(self.python),
            PIP_NO_INDEX="1",
            PIP_NO_CACHE_DIR="1",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
        )

    def installed(self, module: str) -> str:
        command = [self.place.root / ".venv/bin/python", "-c", f"import {module}; print({module}.WHO)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "venv"
    subprocess.run([sys.executable, "-m", "venv", made], check=True)
    return made


@pytest.fixture
def world(tmp_path: Path, venv: Path) -> World:
    return World(tmp_path, venv)


def test_setup_installs_what_is_pinned_and_a_tracker_that_is_asked_for_and_keeps_it(world: World) -> None:
    for name in ("one", "torch"):
        wheel(world.folder, name, "1.0+zzz" if name == "one" else "2.0+zzz", says="somebody else's")
    unknown = world.setup("tensorbord")
    assert (unknown.returncode, "there is no extra tensorbord" in unknown.stderr) == (1, True)
    assert not (world.place.root / ".venv").exists()
    done = world.setup("hf,tensorboard")
    assert (done.returncode, "installing tensorboard" in done.stdout) == (0, True), done.stderr
    installed = {name: world.installed(name) for name in ("one", "torch", "swarm_trainer", "tensorboard")}
    assert installed == {"one": "1.0", "torch": "2.0+cpu", "swarm_trainer": "0.1", "tensorboard": "1.0"}
    assert [world.setup(extras).stdout for extras in ("", "tensorboard")] == ["", ""], "it is up to date"
    newer = wheel(world.folder, "tensorboard", "1.1")
    (world.place.root / "locks" / "tensorboard.txt").write_text(pin(newer))
    assert world.setup().returncode == 0
    assert world.installed("tensorboard") == "1.1", "what is there follows its lock"


def test_setup_without_a_cpu_build_takes_the_other_one(world: World) -> None:
    world.cpu.unlink()
    done = world.setup()
    assert done.returncode == 0, done.stderr
    assert world.installed("torch") == "2.0"


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("one", "1.0", "is not what locks/ names"),
        ("torch", "2.0+cpu", "is not that of locks/torch-cpu.txt"),
    ],
)
def test_setup_refuses_a_wheel_with_the_right_name_and_other_content(
    world: World, name: str, version: str, words: str
) -> None:
    wheel(world.folder, name, version, says="somebody else's")
    done = world.setup()
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert words in done.stderr
    assert not (world.place.root / ".venv" / ".ready").exists()

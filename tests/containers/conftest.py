"""Images for the tests, made by the project's own files and removed when they were not here before."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

STAND_IN = "swarm-stand-in:test"


def docker(*arguments: str, timeout_s: float = 120) -> str:
    """What the client prints; fails with what it says."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def here(image: str) -> bool:
    """Whether the engine has it."""
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0


def _made(script: Path, *arguments: str) -> str:
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def base() -> str:
    """The base image: kept, it holds nothing of the checkout."""
    return _made(ROOT / "docker" / "base-image.sh")


@pytest.fixture(scope="session")
def nemesis() -> str:
    """The image that faults of the network come from: kept as well."""
    return _made(ROOT / "docker" / "base-image.sh", "--nemesis")


@pytest.fixture(scope="session")
def stand_in(base: str, nemesis: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image whose ``swarm`` is a small script."""
    context = tmp_path_factory.mktemp("stand-in")
    shutil.copy(Path(__file__).with_name("stand_in.py"), context / "stand_in.py")
    (context / "Dockerfile").write_text(
        f"FROM {base}\nCOPY stand_in.py /stand_in.py\n"
        "RUN printf '#!/bin/sh\\nexec python3 /stand_in.py \"$@\"\\n' > /usr/bin/swarm && chmod 755 /usr/bin/swarm\n"
    )
    docker("build", "--quiet", "--tag", STAND_IN, str(context))
    yield STAND_IN
    docker("image", "rm", "--force", STAND_IN)

"""Images for the tests, made by the project's own files and named after this run of the tests; gone afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.in_engine import clear, label, test_id
from tests.harness.sources import ROOT


def docker(*arguments: str, timeout_s: float = 120) -> str:
    """What the client prints; fails with what it says."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def made(script: str, *arguments: str, **more: str) -> str:
    """The image that a script of the project makes, as it calls it."""
    command, environment = [ROOT / "docker" / script, *arguments], os.environ | more
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def cleared() -> Iterator[None]:
    """At the end there is nothing in the engine that these tests have made."""
    yield
    left = clear()
    assert not left, f"left behind in the engine: {left}"


@pytest.fixture(scope="session")
def base() -> str:
    """The base image: kept, it holds nothing of the checkout."""
    return made("base-image.sh")


@pytest.fixture(scope="session")
def nemesis() -> str:
    """The image that faults of the network come from: kept as well."""
    return made("base-image.sh", "--nemesis")


@pytest.fixture(scope="session")
def stand_in(base: str, nemesis: str, cleared: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image whose ``swarm`` is a small script."""
    context, name = tmp_path_factory.mktemp("stand-in"), f"swarm-stand-in:test-{test_id()}"
    shutil.copy(Path(__file__).with_name("stand_in.py"), context / "stand_in.py")
    (context / "Dockerfile").write_text(
        f"FROM {base}\nCOPY stand_in.py /stand_in.py\n"
        "RUN printf '#!/bin/sh\\nexec python3 /stand_in.py \"$@\"\\n' > /usr/bin/swarm"
        " && chmod 755 /usr/bin/swarm && chmod 644 /stand_in.py\n"
    )
    made("build.sh", "--label", label(), "--tag", name, str(context))
    return name


@pytest.fixture(scope="session")
def image(base: str, cleared: None) -> str:
    """The image of a peer, from this checkout."""
    return made("image.sh", BASE_IMAGE=base, TAG=f"test-{test_id()}")

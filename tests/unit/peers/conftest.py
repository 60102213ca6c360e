"""A run that is kept, and an environment in which nothing of this machine's is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peers.options.fields import PREFIX
from tests.harness.rigs.peers import KeptRun, kept_run


@pytest.fixture
def run() -> KeptRun:
    """A run of which nothing is kept yet."""
    return kept_run()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty directory, with a machine's home below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option comes from the environment of whoever runs the tests."""
    for key in os.environ:
        if key.startswith(PREFIX) and not key.startswith("SWARM_TEST_"):
            monkeypatch.delenv(key)

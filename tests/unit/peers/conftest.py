"""A run that is kept, and an environment in which nothing of this machine's is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from peers.cli.app import run as swarm
from peers.options.fields import PREFIX
from tests.harness.rigs.peers import KeptRun, Said, Typed, Wording, kept_run


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


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Type words after ``swarm``, in this process: a line, or one by one where a word has spaces."""

    def type_(*words: object) -> Said:
        capsys.readouterr()
        parts = [part for word in words for part in ([str(word)] if len(words) > 1 else str(word).split())]
        code = swarm(parts)
        out, err = capsys.readouterr()
        return Said(" ".join(parts), code, out, err)

    return type_


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """Compare wording with what is kept of it, below ``__snapshots__``, on whichever machine."""
    return snapshot.use_extension(Wording)

"""A run that is kept, and an environment in which nothing of this machine's is found."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from syrupy.assertion import SnapshotAssertion

from peers.cli.app import run as swarm
from peers.data import encoder
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
    """No option comes from the environment of the one who runs the tests."""
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


class EncoderHere:
    """What encodes in a process of its own, in a thread of this one: as its parent sees it."""

    def __init__(self, *command: Any, **options: Any) -> None:
        (there, stdin), (stdout, here) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self._thread = threading.Thread(target=self._run, args=(os.fdopen(there, "rb"), os.fdopen(here, "wb")))
        self._thread.start()

    def _run(self, came: BinaryIO, out: BinaryIO) -> None:
        with contextlib.suppress(BrokenPipeError), came, out:
            encoder.main(came, out)

    def kill(self) -> None:
        """End it once it has answered."""
        self.stdin.close()
        self.stdout.close()

    def wait(self) -> int:
        """Wait for its end."""
        self._thread.join()
        return 0


@pytest.fixture(scope="module")
def encoded_here() -> Iterator[None]:
    """Start no process to encode in: a module's own templates and tokenizers take little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": EncoderHere}))
        patch.setattr(encoder, "bound_memory", lambda: None)
        patch.setattr(encoder, "_bounded", lambda cpu_s: contextlib.nullcontext())
        yield

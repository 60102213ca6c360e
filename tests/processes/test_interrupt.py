"""Ctrl-C and SIGTERM at seeded moments of a real quickstart: it ends, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MOMENTS = 6
SPREAD_S = 16.0
"""From the first instruction of the interpreter to about the end of a three-step run on two cores."""
END_S = 120.0
"""For one that never ends: it takes a few seconds, and several times that on a busy machine."""
CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM)}
"""Exit codes of an interrupt; the negative ones of the first tenth of a second, before our own code runs."""
_rng = random.Random(20261121)
_CASES = [
    pytest.param(
        (index + _rng.random()) * SPREAD_S / MOMENTS,
        _rng.choice((signal.SIGINT, signal.SIGTERM)),
        _rng.choice(("one", "group")),
        id=f"moment-{index}",
    )
    for index in range(MOMENTS)
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is prepared quickly, so that the moments spread over all phases."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {n} tells of {n * n} owls and {n % 7} mice. " * 30 for n in range(120)))
    return path


@pytest.mark.process
@pytest.mark.parametrize(("after_s", "number", "whom"), _CASES)
def test_quickstart_interrupted_at_any_moment_leaves_nothing(
    tmp_path: Path, text: Path, after_s: float, number: signal.Signals, whom: str
) -> None:
    """``group`` is what a terminal's Ctrl-C does: every process of the foreground gets the signal."""
    temporary = set(os.listdir(tempfile.gettempdir()))
    command = [sys.executable, "-m", "peers.cli", "quickstart", "--out", str(tmp_path / "out"), "--text", str(text)]
    command += ["--steps", "3", "--peers", "2", "--trainers", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=after_s)
        interrupted = False
    except subprocess.TimeoutExpired:
        interrupted = True
        (os.killpg if whom == "group" else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=END_S)
    if interrupted:
        assert process.returncode in (*CODES[number], 0), output
        if process.returncode > 0:
            assert "Traceback" not in output
    else:
        assert process.returncode == 0, output
    assert set(os.listdir(tempfile.gettempdir())) == temporary

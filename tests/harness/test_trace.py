"""Each subject of the trace has files that it enters, and what does not enter is not counted."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.sim.loop import SimLoop
from tests.harness.sources import PACKAGES, ROOT
from tests.harness.trace import main

PRETEND = Path(inspect.getfile(SimLoop)).parent
MOST = {"microbatch": 44, "close": 87, "join": 132, "status": 11}
"""Files that a reader opens at most to follow each."""
LINE = re.compile(r"(\w+): (\d+) files, (\d+) switches")


def told(text: str) -> tuple[str, int, int]:
    """Subject, files and switches of what was printed, whose files were checked to be ours, existing, and as many."""
    first, *lines = text.splitlines()
    found = LINE.match(first)
    assert found is not None, text
    files = [line.split()[1] for line in lines]
    assert len(set(files)) == len(files) == int(found[2])
    assert all(file.startswith(PACKAGES) and (ROOT / file).is_file() for file in files)
    assert not any((ROOT / file).is_relative_to(PRETEND) for file in files), "no real peer enters it"
    return found[1], int(found[2]), int(found[3])


@pytest.mark.parametrize("subject", ["microbatch", "close", "join"])
def test_trace_of_a_swarm_counts_what_its_peer_enters(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([subject, "--files"])
    name, files, switches = told(capsys.readouterr().out)
    assert name == subject
    assert switches > files > 10
    assert files <= MOST[name]
    assert sys.getprofile() is None


@pytest.mark.long
def test_trace_of_the_command_counts_its_process() -> None:
    command = [sys.executable, "-m", "tests.harness.trace", "status", "--files"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    name, files, switches = told(ended.stdout)
    assert name == "status"
    assert switches > files > 3
    assert files <= MOST[name]

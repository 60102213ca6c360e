"""Peers forked from one process: what they say, how they end, and that none is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.chaos.forks import Forked, Forks
from swarm import __version__
from swarm.network.libp2p.rundir import sweep_temporary, sweep_under
from tests.harness.by_hand import LOCAL, RUN, Started
from tests.harness.expect import LONG_S, wait_until
from tests.harness.processes import children_of

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    made = Forks(tmp_path / "forks.log")
    yield made
    made.close()
    made.close()
    sweep_temporary()  # who is killed leaves its sockets
    sweep_under(tmp_path / "h")


def founder(forks: Forks, root: Path) -> Forked:
    """A peer that has founded a run."""
    (root / "run.toml").write_text(RUN.format(steps=1))
    log = root / f"{len(list(root.iterdir()))}.log"
    peer = forks.begin(["new", str(root / "run.toml"), "--json", "--home", str(root / "h"), *LOCAL], log)
    Started(peer, log).wait_event("Invited")
    return peer


def test_forked_commands_end_as_they_end_and_die_with_the_process_they_are_from(forks: Forks, tmp_path: Path) -> None:
    said = forks.begin(["--version"], tmp_path / "said.log")
    wrong = forks.begin(["join", "--no-such-option"], tmp_path / "wrong.log")
    run = founder(forks, tmp_path)
    assert (said.wait(LONG_S), said.poll()) == (0, 0)
    wait_until(lambda: __version__ in (tmp_path / "said.log").read_text(), what="its output")
    assert wrong.wait(LONG_S) == 2
    wait_until(lambda: "no-such-option" in (tmp_path / "wrong.log").read_text(), what="its error")
    run.send_signal(signal.SIGKILL)
    assert run.wait(LONG_S) == -signal.SIGKILL
    run.send_signal(signal.SIGKILL)  # it has ended: nobody else is hit

    orphan = founder(forks, tmp_path)
    (server,) = {child.parent for child in children_of(os.getpid()) if child.pid == orphan.pid}
    os.kill(server, signal.SIGKILL)
    assert orphan.wait(LONG_S) == -signal.SIGKILL

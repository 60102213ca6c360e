"""A founder that is killed comes back to its living run with the file that it was founded with, and never begins a
second one beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE
from tests.harness.by_hand import LOCAL, RUN, by_hand, some_text
from tests.processes.test_resume import join_all, kill_all

pytestmark = [pytest.mark.process, pytest.mark.long]


def test_founder_that_is_killed_comes_back_to_its_run_while_that_lives(tmp_path: Path) -> None:
    text = some_text(tmp_path)
    typed = tmp_path / "run.toml"
    typed.write_text(RUN.format(steps=100_000).replace("[run]", '[run]\nnonce = "00000000deadbeef"'))
    with by_hand(tmp_path) as hand:
        founder = hand.start("new", str(typed), *LOCAL)
        others = join_all(hand, founder.wait_event("Invited")["invite"], text)
        run = others[2].wait_event("RunFound")["run"]
        others[2].wait_step(3)
        who = founder.events()[0]["peer"]
        for _ in range(2):
            kill_all([founder])
            founder = hand.start("new", str(typed), *LOCAL)
            step = founder.wait_event("PeerReady")["step"]
            assert step > 0
            assert founder.wait_event("RunFound")["run"] == run
            assert founder.events()[0]["peer"] == who
            founder.wait_step(step + 2)
        # No other place, and no other machine, begins it again.
        assert hand.run("new", str(typed), *LOCAL, "--place", "mine").returncode == EXIT_USAGE
        (kept,) = (tmp_path / "a" / "runs").glob("*/run.toml")
        refused = hand.run("new", str(kept), *LOCAL, "--home", str(tmp_path / "a"))
        assert refused.returncode == EXIT_USAGE, refused.stderr
        assert "that run lives" in refused.stderr
        kill_all([founder, *others])
        alone = hand.run("new", str(typed), *LOCAL)
        assert alone.returncode == EXIT_UNREACHABLE, alone.stderr
        assert "seen here last at step" in alone.stderr
        elsewhere = hand.run("new", str(kept), *LOCAL, "--home", str(tmp_path / "a"))
        assert elsewhere.returncode == EXIT_UNREACHABLE, elsewhere.stderr
        assert "new --resume" in elsewhere.stderr

"""A founder that is killed comes back to its living run with the file that it was founded with, and never begins a
second one next to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE
from tests.harness.by_hand import LOCAL, RUN, by_hand, some_text
from tests.processes.test_resume import AS_TRAINER, EVERY, REPRODUCIBLE, closed, join_all, kill_all

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


def test_machine_with_the_founder_and_the_only_trainer_dies_and_the_run_goes_back_to_its_checkpoint(
    tmp_path: Path,
) -> None:
    """The natural layout: the one who founds the run also feeds it. Nobody else ends, and nobody has to do anything but
    to start that machine's peers again."""
    text, typed = some_text(tmp_path), tmp_path / "run.toml"
    typed.write_text(REPRODUCIBLE.replace("[run]", '[run]\nnonce = "00000000deadbeef"'))
    with by_hand(tmp_path) as hand:
        founder = hand.start("new", str(typed), *LOCAL)
        *hosts, trainer = join_all(hand, founder.wait_event("Invited")["invite"], text, trainer="h")
        for peer in (*hosts, trainer):
            peer.wait_event("CheckpointWritten", step=2 * EVERY)
        trainer.wait_step(2 * EVERY + 2)
        kill_all([founder, trainer])
        last, before = max(closed(trainer)), closed(trainer)
        hosts[0].wait_event("PeerLost", name=trainer.events("PeerStarted")[0]["name"])

        founder = hand.start("new", str(typed), *LOCAL)
        invite = hand.run("invite", "--home", str(tmp_path / "a")).stdout.strip()
        again = hand.start("join", invite, *AS_TRAINER, str(text), "--checkpoint-every", str(EVERY), *LOCAL)
        back = again.wait_event("WentBack")
        assert back["step"] % EVERY == 0
        assert 2 * EVERY <= back["step"] <= last
        for peer in hosts:
            peer.wait_event("WentBack", step=back["step"])
            assert peer.process.poll() is None
        again.wait_step(last + 1)
        repeated = closed(again)
        for step in range(back["step"] + 1, last + 1):
            assert repeated[step]["digests"] == before[step]["digests"], f"step {step} is another than it was"
        founder.wait_event("PeerReady")

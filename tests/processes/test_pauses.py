"""A peer on a machine that is used for other things: it leaves when it is told by a file, and comes back by itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from peers.exit_codes import EXIT_DRAINED, EXIT_PAUSED
from tests.harness.by_hand import LOCAL, Started, by_hand, digests_differ, found
from tests.harness.expect import LONG_S, wait_until
from tests.harness.processes import assert_nothing_left, take_snapshot

pytestmark = [pytest.mark.process, pytest.mark.long]


def ready_again(peer: Started, times: int) -> None:
    """Until it has taken part for so many times."""
    wait_until(lambda: len(peer.events("PeerReady")) >= times or None, what=f"{times} times ready")


def test_peer_leaves_while_a_game_runs_and_comes_back_and_after_a_crash_too(tmp_path: Path) -> None:
    before, game = take_snapshot(), tmp_path / "game"
    with by_hand(tmp_path) as hand:
        founder, invite = found(hand, steps=100_000)
        stay = [hand.start("join", invite, "--role", "stage", "--stage", stage, *LOCAL) for stage in ("0", "1")]
        trainer = hand.start("join", invite, "--role", "trainer", *LOCAL)
        trainer.wait_step(2)
        words = ("--pause-when", f"command:test -e {game}", "--resume-after", "1", "--retry")
        words += ("--max-upload", "20mbit", "--max-download", "50mbit")
        shared = hand.start("join", invite, "--stage", "0", "--name", "shared", *words, *LOCAL)
        shared.wait_event("PeerReady")

        game.touch()
        assert shared.wait_event("Paused")["reason"] == f"command:test -e {game}"
        assert shared.wait_event("PeerStopped")["exit_code"] == EXIT_PAUSED
        assert "left in order" in shared.events("PeerStopped")[0]["reason"]
        step = trainer.events("StepClosed")[-1]["step"]
        trainer.wait_step(step + 3)  # the run goes on without it
        assert shared.process.poll() is None
        (place,) = [
            one for one in json.loads(hand.run("status", "--json").stdout)["places"] if one.get("name") == "shared"
        ]
        assert (place["phase"], place["live"]) == ("paused", False)
        assert "comes back by itself" in hand.run("status").stdout

        game.unlink()
        shared.wait_event("Resumed")
        ready_again(shared, 2)

        # Nobody told it to go: it is killed, as by a system without memory.
        started = shared.events("PeerStarted")[-1]
        os.kill(started["pid"], signal.SIGKILL)
        ready_again(shared, 3)
        assert [event["reason"] for event in shared.events("Resumed")][1:] == ["exit code 137"]
        assert len({event["peer"] for event in shared.events("PeerStarted")}) == 1, "it is the same peer each time"

        shared.process.send_signal(signal.SIGTERM)
        assert shared.process.wait(LONG_S) == EXIT_DRAINED
        trainer.wait_step(trainer.events("StepClosed")[-1]["step"] + 1)
    assert_nothing_left(before)
    assert not digests_differ([founder, trainer, shared, *stay])
    closed = [event["step"] for event in trainer.events("StepClosed")]
    assert closed == sorted(set(closed)), "each step closed once"
    assert {event["microbatches"] for event in trainer.events("StepClosed")[:-1]} == {4}, "none was lost"

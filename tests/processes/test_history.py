"""``swarm history`` beside a run of real processes: while it goes on, from any of its peers, and when it is over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.by_hand import ByHand, by_hand, found

pytestmark = [pytest.mark.process, pytest.mark.long]
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
STEPS = 12


def told(hand: ByHand, *arguments: str) -> dict[str, Any]:
    ended = hand.run("history", *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def test_history_of_a_run_is_the_same_at_every_peer_and_holds(tmp_path: Path) -> None:
    with by_hand(tmp_path) as hand:
        bootstrap, invite = found(hand, steps=STEPS)
        peers = [bootstrap, *(hand.start("join", invite, "--role", "stage", *LOCAL) for _ in range(2))]
        peers.append(hand.start("join", invite, "--role", "trainer", *LOCAL))
        peers[-1].wait_step(2)
        early = hand.run("history", "--verify")
        assert early.returncode == 0, early.stderr
        assert "the run begins" in early.stdout
        assert "verified: " in early.stdout
        assert [one.end()[0] for one in peers] == [0] * 4

        ids = {str(one.wait_event("PeerReady")["peer"]) for one in peers}
        documents = [told(hand, peer, "--verify") for peer in sorted(ids)]
        first = documents[0]
        for one in documents:
            assert [row["step"] for row in one["rows"]] == list(range(STEPS + 1))
            assert [row["hash"] for row in one["rows"]] == [row["hash"] for row in first["rows"]]
            assert one["verified"] == {
                "ok": True, "records": STEPS + 1, "microbatches": 4 * STEPS, "trusted": None
            }  # fmt: skip
            assert (one["torn"], one["broken"], one["earlier"]) == (False, "", [])
        assert {row["leader"]["peer"] for row in first["rows"][1:]} <= ids
        closed = {event["step"]: event for event in peers[-1].events("StepClosed")}
        assert all(row["hash"] == closed[row["step"]]["record"] for row in first["rows"] if row["step"] in closed)

        # A copy shows the same anywhere; a changed figure in it is found.
        copy = tmp_path / "copy.jsonl"
        shutil.copy(first["path"], copy)
        assert told(hand, "--file", str(copy), "--verify")["rows"] == first["rows"]
        lines = copy.read_text().splitlines(keepends=True)
        lines[5] = lines[5].replace('"clip":', '"clip":1')
        copy.write_text("".join(lines))
        wrong = hand.run("history", "--file", str(copy), "--verify")
        assert wrong.returncode == 1
        assert f"{copy}, line 6 (step 5): it was not decided" in wrong.stderr

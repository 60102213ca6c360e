"""One machine holds a whole run: it is killed and comes back from its disk, another joins, and it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.exit_codes import EXIT_DRAINED
from peers.home.places import list_places
from swarm.consensus.history import HistoryReader
from swarm.consensus.records import voters
from tests.harness.by_hand import LOCAL, RUN, by_hand, digests_differ, some_text
from tests.processes.test_resume import EVERY, closed, kill_all

pytestmark = [pytest.mark.process, pytest.mark.long]
PARTS = ["ends", "stage-0", "stage-1"]


def test_machine_with_every_part_trains_alone_comes_back_and_gives_the_run_to_another(tmp_path: Path) -> None:
    text, often = some_text(tmp_path), ("--checkpoint-every", str(EVERY), *LOCAL)
    (tmp_path / "run.toml").write_text(RUN.format(steps=100_000))
    with by_hand(tmp_path) as hand:
        founder = hand.start("new", str(tmp_path / "run.toml"), *LOCAL, home=tmp_path / "f")
        invite = founder.wait_event("Invited")["invite"]
        whole = ("join", invite, "--role", "all", "--data", str(text), *often)
        alone = hand.start(*whole)
        alone.wait_step(2 * EVERY)
        for part in PARTS:
            alone.wait_event("PeerReady", part=part)
            alone.wait_event("CheckpointWritten", part=part)
        places = [place for place in list_places(hand.home) if place.state is not None]
        assert [place.name for place in places] == ["1", "1-s0", "1-s1"]
        assert {place.state.pid for place in places if place.state is not None} == {alone.process.pid}
        (history, *_) = (hand.home / "1").rglob("history.jsonl")
        roster = next(iter(HistoryReader(history))).record.members
        assert len(roster.peers) == 1 + len(PARTS)
        assert len(voters(roster, "")) == 1  # the machine

        kill_all([alone])
        last, before = max(closed(alone)), {event["peer"]: event["part"] for event in alone.events("PeerReady")}
        again = hand.start(*whole, "--state", "disk")
        assert again.wait_event("WentBack")["step"] <= last
        again.wait_step(last + 2)
        assert {event["peer"]: event["part"] for event in again.events("PeerReady")} == before

        other = hand.start(*whole, home=tmp_path / "b")
        for part in PARTS:
            other.wait_event("PeerReady", part=part)
        assert hand.run("drain", "--peer", "1").returncode == 0
        assert again.end()[0] in (0, EXIT_DRAINED)
        assert all("left in order" in one["reason"] for one in again.events("PeerStopped"))
        other.wait_step(max(closed(again)) + 2)
        assert digests_differ([again, other]) == []

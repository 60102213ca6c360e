"""One ``swarm join`` with two devices: two peers, one machine, one vote."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.consensus.history import HistoryReader
from swarm.consensus.records import voters
from tests.harness.by_hand import LOCAL, by_hand, found, some_text

pytestmark = [pytest.mark.process, pytest.mark.long]


def test_join_with_two_devices_starts_a_peer_for_each_and_they_are_one_machine(tmp_path: Path) -> None:
    text = some_text(tmp_path)
    with by_hand(tmp_path, forked=False) as hand:
        bootstrap, invite = found(hand, steps=4)
        rig = hand.start("join", invite, "--device", "cpu,cpu", *LOCAL)
        trainer = hand.start("join", invite, "--data", str(text), *LOCAL)
        assert [one.end()[0] for one in (rig, trainer, bootstrap)] == [0, 0, 0]
        ready = {event["peer"]: event["part"] for event in rig.events("PeerReady")}
        assert sorted(ready.values()) == ["stage-0", "stage-1"]
        assert [event["exit_code"] for event in rig.events("PeerStopped")] == [0, 0]
        (history,) = (hand.home / "device-0").rglob("history.jsonl")
        roster = next(iter(HistoryReader(history))).record.members
        machine = {roster.machines[peer] for peer in roster.peers if peer in ready}
        assert len(ready) == 2
        assert len(machine) == 1
        asked = voters(roster, "")
        assert len([peer for peer in asked if peer in ready]) == 1
        assert len(asked) == 2  # and the trainer

from __future__ import annotations

from typing import Any

from peers.chaos.timeline import Timeline


def test_what_a_swarm_says_as_it_dissolves_is_not_told_as_if_something_had_struck() -> None:
    told: list[str] = []
    timeline = Timeline(told.append, str)
    lost: dict[str, Any] = {"peer": "b", "reason": "was stopped by SIGTERM, twice"}
    timeline.heard(1.0, "a", "PeerLost", lost)
    timeline.leaving(2.0)
    timeline.heard(3.0, "c", "PeerLost", lost)
    timeline.heard(3.0, "c", "QuorumLost", {"there": 1, "voters": 3})
    timeline.heard(4.0, "c", "PeerStopped", {"reason": "c was stopped by SIGTERM, twice"})
    assert [line.split("step 0", 1)[1].strip() for line in told] == [
        "b is missed: was stopped by SIGTERM, twice",
        "everybody is told to leave, and again when that takes long",
        "c has ended",
    ]


def test_who_moves_and_who_does_not_is_told_with_the_reason() -> None:
    told: list[str] = []
    timeline = Timeline(told.append, str)
    declined = {"step": 3, "peer": "A", "part": "stage-1", "reason": "it has no memory for it"}
    timeline.heard(0.0, "leader", "MoveDeclined", declined)
    assert told[-1].endswith("A does not move to stage-1: it has no memory for it")
    fields = {"step": 4, "moves": {"A": "stage-1"}, "reasons": ["stage-1 computes 1, stage-0 4: A from stage-0"]}
    timeline.heard(1.0, "leader", "HostsMoved", fields)
    assert told[-1].endswith("hosts move with step 4: A to stage-1; stage-1 computes 1, stage-0 4: A from stage-0")


def test_who_is_not_believed_is_told_by_its_trainer() -> None:
    told: list[str] = []
    fields: dict[str, Any] = {"step": 2, "stage": 1, "peer": "h1", "reason": "differs"}
    Timeline(told.append, str).heard(0.0, "t0", "HopDiffers", fields)
    assert told[-1].endswith("t0 does not believe what h1 says that it got or sent at stage 1")
    Timeline(told.append, str).heard(0.0, "leader", "ProvenWrong", {**fields, "by": ["h3", "h5"]})
    assert told[-1].endswith("h1 is proven wrong by h3 and h5")

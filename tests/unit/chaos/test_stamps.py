from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.chaos.invariants.evidence import EVENTS, gather
from peers.chaos.watch import RunWatch
from peers.chaos.world import Stamps
from swarm.clock import SystemClock
from tests.harness.rigs.chaos import contained


def test_an_event_is_stamped_when_it_was_written_however_late_it_is_read() -> None:
    now = [1000.0]
    stamps = Stamps(lambda: now[0])
    watch = RunWatch(stamps)
    for monotonic, read, step in ((50.0, 1000.02, 1), (60.0, 1010.0, 2), (65.0, 1031.0, 3), (71.0, 1031.0, 4)):
        now[0] = read  # the third was read 16 s late: the reader was striking
        stamps.tell(monotonic)
        watch.hear("host-0", "StepClosed", {"step": step})
    assert [round(wall, 2) for wall in watch.closed.values()] == [1000.02, 1010.0, 1015.0, 1021.0]


def test_evidence_of_one_machine_does_not_depend_on_wall_clocks_that_were_set(tmp_path: Path) -> None:
    for name, wrong in (("a", 0.0), ("b", -3600.0)):
        home = tmp_path / name
        home.mkdir()
        lines = [
            {"t": 1000.0 + at + wrong, "m": 10.0 + at, "peer": name, "kind": "Draining", "step": 1, "left": 1}
            for at in (0.0, 5.0)
        ]
        (home / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {fact.wall for fact in gather([tmp_path], offset=990.0).facts} == {1000.0, 1005.0}
    assert {fact.wall for fact in gather([tmp_path]).facts} == {1000.0, 1005.0, -2600.0, -2595.0}


def test_a_step_of_the_wall_clock_moves_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, _ = contained(tmp_path)
    before = world.wall()
    assert abs(before - SystemClock().wall()) < 60.0
    monkeypatch.setattr(SystemClock, "wall", lambda self: 0.0)
    assert before <= world.wall() < before + 60.0

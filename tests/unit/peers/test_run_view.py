from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.progress import amount, row
from peers.run_view import RunView
from peers.watch import EventTail, Line, RunWatch


def _closed(step: int, name: str = "a", wall: float = 0.0, **changes: Any) -> Line:
    fields = {"step": step, "loss": 5.0, "tokens": 100, "microbatches": 1, "seconds": 0.5, "digests": {"stage-0": "x"}}
    return Line(wall, name, "StepClosed", fields | changes)


def _line(kind: str, name: str = "a", **fields: Any) -> Line:
    return Line(0.0, name, kind, fields)


def _view(*lines: Line) -> RunView:
    view = RunView()
    for line in lines:
        view.add(line)
    return view


def test_view_step_closed_by_many_is_one_step_with_all_its_peers() -> None:
    view = _view(_closed(1, "a", 1.0), _closed(1, "b", 1.2), _closed(2, "a", 2.0), _closed(2, "b", 2.1))
    assert view.last_step == 2
    assert view.steps[1].peers == {"a", "b"}
    assert view.steps[1].closed == 1.0
    assert view.tokens_per_s == pytest.approx(100.0)
    assert not view.mismatches


def test_view_one_step_only_takes_its_own_duration() -> None:
    assert _view(_closed(1)).tokens_per_s == pytest.approx(200.0)
    assert _view().tokens_per_s is None


def test_view_different_digests_of_one_step_are_a_mismatch() -> None:
    view = _view(_closed(1, "a"), _closed(1, "b", digests={"stage-0": "y"}))
    assert view.mismatches == {(1, "stage-0")}


def test_view_microbatches_are_accounted_once_each() -> None:
    batches = [["t", "s", 0, position] for position in range(4)]
    view = _view(
        *(_line("JourneyStarted", step=1, microbatch=batch) for batch in batches),
        _line("JourneyStarted", step=2, microbatch=["t", "s", 0, 9]),
        _line("Committed", step=1, microbatches=batches[:3]),
        _line("Committed", step=2, microbatches=batches[:1]),
        _closed(1),
    )
    assert (view.committed, view.duplicated, view.lost) == (3, 1, 1)


def test_view_bytes_reported_before_the_step_count_too() -> None:
    view = _view(
        _line("LinkUsage", "a", step=1, bytes_sent=10), _closed(1), _line("LinkUsage", "b", step=1, bytes_sent=5)
    )
    assert view.steps[1].bytes_sent == 15
    assert view.bytes_per_step == 15


def test_view_what_happened_between_steps_is_noted_at_the_next() -> None:
    view = _view(
        _line("PeerStarted", "stage-0-1", peer="P1", addresses=["/ip4/1.2.3.4/tcp/1"]),
        _closed(1),
        _line("HopMoved", stage=0, old="P1", new="P2abcdef", reason="deadline"),
        Line(0.0, "a", "PeerLost", {"name": "stage-0-1", "reason": "no answer"}),
        _closed(2),
    )
    assert view.steps[1].notes == []
    assert view.steps[2].notes == [
        "stage 0: work of stage-0-1 continues on abcdef (deadline)",
        "stage-0-1 lost: no answer",
    ]
    assert view.lost_peers == {"stage-0-1": "no answer"}
    assert "stage-0-1 lost" in row(view.steps[2])


def test_view_unknown_kind_is_passed_over() -> None:
    assert _view(_line("LoopLag", p50_ms=1.0)).last_step == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.6, "1.0 k"), (3149, "3.1 k"), (314_900, "315 k"), (2e6, "2.0 M"), (5e13, "50.0 T")],
)
def test_amount_any_size_is_short(value: float, text: str) -> None:
    assert amount(value) == text


def test_tail_torn_last_line_waits_and_garbage_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail("a", path)
    assert tail.read() == []
    first = json.dumps({"t": 1.0, "kind": "X"}) + "\n"
    second = json.dumps({"t": 2.0, "kind": "Y"}) + "\n"
    path.write_text(first + second[:10])
    assert [line.kind for line in tail.read()] == ["X"]
    with path.open("a") as file:
        file.write(second[10:] + 'garbage\n{"t": null}\n[]\n')
    assert [line.kind for line in tail.read()] == ["Y"]
    assert tail.unreadable == 3
    assert tail.read() == []


def test_watch_many_peers_are_read_in_order_of_time(tmp_path: Path) -> None:
    for name, times in (("a", (1.0, 3.0)), ("b", (2.0,))):
        (tmp_path / name).write_text("".join(json.dumps({"t": time, "kind": "X"}) + "\n" for time in times))
    lines = RunWatch({name: tmp_path / name for name in ("a", "b", "missing")}).read_all()
    assert [(line.name, line.wall) for line in lines] == [("a", 1.0), ("b", 2.0), ("a", 3.0)]

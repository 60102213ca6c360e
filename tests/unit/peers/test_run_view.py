from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.progress import amount, row
from peers.run_view import RunView
from peers.watch import RunWatch, Told
from swarm.events import (
    Committed,
    Event,
    HopMoved,
    JourneyStarted,
    LinkUsage,
    LoopLag,
    PeerLost,
    PeerStarted,
    StepClosed,
)
from swarm.ids import MicrobatchId, PeerId
from swarm.monitoring.reader import Recorded
from swarm.monitoring.recorder import Recorder
from tests.unit.peers.fake_clock import FakeClock


def _closed(step: int, name: str = "a", wall: float = 0.0, **changes: Any) -> Told:
    fields: dict[str, Any] = {
        "step": step, "loss": 5.0, "tokens": 100, "microbatches": 1, "grad_norm": 1.0, "clip": 1.0, "lr": 0.1,
        "digests": {"stage-0": "x"}, "leader": PeerId("L"), "record": "r", "seconds": 0.5,
    }  # fmt: skip
    return _told(StepClosed(**(fields | changes)), name, wall)


def _told(event: Event, name: str = "a", wall: float = 0.0) -> Told:
    return Told(name, Recorded(wall, wall, PeerId(f"peer{name.replace('-', '')}"), event))


def _view(*told: Told) -> RunView:
    view = RunView()
    for one in told:
        view.add(one)
    return view


def _batch(position: int) -> MicrobatchId:
    return MicrobatchId(PeerId("t"), "s", 0, position)


def test_view_step_closed_by_many_is_one_step_with_all_its_peers() -> None:
    view = _view(_closed(1, "a", 1.0), _closed(1, "b", 1.2), _closed(2, "a", 2.0), _closed(2, "b", 2.1))
    assert view.last_step == 2
    assert view.steps[1].peers == {"a", "b"}
    assert view.steps[1].closed == 1.0
    assert view.tokens_per_s == pytest.approx(100.0)
    assert not view.digest_mismatches()


def test_view_one_step_only_takes_its_own_duration() -> None:
    assert _view(_closed(1)).tokens_per_s == pytest.approx(200.0)
    assert _view().tokens_per_s is None


def test_view_different_digests_of_one_step_are_a_mismatch() -> None:
    view = _view(_closed(1, "a"), _closed(1, "b", digests={"stage-0": "y"}))
    assert [(mismatch.step, mismatch.part) for mismatch in view.digest_mismatches()] == [(1, "stage-0")]


def test_view_microbatches_are_accounted_once_each() -> None:
    view = _view(
        *(_told(JourneyStarted(step=1, microbatch=_batch(position), route=())) for position in range(4)),
        _told(JourneyStarted(step=2, microbatch=_batch(9), route=())),
        _told(Committed(step=1, microbatches=tuple(map(_batch, range(3))))),
        _closed(1),
    )
    account = view.microbatch_account()
    assert (len(account.committed), len(account.lost), len(account.open)) == (3, 1, 1)


def test_view_bytes_reported_before_the_step_count_too() -> None:
    usage = [LinkUsage(step=1, bytes_sent=sent, bytes_received=0) for sent in (10, 5)]
    view = _view(_told(usage[0], "a"), _closed(1), _told(usage[1], "b"))
    assert view.steps[1].bytes_sent == 15
    assert view.bytes_per_step == 15


def test_view_what_happened_between_steps_is_noted_at_the_next() -> None:
    old, new = PeerId("peerstage01"), PeerId("P2abcdef")
    view = _view(
        _told(PeerStarted(role="stage", name="stage-0-1", pid=1, addresses=("x",), seconds=1.0), "stage-0-1"),
        _closed(1),
        _told(HopMoved(step=2, microbatch=_batch(0), stage=0, old=old, new=new, reason="deadline")),
        _told(PeerLost(peer=old, name="stage-0-1", reason="no answer")),
        _closed(2),
    )
    assert view.addresses == {"stage-0-1": ("x",)}
    assert view.steps[1].notes == []
    assert view.steps[2].notes == [
        "stage 0: work of stage-0-1 continues on abcdef (deadline)",
        "stage-0-1 lost: no answer",
    ]
    assert view.lost_peers == {"stage-0-1": "no answer"}
    assert "stage-0-1 lost" in row(view.steps[2])


def test_view_kind_without_a_meaning_here_is_passed_over() -> None:
    assert _view(_told(LoopLag(p50_ms=1.0, p99_ms=1.0, max_ms=1.0))).last_step == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.6, "1.0 k"), (3149, "3.1 k"), (314_900, "315 k"), (2e6, "2.0 M"), (5e13, "50.0 T")],
)
def test_amount_any_size_is_short(value: float, text: str) -> None:
    assert amount(value) == text


def test_watch_many_growing_files_are_read_once_and_in_order_of_time(tmp_path: Path) -> None:
    watch = RunWatch({name: tmp_path / name for name in ("a", "b", "missing")})
    clock = FakeClock()
    usage = LinkUsage(step=1, bytes_sent=1, bytes_received=1)
    with Recorder(tmp_path / "a", PeerId("A"), clock) as a, Recorder(tmp_path / "b", PeerId("B"), clock) as b:
        for sink in (a, b, a):
            clock.now += 1
            sink.emit(usage)
        assert [(told.name, told.record.wall) for told in watch.read_all()] == [("a", 1.0), ("b", 2.0), ("a", 3.0)]
        assert watch.read() == []
        b.emit(usage)
        assert [told.name for told in watch.read()] == ["b"]

"""A share of a processor, and a pause: which of the two lets a process go on."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from peers.chaos import means
from peers.chaos.faults import LimitCpu, Pause, Resume
from tests.harness.rigs.chaos import Processes


class Told:
    """In place of a process: what it was told, and a signal that it was stopped."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.stopped = threading.Event()

    def suspend(self) -> None:
        """As of a process."""
        self.told.append("stop")
        self.stopped.set()

    def resume(self) -> None:
        """As of a process."""
        self.told.append("go")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(means.psutil, "Process", lambda pid: told)
    return told


class Spans:
    """In place of the event that ends it: how long was waited, without waiting, and the end after six of these."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        """As of an event."""
        self.waited.append(seconds)
        return len(self.waited) > 6

    def set(self) -> None:
        """As of an event."""


def test_process_is_stopped_for_all_but_its_share_of_each_span(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(Lock=threading.Lock, Thread=threading.Thread, Event=Spans)
    monkeypatch.setattr(means, "threading", stand_in)
    slowed = means.Slowed(1, 10.0)
    slowed.end()
    spans = slowed._over
    assert isinstance(spans, Spans)
    share = [means.DUTY_S / 10, means.DUTY_S * 9 / 10]
    assert spans.waited == pytest.approx([*share * 3, share[0]])
    assert told.told == ["stop", "go"] * 3


def test_a_pause_lasts_whatever_share_a_peer_has_or_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    processes = Processes(tmp_path, monkeypatch, "a")
    world = processes.world
    world.inflict(LimitCpu("a", 0.1))
    assert told.stopped.wait(300)
    world.inflict(Pause(("a",)))
    before = list(told.told)
    world.inflict(LimitCpu("a", 0.5))
    assert told.told == before
    told.stopped.clear()
    world.inflict(Resume(("a",)))
    assert told.stopped.wait(300)
    world.inflict(LimitCpu("a", 0.0))
    assert not world.slowed

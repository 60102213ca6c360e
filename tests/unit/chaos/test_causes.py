"""Faults of the same links: the end of one leaves what another has done, in both worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Disconnect, Heal, Partition, Pause, Reconnect, SlowLinks
from peers.chaos.process_world import ProcessWorld
from swarm.sim.links import LinkShape, Traffic
from tests.harness.rigs.chaos import Processes, Timers, contained

LOSSY = LinkShape(loss=0.1)


class _World(ProcessWorld):
    """Of processes, as far as links go."""

    links: Any

    def __init__(self, root: Path) -> None:
        super().__init__(root, _Now())  # type: ignore[arg-type]
        self.timers = Timers()
        self.later.after = self.timers.after  # type: ignore[method-assign]
        for name in "ab":
            self.networks.add(name, "")

    def alive(self, name: str) -> bool:
        return True

    @property
    def cut(self) -> bool:
        """Whether nothing passes between the two."""
        return bool(self.links.is_cut("a", "b"))


class _Now(Traffic):
    """Commands without a thread."""

    def slow(self, source: str, target: str, shape: LinkShape, *, both: bool = True, cause: Any = "") -> None:
        super().slow(source, target, shape, both=both, cause=cause)


def test_the_timer_of_a_cut_that_was_healed_leaves_a_newer_one(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.inflict(Partition(("a",), ("b",), seconds=1.0))
    world.inflict(Heal())
    world.inflict(Partition(("a",), ("b",)))
    world.timers.ring()
    assert world.cut


def test_heal_and_reconnect_leave_what_the_other_mends(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.inflict(Disconnect(("a",)))
    world.inflict(Heal())
    assert world.cut
    world.inflict(Partition(("a",), ("b",)))
    world.inflict(Reconnect(("a",)))
    assert world.cut
    world.inflict(Heal())
    assert not world.cut


def test_the_end_of_slow_links_leaves_a_partition_of_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _, timers = contained(tmp_path, "a", "b")
    monkeypatch.setattr(world.networks, "_apply", lambda names: None)
    links = world.networks._links
    world.inflict(SlowLinks(("a",), ("b",), LOSSY, seconds=1.0))
    world.inflict(Partition(("a",), ("b",)))
    timers.ring()
    assert links.cut.get(("a", "b"))
    assert links.shapes.get(("a", "b")) is None
    world.inflict(Heal())
    assert not links.cut.items()


def test_the_end_of_a_disconnection_leaves_another_that_lasts(tmp_path: Path) -> None:
    world = _World(tmp_path)
    world.inflict(Disconnect(("a",), seconds=1.0))
    world.inflict(Disconnect(("a",), "wan"))
    world.timers.ring()
    assert world.cut
    world.inflict(Reconnect(("a",)))
    assert not world.cut
    world.inflict(Disconnect(("a",), seconds=1.0))
    world.timers.ring()
    assert not world.cut


def test_the_end_of_a_pause_leaves_another_that_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(tmp_path / "p", monkeypatch, "a")
    world, engine, timers = contained(tmp_path / "c", "a")
    for one in (processes.world, world):
        one.inflict(Pause(("a",), seconds=1.0))
        one.inflict(Pause(("a",), seconds=9.0))
    first, _ = processes.timers.acts
    first()
    assert "a" in processes.world.paused
    (until_one, until_nine) = timers.acts
    until_one()
    assert engine.paused
    until_nine()
    assert not engine.paused
    processes.timers.ring()
    assert not processes.world.paused

"""Faults of the same links: the end of one leaves what another has done, in both worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import Disconnect, Heal, Partition, Reconnect, SlowLinks
from peers.chaos.networks import Networks
from peers.chaos.process_faults import DOERS
from swarm.sim.links import LinkShape, Traffic
from tests.unit.chaos.worlds import Timers, contained

LOSSY = LinkShape(loss=0.1)


class _World(Timers):
    """Of processes, as far as links go."""

    def __init__(self) -> None:
        super().__init__()
        self.links: Any = _Now()
        self.networks = Networks(self.links)
        for name in "ab":
            self.networks.add(name, "")

    def inflict(self, fault: Any) -> None:
        """As a world does."""
        DOERS[type(fault)](self, fault)

    @property
    def cut(self) -> bool:
        """Whether nothing passes between the two."""
        return bool(self.links.is_cut("a", "b"))


class _Now(Traffic):
    """Commands without a thread."""

    def slow(self, source: str, target: str, shape: LinkShape, *, both: bool = True, cause: Any = "") -> None:
        super().slow(source, target, shape, both=both, cause=cause)


def test_the_end_of_slow_links_leaves_a_partition_of_the_same_pair() -> None:
    world = _World()
    world.inflict(SlowLinks(("a",), ("b",), LOSSY, seconds=1.0))
    world.inflict(Partition(("a",), ("b",)))
    world.ring()
    assert world.cut
    assert world.links.shape("a", "b") == LinkShape()
    world.inflict(Heal())
    assert not world.cut


def test_the_timer_of_a_cut_that_was_healed_leaves_a_newer_one() -> None:
    world = _World()
    world.inflict(Partition(("a",), ("b",), seconds=1.0))
    world.inflict(Heal())
    world.inflict(Partition(("a",), ("b",)))
    world.ring()
    assert world.cut


def test_heal_and_reconnect_leave_what_the_other_mends() -> None:
    world = _World()
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

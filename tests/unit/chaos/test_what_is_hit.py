"""Whom a fault really hits: nobody who had ended before it, and none but the start that it was meant for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from peers.chaos import container_world
from peers.chaos.engine import EngineError
from peers.chaos.faults import (
    CannotInflict,
    Disconnect,
    Fault,
    Kill,
    Partition,
    Pause,
    SlowLinks,
    Stop,
    Upgrade,
)
from peers.chaos.plan import FaultPlan, On, Strike
from peers.chaos.processes import Process
from swarm.sim.links import LinkShape
from tests.harness.rigs.chaos import FakeEngine, Processes, contained

OF_DEAD = [Kill(("a",)), Stop(("a",)), Pause(("a",)), Upgrade("a")]


@pytest.mark.parametrize("fault", OF_DEAD, ids=lambda fault: fault.name)
def test_what_hits_nobody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    processes = Processes(tmp_path, monkeypatch, "a")
    processes.end("a")
    with pytest.raises(CannotInflict, match="a does not run now"):
        processes.world.inflict(fault)
    world, engine, _ = contained(tmp_path / "c", "a")
    engine.end(world.peers["a"].container, code=1)
    with pytest.raises(CannotInflict, match="a does not run now"):
        world.inflict(fault)


@pytest.mark.parametrize("seconds", [None, 5.0])
@pytest.mark.parametrize("dead", ["a", "b"])
def test_a_cut_that_is_over_soon_needs_somebody_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str, seconds: float | None
) -> None:
    processes = Processes(tmp_path, monkeypatch, "a", "b")
    processes.end(dead)
    cuts: list[Fault] = [Partition(("a",), ("b",), seconds=seconds), Disconnect((dead,), seconds=seconds)]
    cuts.append(SlowLinks(("a",), ("b",), LinkShape(loss=0.1), seconds=seconds))
    monkeypatch.setattr(processes.world, "_strike", lambda fault: fault.victims)
    for cut in cuts:
        if seconds is None:  # who comes back is cut off then
            assert processes.world.inflict(cut)
            continue
        with pytest.raises(CannotInflict, match=f"{dead} does not run now"):
            processes.world.inflict(cut)


class _Throttled:
    """In place of an engine: so often it cannot freeze anybody."""

    def __init__(self, engine: FakeEngine, refusals: int, words: str) -> None:
        self._engine, self.left, self._words = engine, refusals, words

    def call(self, *arguments: str) -> str:
        """As the engine does."""
        if arguments[0] == "pause" and self.left:
            self.left -= 1
            raise EngineError(f"Cannot pause container: OCI runtime pause failed: {self._words}: unknown")
        return self._engine.call(*arguments)

    def inspect(self, name: str, what: str) -> str:
        """As the engine does."""
        return self._engine.inspect(name, what)


@pytest.mark.parametrize(("words", "tries"), [("unable to freeze", container_world.FREEZE_TRIES), ("no such", 1)])
def test_who_cannot_be_frozen_at_all_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, tries: int
) -> None:
    world, engine, _ = contained(tmp_path, "a")
    monkeypatch.setattr(container_world, "FREEZE_AGAIN_S", 0.0)
    throttled = world.engine = _Throttled(engine, 99, words)  # type: ignore[assignment]
    with pytest.raises(EngineError, match=words):
        world.inflict(Pause(("a",)))
    assert throttled.left == 99 - tries


def test_a_strike_on_the_dead_is_told_and_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(tmp_path, monkeypatch, "a", "b")
    processes.end("a")
    plan = FaultPlan(
        Strike("one", On("Tick"), Kill(("a",))), Strike("both", On("Tick"), Kill(("a", "b"))), world=processes.world
    )
    plan._hear("b", "Tick", {})
    assert plan.fired["both"].victims == ("b",)
    (line,) = (tmp_path / "faults.jsonl").read_text().splitlines()
    assert json.loads(line)["first"] == ["b"]
    with pytest.raises(AssertionError, match="one: CannotInflict: kill: a does not run now"):
        plan.assert_fired()


class _Restarting:
    """A lock that somebody else had: when it is free, its peer was started again."""

    def __init__(self, lock: object, restart: Callable[[], object]) -> None:
        self._lock, self._restart = lock, restart
        self.armed = False

    def __enter__(self) -> None:
        if self.armed:
            self.armed = False
            self._restart()
        self._lock.__enter__()  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)  # type: ignore[attr-defined]


def test_the_end_of_a_notice_kills_no_container_that_was_started_since(tmp_path: Path) -> None:
    world, engine, timers = contained(tmp_path, "a")
    peer = world.peers["a"]
    lock = _Restarting(world._lock, lambda: peer.starts.append("swarm-a-1"))
    world._lock = lock  # type: ignore[assignment]
    world.inflict(Stop(("a",), grace_s=1.0))
    lock.armed = True
    timers.ring()
    assert engine.calls == [("kill", "--signal", "TERM", peer.starts[0])]


def test_the_end_of_a_notice_kills_no_process_that_was_started_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(tmp_path, monkeypatch, "a")
    world, peer = processes.world, processes.world.peers["a"]
    lock = _Restarting(world._lock, lambda: peer.starts.append(Process(processes.process(), tmp_path / "again")))
    world._lock = lock  # type: ignore[assignment]
    world.inflict(Stop(("a",), grace_s=1.0))
    lock.armed = True
    processes.timers.ring()
    assert [number for _, number in processes.signals] == [15]


def test_who_does_not_heed_a_notice_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(tmp_path, monkeypatch, "a")
    processes.world.inflict(Stop(("a",), grace_s=1.0))
    processes.timers.ring()
    assert processes.world.exit_code("a") == -9
    world, engine, timers = contained(tmp_path / "c", "a")
    world.inflict(Stop(("a",), grace_s=1.0))
    timers.ring()
    assert engine.calls[-1] == ("kill", world.peers["a"].container)

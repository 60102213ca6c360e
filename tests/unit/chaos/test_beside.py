"""What goes on after a fault has returned: when it fails, somebody says so."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.chaos.container_world import ContainerWorld
from peers.chaos.engine import EngineError
from peers.chaos.faults import Pause, Upgrade
from tests.harness.rigs.chaos import Processes, contained


def _fail() -> None:
    raise EngineError("the engine does not answer")


def test_what_cannot_be_done_later_is_a_problem_unless_the_play_is_over(tmp_path: Path) -> None:
    world = ContainerWorld(tmp_path)
    world.later.unless_over(_fail)
    assert world.problems() == (
        "what was to be done in the background was not: EngineError: the engine does not answer",
    )
    world.over.set()
    world.later.unless_over(_fail)
    assert len(world.problems()) == 1


def test_a_resume_that_fails_is_told_and_one_of_a_peer_that_has_ended_is_not(tmp_path: Path) -> None:
    world, engine, timers = contained(tmp_path, "a")
    engine.refused = {"unpause"}
    world.inflict(Pause(("a",), seconds=1.0))
    (resume,) = timers.acts
    world.later.unless_over(resume)
    assert "refused: unpause" in world.problems()[0]
    ended, engine, timers = contained(tmp_path / "ended", "a")
    engine.refused = {"unpause"}
    ended.inflict(Pause(("a",), seconds=1.0))
    engine.end(ended.peers["a"].container)
    timers.ring()
    assert ended.problems() == ()


def test_what_could_not_be_kept_as_the_world_ended_is_told_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _, _ = contained(tmp_path, "a")
    world._watcher.start()
    monkeypatch.setattr(world, "_kill_all", _fail)
    monkeypatch.setattr(world, "_remove", lambda: None)
    world.__exit__(None, None, None)
    assert world.unkept() == ("as the play was cleared away: the engine does not answer",)
    assert world.problems() == ()


def test_events_of_the_engine_that_end_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ContainerWorld(tmp_path)
    died = {"Action": "die", "Actor": {"Attributes": {"name": "a", "exitCode": "3"}}}
    stream = SimpleNamespace(stdout=io.StringIO(json.dumps(died) + "\nnot json\n"))
    monkeypatch.setattr(world.watcher, "_stream", stream)
    world.watcher._read()
    died_with = world.watcher.died("a")
    assert died_with.code == 3
    assert "docker events is gone" in world.problems()[0]


def test_events_that_end_because_we_stop_listening_are_none(tmp_path: Path) -> None:
    world = ContainerWorld(tmp_path)
    world.watcher.close()
    world.watcher._read()
    assert world.problems() == ()


@pytest.mark.parametrize(("code", "problems"), [(75, 0), (1, 1), (None, 1)], ids=["drained", "failed", "stubborn"])
def test_who_is_upgraded_must_have_left_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, problems: int
) -> None:
    processes = Processes(tmp_path / "p", monkeypatch, "a")
    processes.world.inflict(Upgrade("a", grace_s=0.1))
    world, engine, _ = contained(tmp_path / "c", "a")
    begun: list[str] = []
    beside: list[Callable[[], object]] = []
    monkeypatch.setattr(world, "begin", lambda peer: begun.append(peer.name))
    monkeypatch.setattr(world, "beside", beside.append)
    world.inflict(Upgrade("a", grace_s=0.0))
    if code is not None:
        processes.end("a", code)
        engine.end(world.peers["a"].container, code=code)
    while processes.timers.acts:
        processes.timers.ring()
    beside[0]()
    assert len(processes.world.peers["a"].starts) == 2
    assert begun == ["a"]
    for told in (processes.world.problems(), world.problems()):
        assert len(told) == problems
        assert all("where 75 was expected" in problem for problem in told)


def test_what_cannot_be_understood_is_told_once_and_the_rest_is_heard(tmp_path: Path) -> None:
    world, _, _ = contained(tmp_path, "a")
    heard: list[str] = []

    def hear(name: str, kind: str, fields: Mapping[str, Any]) -> None:
        heard.append(fields["reason"])

    world.listen(hear)
    line = '{"t": 1.0, "m": 1.0, "peer": "A", "incarnation": 1, "kind": "Draining", %s}\n'
    world.log("a").write_text(line % '"why": "x"' + line % '"why": "x"' + line % '"reason": "y", "again": false')
    world._look(world.peers["a"])
    assert heard == ["y"]
    (problem,) = world.problems()
    assert "what a said was not understood: KeyError: 'reason'" in problem

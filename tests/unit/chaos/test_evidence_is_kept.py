"""What judges a play: everything that its peers have written, however often they were started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.chaos import run_scenario, worlds
from peers.chaos.faults import Restart
from peers.chaos.lives import Player
from peers.chaos.play import PlayOutcome
from peers.chaos.scenario import parse_scenario
from peers.chaos.verdict import Judged, judge
from peers.chaos.worlds import CannotPlay
from peers.exit_codes import EXIT_ERROR
from peers.home.sessions import KEPT_SESSIONS
from swarm.clock import SystemClock
from tests.harness.rigs.chaos import MadeUpWorld, Processes, contained

SMALL = 'name = "s"\nproves = "x"\nuntil = { steps = 6 }\nswarm = { stages = 1, replicas = 2, trainers = 1 }\n'
SCENARIO = parse_scenario({"name": "a", "proves": "b", "until": {"minutes": 1}}, "a.toml")


def _lived(home: Path, sessions: int) -> None:
    for number in range(sessions):
        session = home / "1" / "sessions" / f"20260101-00000{number}"
        session.mkdir(parents=True)
        (session / "events.jsonl").write_text("{}\n")


def test_sessions_that_the_next_start_deletes_are_kept_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(tmp_path / "p", monkeypatch, "a")
    _lived(tmp_path / "p" / "homes" / "a", KEPT_SESSIONS)
    processes.world.inflict(Restart("a"))
    world, engine, _ = contained(tmp_path / "c", "a")
    monkeypatch.setattr(world.networks, "options", lambda spec: [])
    monkeypatch.setattr(world.networks, "connect", lambda spec, container: None)
    monkeypatch.setattr(world.networks, "arrive", lambda name, container, pid: None)
    _lived(tmp_path / "c" / "homes" / "a", KEPT_SESSIONS)
    engine.end(world.peers["a"].container)
    world.inflict(Restart("a"))
    for root in (tmp_path / "p", tmp_path / "c"):
        moved = list((root / "lost").rglob("events.jsonl"))
        assert [path.parent.name for path in moved] == ["20260101-000000"]
        assert len(list((root / "homes").rglob("events.jsonl"))) == KEPT_SESSIONS - 1


def test_a_container_that_does_not_arrive_is_the_one_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine, _ = contained(tmp_path, "a")
    peer = world.peers["a"]
    monkeypatch.setattr(world.networks, "options", lambda spec: [])
    monkeypatch.setattr(world.networks, "connect", lambda spec, container: None)
    engine.refused = {"{{.State.Pid}}"}
    engine.end(peer.container)
    with pytest.raises(Exception, match="refused"):
        world.inflict(Restart("a"))
    assert engine.calls[-1] == ("rm", "--force", f"swarm-{engine.play}-a-1")
    assert "could not be started" in (tmp_path / "logs" / "a-1.log").read_text()


def test_output_of_a_new_start_is_told_once(tmp_path: Path) -> None:
    world, _, _ = contained(tmp_path, "a")
    peer, heard = world.peers["a"], list[str]()
    world.listen(lambda name, kind, fields: heard.append(kind))
    peer.read = 1000  # of the start before
    line = json.dumps({"t": 1.0, "m": 1.0, "peer": "A", "kind": "Tick"})
    (tmp_path / "logs" / "a-1.log").write_text(line + "\n")
    world.began(peer, "swarm-a-1")
    world._look(peer)
    world._look(peer)
    assert heard == ["Tick"]


class _Left(MadeUpWorld):
    """A world after its play."""

    def homes(self) -> list[Path]:
        return [self.root]


def _judged(root: Path, players: tuple[Player, ...]) -> Judged:
    home = root / "homes" / "a"
    home.mkdir(parents=True)
    line = {"t": 1.0, "m": 1.0, "peer": "A", "kind": "PeerReady", "step": 0, "part": "stage-0", "seconds": 1.0}
    (home / "events.jsonl").write_text(json.dumps(line) + "\n")
    return judge(SCENARIO, "processes", _Left(root), players, PlayOutcome(started={"a", "b"}))


def test_who_was_started_and_left_nothing_is_a_problem(tmp_path: Path) -> None:
    judged = _judged(tmp_path, (Player("a", "A", "stage"), Player("b", "", "stage"), Player("late", "", "stage")))
    assert [one for one in judged.problems if "left no event" in one] == [
        "b was started and left no event: nobody knows what it did"
    ]


def test_bar_of_whole_batches_is_the_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manifest.toml").write_text("[batch]\nmicrobatches_per_step = 24\n")
    seen: list[int | None] = []
    from peers.chaos import verdict

    check = verdict.check
    monkeypatch.setattr(verdict, "check", lambda evidence, limits: (seen.append(limits.target), check(evidence))[1])
    _judged(tmp_path, ())
    assert seen == [24]


class _Torn(_Left):
    """A world that could not keep everything, which is known once it has ended."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, steps=6)
        self.lost: tuple[str, ...] = ()

    def __exit__(self, *error: object) -> None:
        super().__exit__(None, None, None)
        self.lost = ("as the play was cleared away: the disk of a could not be kept",)

    def unkept(self) -> tuple[str, ...]:
        return self.lost


def test_what_was_lost_as_the_world_ended_breaks_the_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scenario, "world_of", lambda *_: _Torn(tmp_path))
    (tmp_path / "s.toml").write_text(SMALL)
    report = tmp_path / "report.json"
    options = run_scenario.Options(scenario=tmp_path / "s.toml", on="processes", out=tmp_path / "out", report=report)
    assert run_scenario.chaos(options, SystemClock()) == EXIT_ERROR
    assert any("could not be kept" in problem for problem in json.loads(report.read_text())["problems"])


@pytest.mark.parametrize("on", [None, "containers"])
def test_what_containers_have_no_means_for_is_played_among_processes_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on: str | None
) -> None:
    def world(name: str, *_: object) -> _Left:
        if name == "containers":
            raise CannotPlay("s cannot be played among containers: this kernel has no netem")
        return _Left(tmp_path, steps=6)

    monkeypatch.setattr(run_scenario, "world_of", world)
    monkeypatch.setattr(worlds, "engine_answers", lambda: True)
    (tmp_path / "s.toml").write_text(SMALL)
    options = run_scenario.Options(scenario=tmp_path / "s.toml", on=on, out=tmp_path / "out")
    if on:
        with pytest.raises(CannotPlay, match="no netem"):
            run_scenario.chaos(options, SystemClock())
        assert not (tmp_path / "out").exists()
    else:
        run_scenario.chaos(options, SystemClock())
        assert "played among processes instead" in capsys.readouterr().out
        assert json.loads((tmp_path / "out" / "report.json").read_text())["world"] == "processes"

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peers.chaos import worlds
from peers.chaos.faults import LimitMemory
from peers.chaos.scenario import Scenario, parse_scenario
from peers.chaos.worlds import Images, choose_world, world_of
from peers.cli.app import run
from swarm.errors import ConfigError, SwarmError

DOCUMENT = {"name": "small", "proves": "that it can be chosen", "until": {"steps": 10}}


def _scenario(**keys: object) -> Scenario:
    return parse_scenario({**DOCUMENT, **keys}, "a.toml")


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from peers.cli.app import run; code = run(['chaos', '--help']);"
        "slow = {'torch', 'hivemind'} & set(sys.modules); sys.exit(f'{slow} {code}' if slow or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "SCENARIO.toml" in done.stdout


def test_usage_that_is_wrong_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos"]) == 2
    assert "--list" in capsys.readouterr().err
    assert run(["chaos", str(tmp_path / "none.toml")]) == 2
    (tmp_path / "needy.toml").write_text('name = "needy"\nproves = "x"\nneeds = "containers"\nuntil = { steps = 5 }\n')
    assert run(["chaos", str(tmp_path / "needy.toml"), "--on", "processes", "--out", str(tmp_path / "o")]) == 2
    (tmp_path / "plain.toml").write_text('name = "plain"\nproves = "x"\nuntil = { steps = 5 }\n')
    options = ["--on", "processes", "--out", str(tmp_path / "o"), "--report", str(tmp_path / "nowhere" / "r.json")]
    assert run(["chaos", str(tmp_path / "plain.toml"), *options]) == 2
    assert "--report" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_list_names_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["chaos", "--list"]) == 0
    assert "none here" in capsys.readouterr().out
    (tmp_path / "docker" / "scenarios").mkdir(parents=True)
    (tmp_path / "docker" / "scenarios" / "a.toml").write_text('name = "a"\nproves = "that b"\nuntil = { steps = 5 }\n')
    assert run(["chaos", "--list"]) == 0
    assert "docker/scenarios/a.toml   5 steps  that b" in capsys.readouterr().out


def test_what_only_containers_have_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "engine_answers", lambda: False)
    with pytest.raises(ConfigError, match="docker version"):
        choose_world(_scenario(needs="containers"), None)


def test_fault_without_means_is_refused_before_anybody_is_started(tmp_path: Path) -> None:
    with (
        pytest.raises(SwarmError, match="limit_memory: swarm chaos --on containers"),
        world_of("processes", tmp_path, _scenario(), [LimitMemory("host-0-0", 64)], Images()),
    ):
        pytest.fail("it was entered")
    assert not (tmp_path / "homes").exists()


def test_links_that_are_described_are_those_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "engine_answers", lambda: True)
    linked = _scenario(swarm={"links": {"default": {"latency_ms": 5}}})
    assert choose_world(linked, None) == ("processes", "its links are described")
    with pytest.raises(ConfigError, match="slow_links"):
        choose_world(linked, "containers")

"""Engines that answer and that no play can rest on, stood in for by a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.chaos import containers, nemesis
from peers.chaos.container_world import ContainerWorld
from peers.chaos.engine import Engine, EngineError, Unfit
from peers.chaos.scenario import parse_scenario
from peers.chaos.worlds import CannotPlay, Images, world_of
from tests.harness.rigs.chaos import client_script

START = {"Action": "start", "Actor": {"Attributes": {"name": "swarm-play-nemesis"}}}
PODMAN = {"Status": "start", "Name": "swarm-play-nemesis", "Type": "container"}
# "exec" is a shell that sees the directory of the play as /play, where it is on the machine of the engine.
CLIENT = """#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >>calls
case "$1" in
  info) cat info 2>/dev/null || { echo "no such field" >&2; exit 1; } ;;
  run) [ -e run ] || { echo "bind source path does not exist" >&2; exit 125; } ;;
  events) cat events; exec sleep 1000 ;;
  exec) sed -u "s#/play#$(cat seen)#" | sh ;;
esac
"""
SCENARIO = parse_scenario({"name": "small", "proves": "x", "until": {"steps": 10}}, "a.toml")


class Machine:
    """Where an engine runs; as it is first, a play can rest on it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.play = root, root / "play"
        self.client = client_script(root, CLIENT)
        self.has("info", json.dumps(["name=apparmor", "name=seccomp,profile=builtin"]))
        self.has("seen", str(self.play))
        self.has("events", json.dumps(START) + "\n")
        self.has("run", "")
        monkeypatch.setattr(containers, "Engine", lambda _: Engine("play", str(self.client)))

    def has(self, name: str, text: str) -> None:
        """What the script finds there."""
        (self.root / name).write_text(text)

    def calls(self) -> str:
        """All that the engine was asked."""
        return (self.root / "calls").read_text()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def refused(machine: Machine, words: str) -> None:
    """Nobody enters a world with this engine, for this reason."""
    with pytest.raises(Unfit, match=words), ContainerWorld(machine.play):
        pytest.fail("it was entered")


def test_engine_that_is_as_it_must_be_is_taken(machine: Machine) -> None:
    with ContainerWorld(machine.play) as world:
        assert list(machine.play.iterdir()) == []
        assert world.problems() == ()


@pytest.mark.parametrize(("option", "words"), [("rootless", "without root"), ("userns", "maps users")])
def test_engine_without_the_means_is_refused_before_anything_is_made(machine: Machine, option: str, words: str) -> None:
    machine.has("info", json.dumps(["name=seccomp,profile=builtin", f"name={option}"]))
    refused(machine, words)
    assert "run" not in machine.calls()


@pytest.mark.parametrize("said", [None, "{{unknown}}"])
def test_engine_that_does_not_say_what_it_is_is_refused(machine: Machine, said: str | None) -> None:
    if said is None:
        (machine.root / "info").unlink()
    else:
        machine.has("info", said)
    refused(machine, "does not say what this engine is")


def test_engine_that_sees_other_files_is_refused_and_nothing_is_left(machine: Machine) -> None:
    machine.has("seen", "/nowhere")
    refused(machine, "does not see .*play of this machine")
    assert list(machine.play.iterdir()) == []


def test_engine_that_cannot_mount_our_directory_is_refused_with_its_words(machine: Machine) -> None:
    (machine.root / "run").unlink()
    refused(machine, "bind source path does not exist")


def test_engine_whose_events_have_other_words_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "TOLD_S", 0.05)
    machine.has("events", json.dumps(PODMAN) + "\n")
    refused(machine, "events of this engine are not understood")


def test_play_cannot_be_played_with_an_engine_that_is_unfit(machine: Machine) -> None:
    machine.has("info", json.dumps(["name=rootless"]))
    with (
        pytest.raises(CannotPlay, match="small cannot be played among containers: .*--on processes"),
        world_of("containers", machine.play, SCENARIO, [], Images()),
    ):
        pytest.fail("it was entered")


def test_image_of_faults_that_is_missing_is_told_with_what_makes_it(machine: Machine) -> None:
    machine.client.write_text(CLIENT.replace("  info)", "  image) [ $5 = swarm-trainer:local ] ;;\n  info)"))
    with pytest.raises(EngineError, match=r"base-image.sh --nemesis") as refusal, ContainerWorld(machine.play):
        pytest.fail("it was entered")
    assert not isinstance(refusal.value, Unfit)

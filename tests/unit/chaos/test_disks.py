"""Disks that are full stay so until there is room again: starting a peer once more gives it none."""

from __future__ import annotations

import resource
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from peers.chaos import container_start
from peers.chaos.faults import CannotInflict, FillDisk, FreeDisk, Kill, Restart
from peers.home.places import KEY_FILE
from tests.harness.rigs.chaos import Processes, contained

ROOMY, FULL = (5, 7), (0, 7)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """To how many bytes each process may let a file grow."""
    found: dict[int, tuple[int, int]] = {}

    def prlimit(pid: int, what: int, new: tuple[int, int] | None = None) -> tuple[int, int]:
        before = found.get(pid, ROOMY)
        found[pid] = new or before
        return before

    monkeypatch.setattr(resource, "prlimit", prlimit)
    return found


def test_process_that_is_started_again_finds_its_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[int, tuple[int, int]]
) -> None:
    world = Processes(tmp_path, monkeypatch, "a").world
    for fault in (FillDisk("a"), Kill(("a",)), Restart("a"), Kill(("a",)), Restart("a")):
        world.inflict(fault)
    assert limits[world.peers["a"].pid] == FULL
    world.inflict(FreeDisk("a"))
    assert limits[world.peers["a"].pid] == ROOMY
    world.inflict(Restart("a"))
    assert limits.get(world.peers["a"].pid, ROOMY) == ROOMY


def test_disk_is_freed_while_its_peer_is_down_and_an_empty_one_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[int, tuple[int, int]]
) -> None:
    world = Processes(tmp_path, monkeypatch, "a", "b").world
    for fault in (FillDisk("a"), Kill(("a",)), FreeDisk("a"), Restart("a"), FillDisk("b"), Restart("b", False)):
        world.inflict(fault)
    assert limits.get(world.peers["a"].pid, ROOMY) == ROOMY
    assert limits.get(world.peers["b"].pid, ROOMY) == ROOMY
    world.inflict(Kill(("a",)))
    with pytest.raises(CannotInflict, match="a does not run now"):
        world.inflict(FillDisk("a"))


class Disk:
    """A directory in place of a peer's disk of limited size: what is done in the container that holds it is done."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = root / "disk"
        self.path.mkdir()
        self.world, self.engine, _ = contained(root, "a")
        self.peer = self.world.peers["a"]
        self.peer.spec = replace(self.peer.spec, disk_mib=4)
        self._note = self.engine.call
        monkeypatch.setattr(container_start, "HOME", str(self.path))
        monkeypatch.setattr(container_start, "HOMES", str(root / "homes"), raising=False)
        monkeypatch.setattr(self.engine, "call", self._call)
        for what in ("connect", "arrive"):
            monkeypatch.setattr(self.world.networks, what, lambda *_: None)
        monkeypatch.setattr(self.world.networks, "options", lambda spec: [])

    def _call(self, *arguments: str, timeout_s: float = 0.0) -> str:
        said = self._note(*arguments)
        if arguments[0] == "exec":
            subprocess.run(arguments[2:], check=True, stderr=subprocess.DEVNULL)
        return said


def test_container_that_is_started_again_finds_its_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    (disk.path / "kept").write_text("new")
    (disk.path / ".full").write_text("0")
    (disk.peer.home / "kept").write_text("old")
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(disk.path / "control"))
        disk.world.inflict(Restart("a"))
    assert sorted(path.name for path in disk.path.iterdir()) == [".full", "control", "kept"]
    assert {path.name: path.read_text() for path in disk.peer.home.iterdir()} == {"kept": "new"}


def test_container_that_loses_its_disk_has_room_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    monkeypatch.setattr(container_start, "give", lambda world, path: None)
    for name in (".full", "kept", KEY_FILE):
        (disk.path / name).write_text(name)
    disk.world.inflict(Restart("a", keep_disk=False))
    assert [path.name for path in disk.path.iterdir()] == [KEY_FILE]
    assert [path.name for path in disk.peer.home.iterdir()] == [KEY_FILE]
    assert (tmp_path / "lost" / "a-1" / "kept").is_file()

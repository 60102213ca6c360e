"""What containers are given, with an engine that is made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peers.chaos import container_start
from tests.unit.chaos.worlds import contained


@pytest.fixture
def closed_umask() -> Iterator[None]:
    """Nobody else may read what is made."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("closed_umask")
def test_files_of_a_peer_can_be_read_by_others_whatever_the_umask(tmp_path: Path) -> None:
    world, _, _ = contained(tmp_path / "play", "a")
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "text").write_text("x")
    (tmp_path / "run.toml").write_text("x")
    peer = world.peers["a"]
    peer.spec = replace(peer.spec, files={"data": tmp_path / "data", "run": tmp_path / "run.toml"})
    world.skewed.add("a")
    (world.root / "clocks").mkdir()
    (world.root / "clocks" / "libfaketime.so").touch()
    container_start.prepare(world, peer)
    assert (world.root / "files" / "a" / "data" / "data" / "deep" / "text").read_text() == "x"
    assert (world.root / "files" / "a" / "run" / "run.toml").read_text() == "x"
    for mounted in (world.root / "files" / "a", world.root / "clocks"):
        modes = {path: path.stat().st_mode & 0o777 for path in (mounted, *mounted.rglob("*"))}
        assert {path for path, mode in modes.items() if mode != (0o755 if path.is_dir() else 0o644)} == set()

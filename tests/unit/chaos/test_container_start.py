"""What containers are given, with an engine that is made up."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peers.chaos import container_start, container_world
from peers.chaos.container_world import ContainerWorld
from peers.chaos.faults import CannotInflict, Kill, LimitCpu, Pause, Restart, SkewClock, SlowDevice
from peers.chaos.world import PeerSpec
from tests.harness.rigs.chaos import FakeEngine, contained


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


@pytest.mark.parametrize(
    ("fault", "quota"), [(LimitCpu("a", 0.5), ["10000"]), (SlowDevice("a", 4.0), ["5000"]), (LimitCpu("a", 0.0), [])]
)
def test_slower_processor_is_that_of_later_starts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: LimitCpu | SlowDevice, quota: list[str]
) -> None:
    world, engine, _ = contained(tmp_path, "a")
    monkeypatch.setattr(world.networks, "options", lambda spec: [])
    monkeypatch.setattr(world.networks, "connect", lambda spec, container: None)
    monkeypatch.setattr(world.networks, "arrive", lambda name, container, pid: None)
    world.inflict(fault)
    engine.end(world.peers["a"].container)
    world.inflict(Restart("a"))
    created = next(call for call in reversed(engine.calls) if call[0] == "create")
    given = [created[at + 1] for at, word in enumerate(created) if word == "--cpu-quota"]
    assert given == quota


@pytest.mark.parametrize(("offset_s", "shown"), [(3600.0, 4600), (-90.0, 910), (0.5, 1000), (0.0, 999)])
def test_clock_that_shows_what_it_was_set_to_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float, shown: int
) -> None:
    world, engine = _with_clock(tmp_path, monkeypatch, shown)
    assert world.inflict(SkewClock("a", offset_s)) == ("a",)
    assert (tmp_path / "clocks" / "a").read_text() == f"{offset_s:+f}\n"
    assert engine.calls[-1] == ("exec", world.peers["a"].container, "date", "+%s")


@pytest.mark.parametrize("offset_s", [3600.0, -90.0, 5.0])
def test_clock_that_stays_as_it_was_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    world, _ = _with_clock(tmp_path, monkeypatch, 1000)
    with pytest.raises(CannotInflict, match="does not fit its image"):
        world.inflict(SkewClock("a", offset_s))


def test_clock_that_nobody_could_see_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = _with_clock(tmp_path, monkeypatch, 1000)
    world.inflict(Pause(("a",)))
    with pytest.raises(CannotInflict, match="a is paused"):
        world.inflict(SkewClock("a", 60.0))
    world.inflict(Kill(("a",)))
    with pytest.raises(CannotInflict, match="a does not run now"):
        world.inflict(SkewClock("a", 90.0))
    assert not (tmp_path / "clocks" / "a").exists()


def _with_clock(root: Path, monkeypatch: pytest.MonkeyPatch, shown: int) -> tuple[ContainerWorld, FakeEngine]:
    """A world at the moment 1000, whose one peer has a clock that shows this."""
    world, engine, _ = contained(root, "a")
    world.skewed.add("a")
    (root / "clocks").mkdir()
    monkeypatch.setattr(container_world.SystemClock, "wall", lambda self: 1000.0)
    engine.answers["date"] = str(shown)
    return world, engine


@pytest.mark.parametrize(("public", "kinds"), [(False, ["tcp/4001"]), (True, ["tcp/4001", "udp/4001/quic-v1"])])
def test_peers_of_a_play_with_nat_have_public_addresses_and_listen_on_quic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public: bool, kinds: list[str]
) -> None:
    world, engine, _ = contained(tmp_path)
    monkeypatch.setattr(world.networks, "arrive", lambda name, container, pid: None)
    world.networks.public = public
    world.start(PeerSpec(name="a", role="stage", arguments=("join",)))
    created = next(call for call in engine.calls if call[0] == "create")
    listened = [created[at + 1] for at, word in enumerate(created) if word == "--listen"]
    assert listened == [f"/ip4/0.0.0.0/{kind}" for kind in kinds]
    made = next(call for call in engine.calls if call[:2] == ("network", "create"))
    subnet = ipaddress.IPv4Network(made[made.index("--subnet") + 1])
    assert subnet.is_global == public

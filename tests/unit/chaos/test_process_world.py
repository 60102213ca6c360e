"""Faults among processes, with processes that only write events and hold a child and a file, as a peer does."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from peers.chaos import means
from peers.chaos.faults import (
    CannotInflict,
    CorruptBytes,
    Disconnect,
    FillDisk,
    FreeDisk,
    Heal,
    JoinerStorm,
    Kill,
    KillDaemon,
    LimitMemory,
    Moment,
    Partition,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SkewClock,
    SlowLink,
    SlowLinks,
    Start,
    Stop,
    Twin,
)
from peers.chaos.means import _fakes, faketime_library
from peers.chaos.plan import FaultPlan, On, Strike
from peers.chaos.process_world import ProcessWorld
from peers.chaos.processes import RealPeer, Started
from peers.chaos.shaping import ShapedLinks, shaped
from peers.chaos.world import PeerSpec
from peers.console.interrupt import Interrupted
from swarm.sim.links import LinkShape
from tests.harness import by_hand
from tests.harness.expect import wait_until

SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, time, threading
mortal = "import ctypes, os, sys, threading; ctypes.CDLL(None).prctl(1, 9);"  # it ends with its parent
mortal += f"os.getppid() == {os.getpid()} or sys.exit();"
home = pathlib.Path(sys.argv[1]); place = home / "1"
key = place / "identity.key"
if not key.exists():
    place.mkdir(parents=True, exist_ok=True); key.write_text(home.name)
daemon = subprocess.Popen([sys.executable, "-c", mortal + "threading.Event().wait()", "p2pd"])
kept, pause = place / "kept", threading.Event()
for number in range(100000):
    try:
        with kept.open("a") as file:
            file.write("x")
        room = True
    except OSError:
        room = False
    if (place / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    event = {"t": time.time(), "m": 0.0, "peer": key.read_text(), "kind": "Tick", "number": number, "room": room}
    print(json.dumps(event | {"daemon": daemon.poll() is None, "kept": kept.stat().st_size}), flush=True)
    pause.wait(0.01)
"""


class Scripts(ProcessWorld):
    """Starts the script above where a peer would be started."""

    def run(self, peer: RealPeer, output: Path) -> Started:
        return means.begin([sys.executable, "-c", SCRIPT, str(peer.home)], output, self.environment(peer))


@contextlib.contextmanager
def world_of(root: Path, *names: str, links: ShapedLinks | None = None, skewed: bool = False) -> Iterator[ProcessWorld]:
    """A world of scripts, none of which outlives it."""
    with Scripts(root, links, skewed=skewed) as world:
        for name in names:
            world.start(PeerSpec(name=name, role="stage", arguments=("join", "INVITE")))
        yield world


def ticks(world: ProcessWorld, name: str) -> list[dict[str, object]]:
    """What the newest start of a peer has written."""
    one = world.peers[name].starts[-1]
    return by_hand.Started(one.process, one.output).events("Tick")


def fired(plan: FaultPlan, label: str) -> None:
    """Until a strike has happened, or broke."""
    wait_until(lambda: label in plan.fired or plan.errors, what=label)
    assert not plan.errors, plan.errors


def test_kill_takes_the_peer_and_what_it_started(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0", "host-1") as world:
        plan = FaultPlan(Strike("kill", On("Tick", peer="host-1", nth=3), Kill(("host-1",))), world=world)
        fired(plan, "kill")
        plan.assert_fired()
        victim, other = world.peers["host-1"], world.peers["host-0"]
        assert victim.starts[0].process.returncode == -9
        assert plan.fired["kill"].ids == ("host-1",)
        assert other.alive
        line = json.loads((tmp_path / "faults.jsonl").read_text())
        assert (line["kind"], line["peers"]) == ("kill", ["host-1"])


def test_daemon_alone_is_killed(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        plan = FaultPlan(Strike("kill", On("Tick", nth=3), KillDaemon("host-0")), world=world)
        fired(plan, "kill")
        wait_until(lambda: not ticks(world, "host-0")[-1]["daemon"], what="the loss of the daemon")
        assert world.peers["host-0"].alive


def test_pause_stops_the_whole_tree_until_it_is_resumed(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0", "host-1") as world:
        wait_until(lambda: ticks(world, "host-0"), what="its first words")
        world.inflict(Pause(("host-0",)))
        pids = world.peers["host-0"].pids()
        assert len(pids) == 2
        wait_until(
            lambda: {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED}, what="all being stopped"
        )
        world.inflict(Resume(("host-0",)))
        before = len(ticks(world, "host-0"))
        wait_until(lambda: len(ticks(world, "host-0")) > before + 3, what="more ticks")


def test_pause_that_lasts_ends_by_itself(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        plan = FaultPlan(Strike("stop", On("Tick", nth=3), Pause(("host-0",), seconds=0.3)), world=world)
        fired(plan, "stop")
        seen = len(ticks(world, "host-0"))
        wait_until(lambda: len(ticks(world, "host-0")) > seen + 10, what="more ticks")
        times = [float(str(tick["t"])) for tick in ticks(world, "host-0")]
        assert max(after - before for before, after in zip(times, times[1:], strict=False)) >= 0.25


def test_disk_fills_and_is_freed(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        plan = FaultPlan(
            Strike("full", On("Tick", nth=3), FillDisk("host-0")),
            Strike("free", On("Tick", where={"room": False}, after="full"), FreeDisk("host-0")),
            Strike("seen", On("Tick", where={"room": True}, nth=3, after="free"), Kill(("host-0",))),
            world=world,
        )
        for label in ("full", "free", "seen"):
            fired(plan, label)
        rooms = [tick["room"] for tick in ticks(world, "host-0")]
        assert False in rooms


@pytest.mark.parametrize("keep_disk", [True, False])
def test_restart_keeps_the_key_and_the_disk_only_when_asked(tmp_path: Path, keep_disk: bool) -> None:
    with world_of(tmp_path, "host-0") as world:
        plan = FaultPlan(Strike("again", On("Tick", nth=5), Restart("host-0", keep_disk)), world=world)
        fired(plan, "again")
        wait_until(lambda: ticks(world, "host-0"), what="the second start")
        first = ticks(world, "host-0")[0]
        assert first["peer"] == "host-0"
        assert (int(str(first["kept"])) > 1) == keep_disk
        assert len(world.peers["host-0"].starts) == 2


def test_twin_has_the_same_key_and_another_home(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        plan = FaultPlan(Strike("two", On("Tick", nth=2), Twin("host-0")), world=world)
        fired(plan, "two")
        wait_until(lambda: ticks(world, "host-0-twin"), what="the twin")
        assert ticks(world, "host-0-twin")[0]["peer"] == "host-0"
        assert world.peers["host-0"].alive


def test_storm_starts_as_many_as_asked(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        plan = FaultPlan(Strike("storm", On("Tick", nth=2), JoinerStorm(3)), world=world)
        fired(plan, "storm")
        assert plan.fired["storm"].peers == ("joiner-1", "joiner-2", "joiner-3")
        assert {"joiner-1", "joiner-2", "joiner-3"} < set(world.peers)


def test_links_are_commanded_and_what_needs_them_is_refused_without(tmp_path: Path) -> None:
    needing = [Partition(("a",), ("b",)), Heal(), SlowLink(("a", "b"), LinkShape()), CorruptBytes(("a", "b"))]
    needing += [Disconnect(("a",)), Reconnect(("a",)), SlowLinks(("a",), ("b",), LinkShape())]
    with world_of(tmp_path) as world:
        for fault in [*needing, SkewClock("a", 1.0), LimitMemory("a", 64)]:
            with pytest.raises(CannotInflict):
                FaultPlan(Strike("x", On("Tick"), fault), world=world)
    with shaped() as links, world_of(tmp_path, links=links) as world:
        traffic = links.proxy.traffic
        world.inflict(Partition(("a",), ("b",), one_way=True))
        assert (traffic.is_cut("a", "b"), traffic.is_cut("b", "a")) == (True, False)
        world.inflict(SlowLink(("a", "b"), LinkShape(latency_s=1.0)))
        assert traffic.shape("b", "a").latency_s == 1.0
        world.inflict(CorruptBytes(("a", "b"), 2))
        assert links.proxy.corrupt_left("a", "b") == 2
        assert world.problems() == ("corrupt_bytes: too few bytes passed from a to b",)
        world.inflict(Heal())
        assert not traffic.is_cut("a", "b")
        assert traffic.shape("a", "b") == LinkShape()
        world.inflict(SlowLinks(("a", "c"), ("b",), LinkShape(loss=0.1)))
        assert {traffic.shape("b", "c").loss, traffic.shape("a", "b").loss, traffic.shape("a", "c").loss} == {0.1, 0.0}


class Cut(ProcessWorld):
    """A first start that an interrupt cuts short."""

    def run(self, peer: RealPeer, output: Path) -> Started:
        raise Interrupted(signal.SIGINT)


def test_a_world_whose_first_start_was_cut_short_is_cleared_away(tmp_path: Path) -> None:
    """A peer is entered before it is begun."""
    with pytest.raises(Interrupted), Cut(tmp_path) as world:
        world.start(PeerSpec(name="a", role="stage", arguments=("join",)))
    assert not world.alive("a")
    with pytest.raises(RuntimeError, match="after shutdown"):
        world._starter.submit(print)


def test_networks_are_who_can_call_whom(tmp_path: Path) -> None:
    with shaped() as links, world_of(tmp_path, links=links) as world:
        traffic = links.proxy.traffic
        for name, region in (("eu-1", "eu"), ("eu-2", "eu"), ("us-1", "us")):
            world.networks.add(name, region)
        world.inflict(Disconnect(("eu-1", "eu-2"), "wan"))
        assert not traffic.is_cut("eu-1", "eu-2")
        assert traffic.is_cut("eu-1", "us-1")
        assert traffic.is_cut("us-1", "eu-2")
        world.inflict(Disconnect(("eu-1",)))
        assert traffic.is_cut("eu-1", "eu-2")
        world.inflict(Reconnect(("eu-1",)))
        assert not traffic.is_cut("us-1", "eu-1")
        assert traffic.is_cut("us-1", "eu-2")
        world.networks.add("us-2", "us")
        assert traffic.is_cut("us-2", "eu-2"), "who comes later finds it cut too"
        world.inflict(Reconnect(("eu-2",), "wan"))
        assert not traffic.is_cut("us-2", "eu-2")


def test_notice_ends_who_heeds_it_at_once_and_who_does_not_when_its_time_is_up(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0", "host-1") as world:
        wait_until(lambda: ticks(world, "host-0") and ticks(world, "host-1"), what="both")
        (tmp_path / "homes" / "host-1" / "1" / "stubborn").touch()
        seen = len(ticks(world, "host-1"))
        wait_until(lambda: len(ticks(world, "host-1")) > seen + 1, what="its being stubborn")
        world.inflict(Stop(("host-0", "host-1"), grace_s=0.5))
        wait_until(lambda: not world.alive("host-0"), what="the end of who heeds it")
        assert world.exit_code("host-0") == -signal.SIGTERM
        wait_until(lambda: not world.alive("host-1"), what="the end of who does not")
        assert world.exit_code("host-1") == -signal.SIGKILL


def test_a_peer_that_is_kept_for_later_is_started_by_a_fault(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        world.expect(PeerSpec(name="late", role="stage", arguments=("join", "INVITE")))
        assert not world.alive("late")
        world.inflict(Start("late"))
        wait_until(lambda: ticks(world, "late"), what="it")
        with pytest.raises(CannotInflict, match="no peer nobody is kept"):
            world.inflict(Start("nobody"))


def test_limits_that_only_containers_have_are_refused_by_name(tmp_path: Path) -> None:
    with world_of(tmp_path) as world:
        for spec in (
            PeerSpec(name="a", role="stage", arguments=(), memory_mib=64),
            PeerSpec(name="a", role="stage", arguments=(), behind_nat=True),
        ):
            with pytest.raises(CannotInflict, match="--on containers"):
                world.start(spec)


def test_a_lost_disk_is_kept_aside_as_evidence(tmp_path: Path) -> None:
    with world_of(tmp_path, "host-0") as world:
        wait_until(lambda: ticks(world, "host-0"), what="the first start")
        world.inflict(Restart("host-0", keep_disk=False))
        assert (tmp_path / "lost" / "host-0-1" / "1" / "kept").exists()
        assert world.homes() == [tmp_path / "homes", tmp_path / "lost"]


def test_library_that_programs_pass_over_is_none(tmp_path: Path) -> None:
    (tmp_path / "of-another-machine.so").write_bytes(b"\x7fELF" + bytes(60))
    assert not _fakes(tmp_path / "of-another-machine.so")


def test_clock_of_a_peer_is_set_where_the_library_is_and_refused_by_its_name_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if faketime_library() is not None:
        with world_of(tmp_path, "host-0", skewed=True) as world:
            plan = FaultPlan(
                Strike("skew", On("Tick", nth=3), SkewClock("host-0", -3600.0)),
                Strike("seen", On("Tick", nth=5, after="skew"), Moment()),
                world=world,
            )
            fired(plan, "seen")
            times = [float(str(tick["t"])) for tick in ticks(world, "host-0")]
            assert min(after - before for before, after in zip(times, times[1:], strict=False)) < -3500
    monkeypatch.setattr("peers.chaos.means.faketime_library", lambda: None)
    with world_of(tmp_path, skewed=True) as world, pytest.raises(CannotInflict, match="apt-get install libfaketime"):
        world.check(SkewClock("host-0", 1.0))

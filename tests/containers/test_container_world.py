"""What each fault does to containers, with small scripts in place of peers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from peers.chaos import faults
from peers.chaos.container_networks import NO_DELAY
from peers.chaos.container_world import ContainerWorld
from peers.chaos.engine import OWNER, PLAY, owner
from peers.chaos.faults import CannotInflict
from peers.chaos.plan import FaultPlan, On, Strike
from peers.chaos.world import PeerSpec
from swarm.clock import SystemClock
from swarm.sim.links import LinkShape
from tests.containers.conftest import docker
from tests.harness.expect import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.process]

CALL = """
import socket, sys
size = 0
link = socket.create_connection((sys.argv[1], 4001), timeout=3)
while piece := link.recv(1 << 16):
    size += len(piece)
print(size)
"""


EACH_LINK = "for one in $(ip -o link show | cut -d: -f2 | cut -d@ -f1); do"
CLASSES = f"{EACH_LINK} tc -s class show dev $one; done"
SENT = re.compile(r"4Mbit.*\n\s*Sent (\d+) bytes")


def until(look: Callable[[], object], seconds: float, what: str) -> None:
    """A busy machine may take six times as long as an idle one."""
    wait_until(look, deadline_s=6 * seconds, what=what)


def spec(name: str, *arguments: str, **more: Any) -> PeerSpec:
    return PeerSpec(name=name, role="stage", arguments=("join", *arguments), **more)


class Heard:
    """Every event of a world."""

    def __init__(self, world: ContainerWorld) -> None:
        self.events: list[tuple[str, str, Mapping[str, Any]]] = []
        world.listen(lambda *event: self.events.append(event))

    def last(self, name: str, kind: str = "Beat") -> Mapping[str, Any]:
        return next((fields for peer, what, fields in reversed(self.events) if (peer, what) == (name, kind)), {})

    def count(self, name: str, kind: str = "Beat") -> int:
        return sum((peer, what) == (name, kind) for peer, what, _ in self.events)


@pytest.fixture(scope="module")
def world(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerWorld]:
    with ContainerWorld(tmp_path_factory.mktemp("play"), stand_in) as world:
        world.check(faults.SkewClock("a", 60.0))
        for one in (
            spec("a", region="eu"),
            spec("b", region="eu"),
            spec("c", region="us", disk_mib=4),
            spec("hidden", behind_nat=True),
        ):
            world.start(one)
        yield world


@pytest.fixture
def heard(world: ContainerWorld) -> Heard:
    found = Heard(world)
    for name in "abc":
        if not world.alive(name):
            world.inflict(faults.Restart(name))
    until(lambda: all(found.last(name) for name in "abc"), 20, "all beat")
    return found


def address(world: ContainerWorld, name: str) -> str:
    return next(iter(world.networks._at[name].addresses.values()))


def call(world: ContainerWorld, one: str, other: str) -> int | None:
    """How many bytes one peer gets from another; None when it cannot call."""
    command = ["docker", "exec", "--env", "LD_PRELOAD=", world.peers[one].container, "python3", "-c", CALL]
    done = subprocess.run([*command, address(world, other)], capture_output=True, text=True, check=False, timeout=300)
    return None if done.returncode else int(done.stdout)


def test_kill_ends_a_container_and_restart_brings_it_back_as_who_it_was(world: ContainerWorld, heard: Heard) -> None:
    key, where = docker("exec", world.peers["a"].container, "cat", "/data/identity.key"), address(world, "a")
    begun = heard.count("a", "Began") + heard.count("b", "Began")
    lost = set((world.root / "lost").glob("b-*"))
    world.inflict(faults.Kill(("a", "b")))
    assert not world.alive("a")
    assert not world.alive("b")
    assert world.exit_code("a") == 137
    world.inflict(faults.Restart("a"))
    world.inflict(faults.Restart("b", keep_disk=False))
    until(lambda: heard.count("a", "Began") + heard.count("b", "Began") >= begun + 2, 20, "both begin again")
    assert heard.last("a", "Began")["key"] == key
    assert docker("exec", world.peers["a"].container, "hostname", "-i").find(where) >= 0
    (disk,) = set((world.root / "lost").glob("b-*")) - lost
    assert (disk / "kept").is_file()
    assert world.alive("a")


def test_pause_stops_it_until_it_is_resumed(world: ContainerWorld, heard: Heard) -> None:
    world.inflict(faults.Pause(("a",)))
    before = docker("inspect", "-f", "{{.State.Paused}}", world.peers["a"].container)
    number = heard.last("a")["number"]
    assert before == "true"
    world.inflict(faults.Resume(("a",)))
    until(lambda: heard.last("a")["number"] > number + 1, 10, "it goes on")


def test_stop_gives_notice_and_kills_who_does_not_leave(world: ContainerWorld, heard: Heard) -> None:
    world.start(spec("deaf", "--deaf"))
    until(lambda: heard.count("deaf") > 0, 20, "it beats")
    world.inflict(faults.Stop(("b", "deaf"), grace_s=1.0))
    until(lambda: not world.alive("b") and not world.alive("deaf"), 20, "both are gone")
    assert (world.exit_code("b"), world.exit_code("deaf")) == (75, 137)


def test_partition_cuts_links_one_way_both_ways_and_for_the_next_start(world: ContainerWorld, heard: Heard) -> None:
    assert call(world, "a", "b") is not None
    world.inflict(faults.Partition(("a",), ("b", "c")))
    assert call(world, "a", "b") is None
    assert call(world, "c", "a") is None
    assert call(world, "b", "c") is not None
    world.inflict(faults.Restart("a"))
    until(lambda: world.alive("a"), 10, "it is back")
    assert call(world, "b", "a") is None, "a new container is cut off, too"
    world.inflict(faults.Heal())
    until(lambda: call(world, "a", "b") is not None, 20, "healed")
    world.inflict(faults.Partition(("a",), ("b",), one_way=True))
    rules = {name: world.nemesis.within(world.peers[name].pid, ["iptables -w -S SWARM"]) for name in "ab"}
    assert (rules["a"].count("DROP"), rules["b"].count("DROP")) == (0, 2), "b hears nothing of a; a hears b"
    world.inflict(faults.Heal())


def test_disconnect_takes_peers_off_one_network_and_back_at_the_same_address(
    world: ContainerWorld, heard: Heard
) -> None:
    world.inflict(faults.Disconnect(("a",), "wan"))
    assert call(world, "c", "a") is None
    world.inflict(faults.Reconnect(("a",), "wan"))
    until(lambda: call(world, "c", "a") is not None, 20, "it is back")
    world.inflict(faults.Disconnect(("a",)))
    assert call(world, "b", "a") is None
    world.inflict(faults.Reconnect(("a",)))
    with pytest.raises(CannotInflict, match="a is not on us"):
        world.inflict(faults.Disconnect(("a",), "us"))


def test_slow_links_are_narrow_and_lossy_and_late_only_where_the_kernel_can(
    world: ContainerWorld, heard: Heard
) -> None:
    world.inflict(faults.SlowLinks(("a",), ("c",), LinkShape(bytes_per_s=500_000, loss=0.01)))
    size = call(world, "a", "c")
    queues = {name: world.nemesis.within(world.peers[name].pid, [CLASSES]) for name in "abc"}
    lossy = {name: world.nemesis.within(world.peers[name].pid, ["iptables -w -S SWARM"]) for name in "abc"}
    world.inflict(faults.Heal())
    narrow = sum(map(int, SENT.findall(queues["c"])))
    assert size is None or narrow > size, "what c sent to a went through the narrow way"
    assert {name: "4Mbit" in said for name, said in queues.items()} == {"a": True, "b": False, "c": True}
    assert {name: "statistic" in said for name, said in lossy.items()} == {"a": True, "b": False, "c": True}
    assert "htb" not in world.nemesis.within(world.peers["a"].pid, ["tc qdisc show"])
    late = faults.SlowLinks(("a",), ("c",), LinkShape(latency_s=0.05))
    if world.networks.has_delay():
        world.inflict(late)
        assert call(world, "a", "c") is not None
        assert "delay 50ms" in world.nemesis.within(world.peers["c"].pid, ["tc qdisc show"])
        world.inflict(faults.Heal())
    else:
        with pytest.raises(CannotInflict, match="netem"):
            world.check(late)
        assert "netem" in NO_DELAY


def test_limits_hold_and_too_little_memory_kills(world: ContainerWorld, heard: Heard) -> None:
    name = world.peers["b"].container
    world.inflict(faults.LimitCpu("b", 0.25))
    assert docker("inspect", "-f", "{{.HostConfig.CpuQuota}} of {{.HostConfig.CpuPeriod}}", name) == "5000 of 20000"
    world.inflict(faults.LimitCpu("b", 0.0))
    assert docker("inspect", "-f", "{{.HostConfig.CpuQuota}}", name) == "-1"
    world.inflict(faults.LimitMemory("b", 32))
    until(lambda: not world.alive("b"), 30, "the kernel kills it")
    assert docker("inspect", "-f", "{{.State.OOMKilled}}", name) == "true"


def test_full_disk_takes_nothing_until_it_is_free_and_its_files_are_kept(world: ContainerWorld, heard: Heard) -> None:
    world.inflict(faults.FillDisk("c"))
    until(lambda: heard.last("c")["full"], 10, "it is full")
    began = heard.count("c", "Began")
    world.inflict(faults.Restart("c"))
    until(lambda: heard.count("c", "Began") > began and heard.last("c")["number"] < 5, 20, "it begins again")
    assert heard.last("c")["full"]
    world.inflict(faults.FreeDisk("c"))
    until(lambda: not heard.last("c")["full"], 10, "there is room")
    assert world.homes()
    assert sorted(path.name for path in (world.root / "homes" / "c").iterdir()) == ["identity.key", "kept"]
    with pytest.raises(CannotInflict, match="disk_mib"):
        world.inflict(faults.FillDisk("a"))


def test_clock_of_one_peer_is_set(world: ContainerWorld, heard: Heard) -> None:
    world.inflict(faults.SkewClock("a", 3600.0))
    until(lambda: heard.last("a")["wall"] > SystemClock().wall() + 3000, 10, "its clock is an hour ahead")
    assert abs(heard.last("b")["wall"] - SystemClock().wall()) < 600
    world.inflict(faults.SkewClock("a", 0.0))
    with pytest.raises(CannotInflict, match="without libfaketime"):
        world.check(faults.SkewClock("b", 1.0))


def test_peer_behind_nat_calls_and_is_not_called(world: ContainerWorld, heard: Heard) -> None:
    assert call(world, "hidden", "a") is not None
    assert call(world, "a", "hidden") is None


def test_joiners_upgrades_and_later_peers(world: ContainerWorld, heard: Heard) -> None:
    world.expect(spec("later"))
    assert world.inflict(faults.Start("later")) == ("later",)
    assert world.inflict(faults.JoinerStorm(2)) == ("joiner-1", "joiner-2")
    was = world.peers["b"].container
    world.inflict(faults.Upgrade("b", grace_s=5.0))
    until(lambda: world.peers["b"].container != was and world.alive("b"), 30, "b is back")
    assert docker("inspect", "-f", "{{.State.ExitCode}}", was) == "75"
    world.stop(["later", "joiner-1", "joiner-2"], 5.0)
    assert not any(world.alive(name) for name in ("later", "joiner-1", "joiner-2"))
    with pytest.raises(CannotInflict, match="containers have no means for twin"):
        world.check(faults.Twin("a"))


def test_fault_strikes_at_an_event_and_soon(world: ContainerWorld, heard: Heard) -> None:
    strike = Strike("pause", On("Beat", peer="a", nth=2), faults.Pause(("b",), seconds=0.5))
    plan = FaultPlan(strike, world=world)
    until(lambda: bool(plan.fired or plan.errors), 20, "it strikes")
    plan.assert_fired()
    assert plan.fired["pause"].peers == ("b",)
    until(lambda: docker("inspect", "-f", "{{.State.Paused}}", world.peers["b"].container) == "false", 10, "over")


def owned(play: str) -> list[str]:
    by = ("--quiet", "--filter", f"label={PLAY}={play}")
    found = [docker("ps", "--all", *by), docker("network", "ls", *by), docker("volume", "ls", *by)]
    return "\n".join(found).split()


def test_play_whose_owner_was_killed_is_removed_by_the_next(stand_in: str, tmp_path: Path) -> None:
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom peers.chaos.container_world import ContainerWorld\n"
        "from peers.chaos.world import PeerSpec\n"
        f"world = ContainerWorld(Path({str(tmp_path / 'killed')!r}), {stand_in!r})\nworld.__enter__()\n"
        "world.start(PeerSpec(name='a', role='stage', arguments=('join',)))\n"
        "print(world.engine.play, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300,
                          env=dict(os.environ))  # fmt: skip
    play = done.stdout.strip()
    assert owned(play), done.stderr
    with ContainerWorld(tmp_path / "next", stand_in) as world:
        world.start(spec("a"))
        assert not owned(play)
        mine = owned(world.engine.play)
        labels = json.loads(docker("inspect", "-f", "{{json .Config.Labels}}", world.peers["a"].container))
        assert labels[OWNER] == owner()
    assert len(mine) == 3, "the nemesis, the peer and the network"
    assert not owned(world.engine.play)


def test_world_without_its_image_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="make image"), ContainerWorld(tmp_path, "swarm-trainer:nobody"):
        pass

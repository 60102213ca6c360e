"""Start a peer as a container: its home, files, limits, wall clock and networks; and keep or lose its disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from peers.chaos import means
from peers.chaos.container_networks import ContainerNetworks
from peers.chaos.engine import Engine, EngineError, bind
from peers.chaos.nemesis import BOUNDED, FAKETIME, Nemesis
from peers.chaos.world import PeerSpec, filled
from peers.home.places import KEY_FILE

PORT = 4001
HOME, LOGS, FILES = "/data", "/logs", "/files"
HOMES = "/homes"
"""Where who holds a disk of limited size finds the homes of this machine."""
FILLER = ".full"
"""What takes the room on a disk that is full; nothing of a peer's."""
UNLABELLED = ("--security-opt", "label=disable")
"""Under SELinux a container sees no files of its machine but those labelled for it; elsewhere this says nothing."""
PERIOD_US = 20_000
"""A peer has its share of a processor in every such span: short ones are more like a slower processor."""
LEAST_QUOTA_US = 1000
"""Kernels take no less."""
CONFINED = (
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp:size=256m,mode=1777",
    "--pids-limit", "1024",
)  # fmt: skip
"""As in compose.yaml: a peer writes to what it was given and to /tmp."""
MEMORY_MIB = 2048
"""What a peer may take of the memory, as there, if the scenario says nothing else."""
CLOCKS = "/clocks"
_CLOCK_LIBRARY = "libfaketime.so"


@dataclass(slots=True)
class Contained:
    """One peer of the world and all its starts: the names of its containers. ``read`` is how far the newest one's
    output is read; ``pid`` is that of the newest container's first process, on the engine's machine; ``image`` is what
    it was upgraded to, if it was."""

    spec: PeerSpec
    home: Path
    starts: list[str] = field(default_factory=list)
    read: int = 0
    identity: str = ""
    pid: int = 0
    image: str | None = None

    @property
    def name(self) -> str:
        """Its name in the world."""
        return self.spec.name

    @property
    def container(self) -> str:
        """The container of the newest start."""
        return self.starts[-1]


class StartingWorld(Protocol):
    """The interface of a world for starting a container in it."""

    root: Path
    engine: Engine
    nemesis: Nemesis
    networks: ContainerNetworks
    skewed: set[str]
    peers: dict[str, Contained]

    def began(self, peer: Contained, start: str) -> None:
        """Another container of a peer is the newest: see :meth:`peers.chaos.company.BaseWorld.began`."""


def prepare(world: StartingWorld, peer: Contained) -> None:
    """Prepare the common things of a peer's containers: home, readable copies of its files, the disk where that is
    limited."""
    for directory in (peer.home, world.root / "logs"):
        directory.mkdir(parents=True, exist_ok=True)
        give(world, directory)
    for name, source in peer.spec.files.items():
        _copy(source, _files(world, peer) / name)
    if peer.spec.files:
        means.show(_files(world, peer))
    if peer.spec.disk_mib is not None:
        _make_disk(world, peer)
    if peer.name in world.skewed:
        _prepare_clock(world, peer.name)


def begin(world: StartingWorld, peer: Contained, image: str) -> None:
    """Start the next container of a peer, and put it on its networks. Blocks for about a second. Raises EngineError, of
    which the peer's log tells too: who asked for this may wait for it elsewhere."""
    if peer.starts:
        world.engine.call("wait", peer.container)  # it has said that it died; only now its addresses are free again
        _keep_sessions(world, peer)
    number = len(peer.starts)
    name, log = f"swarm-{world.engine.play}-{peer.name}-{number}", f"{peer.name}-{number}.log"
    try:
        _begin(world, peer, image, (name, log))
    except EngineError as error:
        with (world.root / "logs" / log).open("a", encoding="utf-8") as file:
            file.write(f"it could not be started: {error}\n")
        with contextlib.suppress(EngineError):
            world.engine.call("rm", "--force", name)
        raise


def _begin(world: StartingWorld, peer: Contained, image: str, called: tuple[str, str]) -> None:
    """``called``: the container and its log."""
    name, log = called
    command = _command(world, peer)
    program = f"python3 -m {peer.spec.program}" if peer.spec.program else "swarm"
    line = f'exec {program} "$@" >{LOGS}/{log} 2>&1'
    uid, gid = user()
    world.engine.call(
        "create", "--name", name, "--hostname", peer.name, *world.engine.labels, "--init", "--no-healthcheck",
        *CONFINED, *UNLABELLED,
        "--user", f"{uid}:{gid}", "--env", "HOME=/tmp", *_limits(peer), *_mounts(world, peer),
        *world.networks.options(peer.spec), "--entrypoint", "sh", image, "-c", line, "sh", *command,
    )  # fmt: skip
    world.networks.connect(peer.spec, name)
    world.engine.call("start", name)
    world.began(peer, name)
    peer.pid = int(world.engine.inspect(name, "{{.State.Pid}}"))
    world.networks.arrive(peer.name, name, peer.pid)


def lose_disk(world: StartingWorld, peer: Contained) -> None:
    """Move a peer's home aside, as evidence of what it did, and leave it an empty one with its key: one that was full
    has room again."""
    aside = world.root / "lost" / f"{peer.name}-{len(peer.starts)}"
    if peer.spec.disk_mib is not None:
        keep_disk(world, peer)
        keys = f"cd {HOME} && find . -mindepth 1 ! -type d ! -name {KEY_FILE} -delete"
        world.engine.call("exec", holder(world, peer), "sh", "-c", keys)
    means.lose_disk(peer.home, aside)
    for path in (peer.home, *peer.home.rglob("*")):
        give(world, path)


def _keep_sessions(world: StartingWorld, peer: Contained) -> None:
    """Keep the sessions that the next start deletes, as evidence."""
    if peer.spec.disk_mib is not None:
        keep_disk(world, peer)
    else:
        means.keep_sessions(peer.home, world.root / "lost" / f"{peer.name}-{len(peer.starts)}-sessions")


def keep_disks(world: StartingWorld) -> None:
    """Copy what lies on disks of limited size, which are in memory, to the homes."""
    for peer in world.peers.values():
        if peer.spec.disk_mib is not None:
            keep_disk(world, peer)


def keep_disk(world: StartingWorld, peer: Contained) -> None:
    """The same for one of them. The disk stays as it is: one that is full is full at the next start too."""
    # tar passes over sockets, and ends with 1 when a file changes while it reads it.
    copy = f"tar -C {HOME} -c --exclude ./{FILLER} . | tar -C {HOMES}/{peer.name} -x || [ $? -eq 1 ]"
    world.engine.call("exec", holder(world, peer), "bash", "-o", "pipefail", "-c", copy)


def holder(world: StartingWorld, peer: Contained) -> str:
    """The container that holds the disk of a peer whose size is limited."""
    return f"{_volume(world, peer)}-disk"


def give(world: StartingWorld, path: Path) -> None:
    """Have it belong to whom peers are in their containers."""
    if os.geteuid() == 0:
        os.chown(path, *user())


def user() -> tuple[int, int]:
    """Return the user of peers in their containers, so that this process can read what they write: themselves where it
    is root, else this user."""
    return (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def _command(world: StartingWorld, peer: Contained) -> list[str]:
    inside = {name: f"{FILES}/{name}/{source.name}" for name, source in peer.spec.files.items()}
    arguments = filled(peer.spec.arguments, {"home": HOME, **inside})
    listen = ["--listen", f"/ip4/0.0.0.0/tcp/{PORT}"]
    listen += ["--listen", f"/ip4/0.0.0.0/udp/{PORT}/quic-v1"] if world.networks.public else []
    return [*arguments, "--json", "--home", HOME, *listen]


def quota_us(cpus: float) -> int:
    """Return the engine's quota for so many processors."""
    return max(LEAST_QUOTA_US, int(cpus * PERIOD_US))


def _limits(peer: Contained) -> list[str]:
    spec, found = peer.spec, []
    if spec.cpus is not None:
        found += ["--cpu-period", str(PERIOD_US), "--cpu-quota", str(quota_us(spec.cpus))]
    memory = f"{spec.memory_mib or MEMORY_MIB}m"
    return [*found, "--memory", memory, "--memory-swap", memory]


def _mounts(world: StartingWorld, peer: Contained) -> list[str]:
    found = list(bind(world.root / "logs", LOGS))
    if peer.spec.disk_mib is None:
        found += bind(peer.home, HOME)
    else:
        found += ["--volume", f"{_volume(world, peer)}:{HOME}"]
    if peer.spec.files:
        found += bind(_files(world, peer), FILES, "readonly")
    if peer.name in world.skewed:
        found += _clock_options(world, peer.name)
    return found


def _volume(world: StartingWorld, peer: Contained) -> str:
    return f"swarm-{world.engine.play}-{peer.name}"


def _make_disk(world: StartingWorld, peer: Contained) -> None:
    """A disk in memory of that size, and somebody who holds it: it is empty once nobody does."""
    volume, (uid, gid) = _volume(world, peer), user()
    options = f"o=size={peer.spec.disk_mib}m,uid={uid},gid={gid},mode=0700"
    world.engine.call("volume", "create", *world.engine.labels, "--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt",
                      options, volume)  # fmt: skip
    world.engine.call(
        "run", "--detach", "--init", "--name", holder(world, peer), *world.engine.labels, *BOUNDED, "--network", "none",
        "--volume", f"{volume}:{HOME}", *bind(world.root / "homes", HOMES), *UNLABELLED, "--stop-signal", "KILL",
        world.nemesis.image, "sleep", "infinity",
    )  # fmt: skip


def _prepare_clock(world: StartingWorld, name: str) -> None:
    """A clock for a peer, right until it is set; before its first start. Raises EngineError."""
    clocks = world.root / "clocks"
    clocks.mkdir(exist_ok=True)
    if not (clocks / _CLOCK_LIBRARY).exists():
        world.engine.call("cp", f"{world.nemesis.name}:{FAKETIME}", str(clocks / _CLOCK_LIBRARY))
    (clocks / name).write_text("+0\n")
    means.show(clocks)


def _clock_options(world: StartingWorld, name: str) -> list[str]:
    """Return the options that show this peer's container that clock."""
    found = list(bind(world.root / "clocks", CLOCKS, "readonly"))
    for variable in (
        f"LD_PRELOAD={CLOCKS}/{_CLOCK_LIBRARY}",
        f"FAKETIME_TIMESTAMP_FILE={CLOCKS}/{name}",
        "FAKETIME_NO_CACHE=1",
        "DONT_FAKE_MONOTONIC=1",
        "NO_FAKE_STAT=1",  # what the file system says of a file does not change with the clock
    ):
        found += ["--env", variable]
    return found


def _files(world: StartingWorld, peer: Contained) -> Path:
    return world.root / "files" / peer.name


def _copy(source: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place / source.name, dirs_exist_ok=True)
    else:
        shutil.copy(source, place)

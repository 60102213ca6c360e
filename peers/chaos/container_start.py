"""How a peer becomes a container: its home, its files, its limits, its networks."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from peers.chaos import container_clocks, means
from peers.chaos.company import filled
from peers.chaos.engine import EngineError, bind
from peers.places import KEY_FILE

if TYPE_CHECKING:
    from peers.chaos.containers import Contained, ContainerWorld

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


def prepare(world: ContainerWorld, peer: Contained) -> None:
    """What a peer's containers have in common: home, readable copies of its files, the disk where that is limited."""
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
        container_clocks.prepare(world, peer.name)


def begin(world: ContainerWorld, peer: Contained, image: str) -> None:
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


def _begin(world: ContainerWorld, peer: Contained, image: str, called: tuple[str, str]) -> None:
    """``called``: the container and its log."""
    name, log = called
    command = _command(world, peer)
    line = f'exec swarm "$@" >{LOGS}/{log} 2>&1'
    uid, gid = _user()
    world.engine.call(
        "create", "--name", name, "--hostname", peer.name, *world.engine.labels, "--init", "--no-healthcheck",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", *UNLABELLED,
        "--user", f"{uid}:{gid}", "--env", "HOME=/tmp", *_limits(peer), *_mounts(world, peer),
        *world.networks.options(peer.spec), "--entrypoint", "sh", image, "-c", line, "sh", *command,
    )  # fmt: skip
    world.networks.connect(peer.spec, name)
    world.engine.call("start", name)
    world.began(peer, name)
    peer.pid = int(world.engine.inspect(name, "{{.State.Pid}}"))
    world.networks.arrive(peer.name, name, peer.pid)


def lose_disk(world: ContainerWorld, peer: Contained) -> None:
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


def _keep_sessions(world: ContainerWorld, peer: Contained) -> None:
    """What the next start deletes is evidence of what it did."""
    if peer.spec.disk_mib is not None:
        keep_disk(world, peer)
    else:
        means.keep_sessions(peer.home, world.root / "lost" / f"{peer.name}-{len(peer.starts)}-sessions")


def keep_disks(world: ContainerWorld) -> None:
    """Copy what lies on disks of limited size, which are in memory, to the homes."""
    for peer in world.peers.values():
        if peer.spec.disk_mib is not None:
            keep_disk(world, peer)


def keep_disk(world: ContainerWorld, peer: Contained) -> None:
    """The same for one of them. The disk stays as it is: one that is full is full at the next start too."""
    # tar passes over sockets, and ends with 1 when a file changes while it reads it.
    copy = f"tar -C {HOME} -c --exclude ./{FILLER} . | tar -C {HOMES}/{peer.name} -x || [ $? -eq 1 ]"
    world.engine.call("exec", holder(world, peer), "bash", "-o", "pipefail", "-c", copy)


def holder(world: ContainerWorld, peer: Contained) -> str:
    """The container that holds the disk of a peer whose size is limited."""
    return f"{_volume(world, peer)}-disk"


def give(world: ContainerWorld, path: Path) -> None:
    """Have it belong to whom peers are in their containers."""
    if os.geteuid() == 0:
        os.chown(path, *_user())


def _user() -> tuple[int, int]:
    from peers.chaos.containers import user

    return user()


def _command(world: ContainerWorld, peer: Contained) -> list[str]:
    inside = {name: f"{FILES}/{name}/{source.name}" for name, source in peer.spec.files.items()}
    arguments = filled(peer.spec.arguments, {"home": HOME, **inside})
    return [*arguments, "--json", "--home", HOME, "--listen", f"/ip4/0.0.0.0/tcp/{PORT}"]


def quota_us(cpus: float) -> int:
    """What an engine is told for so many processors."""
    return max(LEAST_QUOTA_US, int(cpus * PERIOD_US))


def _limits(peer: Contained) -> list[str]:
    spec, found = peer.spec, []
    if spec.cpus is not None:
        found += ["--cpu-period", str(PERIOD_US), "--cpu-quota", str(quota_us(spec.cpus))]
    if spec.memory_mib is not None:
        found += ["--memory", f"{spec.memory_mib}m", "--memory-swap", f"{spec.memory_mib}m"]
    return found


def _mounts(world: ContainerWorld, peer: Contained) -> list[str]:
    found = list(bind(world.root / "logs", LOGS))
    if peer.spec.disk_mib is None:
        found += bind(peer.home, HOME)
    else:
        found += ["--volume", f"{_volume(world, peer)}:{HOME}"]
    if peer.spec.files:
        found += bind(_files(world, peer), FILES, "readonly")
    if peer.name in world.skewed:
        found += container_clocks.options(world, peer.name)
    return found


def _volume(world: ContainerWorld, peer: Contained) -> str:
    return f"swarm-{world.engine.play}-{peer.name}"


def _make_disk(world: ContainerWorld, peer: Contained) -> None:
    """A disk in memory of that size, and somebody who holds it: it is empty once nobody does."""
    volume, (uid, gid) = _volume(world, peer), _user()
    options = f"o=size={peer.spec.disk_mib}m,uid={uid},gid={gid},mode=0700"
    world.engine.call("volume", "create", *world.engine.labels, "--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt",
                      options, volume)  # fmt: skip
    world.engine.call(
        "run", "--detach", "--init", "--name", holder(world, peer), *world.engine.labels, "--network", "none",
        "--volume", f"{volume}:{HOME}", *bind(world.root / "homes", HOMES), *UNLABELLED, "--stop-signal", "KILL",
        world.nemesis.image, "sleep", "infinity",
    )  # fmt: skip


def _files(world: ContainerWorld, peer: Contained) -> Path:
    return world.root / "files" / peer.name


def _copy(source: Path, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place / source.name, dirs_exist_ok=True)
    else:
        shutil.copy(source, place)

"""The wall clock of one container: a library that its programs load first reads from a file how far off it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers.chaos import faults, means
from peers.chaos.engine import bind
from peers.chaos.faults import CannotInflict
from peers.chaos.nemesis import FAKETIME
from swarm.clock import SystemClock

if TYPE_CHECKING:
    from peers.chaos.containers import ContainerWorld

CLOCKS = "/clocks"
_LIBRARY = "libfaketime.so"


def prepare(world: ContainerWorld, name: str) -> None:
    """A clock for a peer, right until it is set; before its first start. Raises EngineError."""
    clocks = world.root / "clocks"
    clocks.mkdir(exist_ok=True)
    if not (clocks / _LIBRARY).exists():
        world.engine.call("cp", f"{world.nemesis.name}:{FAKETIME}", str(clocks / _LIBRARY))
    (clocks / name).write_text("+0\n")
    means.show(clocks)


def options(world: ContainerWorld, name: str) -> list[str]:
    """What a container of this peer is made with."""
    found = list(bind(world.root / "clocks", CLOCKS, "readonly"))
    for variable in (
        f"LD_PRELOAD={CLOCKS}/{_LIBRARY}",
        f"FAKETIME_TIMESTAMP_FILE={CLOCKS}/{name}",
        "FAKETIME_NO_CACHE=1",
        "DONT_FAKE_MONOTONIC=1",
        "NO_FAKE_STAT=1",  # what the file system says of a file does not change with the clock
    ):
        found += ["--env", variable]
    return found


def skew(world: ContainerWorld, fault: faults.SkewClock) -> tuple[str, ...]:
    """Set the wall clock that a peer's processes see, in its later starts as well, but for the daemon's, whose program
    calls no library. Raises EngineError, and CannotInflict where it has no effect, or none that could be seen: of a
    peer that does not run or is paused."""
    if fault.peer not in world.skewed:
        raise CannotInflict(f"skew_clock: {fault.peer} was started without libfaketime; check() it before")
    world.living(fault)
    if world.paused(fault.peer):
        raise CannotInflict(f"skew_clock: {fault.peer} is paused, and nobody could see its clock")
    (world.root / "clocks" / fault.peer).write_text(f"{fault.offset_s:+f}\n")
    _look(world, fault)
    return (fault.peer,)


def _look(world: ContainerWorld, fault: faults.SkewClock) -> None:
    """Programs pass over a library that was made for others: the clock must be nearer to what it was set to than to
    ours, but for the second that it does not show and the time that it takes to look."""
    clock = SystemClock()
    before = clock.wall()
    shown = float(world.engine.call("exec", world.peers[fault.peer].container, "date", "+%s"))
    off = max(before + fault.offset_s - shown, shown - clock.wall() - fault.offset_s)
    if off > 1.0 + abs(fault.offset_s) / 2:
        raise CannotInflict(
            f"skew_clock: the clock of {fault.peer} was set {fault.offset_s:+g} s off and is {shown - before:+.0f} s: "
            f"libfaketime of {world.nemesis.image} does not fit its image; make both from one base"
        )

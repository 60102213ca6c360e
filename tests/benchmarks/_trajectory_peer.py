"""A real peer that kills itself with -9 at a chosen point: the entry of the processes of ``trajectory``.

``fates.json`` beside the peers' homes is an object: peer's name → [phase, count]: it dies at the count-th time that it
gets there, and says so first, in ``fired.jsonl``. A peer that was started again lives on.

All stage hosts tell the same pace. They share this machine's cores, so that a stage's last host computes as fast as
three of another one together: by what they measure no stage would lack hosts, and nobody would move.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.node import run_peer
from peers.settings import PeerSettings
from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.ids import StepWork
from swarm.membership.holding import RoleManager
from swarm.optim.part import TrainedPart
from swarm.pipeline.compute import StageCompute
from swarm.pipeline.stage.table import WorkQueue
from swarm.step.member.remote_leader import RemoteLeader

FATES, FIRED = "fates.json", "fired.jsonl"
PACE_US = 20_000
"""What a stage host tells of a microbatch, once it has computed one."""

EARLY = "early "
"""Of phases that count only what is computed for the step behind the open one."""

PHASES: dict[str, tuple[type, str, str]] = {
    "queued": (WorkQueue, "push", "after"),
    "forward": (StageCompute, "forward", "before"),
    "backward": (StageCompute, "turn_back", "before"),
    "weights": (StageCompute, "add_weights", "before"),
    "retained": (TrainedPart, "accumulate", "after"),
    "mid-all-reduce": (AllReduce, "_chunk", "before"),
    "averaged": (AllReduce, "reduce", "after"),
    "completing": (RemoteLeader, "complete", "before"),
}
"""Where each phase is: a method, and whether it dies before or after it. ``weights`` is when a gradient is handed on
and nothing is added; ``averaged`` after the result is there and before its digest is told; ``completing`` a trainer's,
whose journey has come home. ``early forward``, ``early backward`` and ``early retained`` are those of early work."""


def run(settings: PeerSettings) -> int:
    """See :func:`peers.node.run_peer`."""
    fates = json.loads((settings.home.parent / FATES).read_text())
    fired = settings.home.parent / FIRED
    measured = RoleManager.pace_us
    RoleManager.pace_us = lambda holding: min(PACE_US, measured(holding) * PACE_US)  # type: ignore[method-assign]
    if settings.name in fates and not _has_fired(fired, settings.name):
        phase, count = fates[settings.name]
        _arm(settings.name, phase, count, fired)
    return run_peer(settings)


def _has_fired(fired: Path, name: str) -> bool:
    return fired.exists() and any(json.loads(line)["name"] == name for line in fired.read_text().splitlines())


def _is_early(args: tuple[Any, ...]) -> bool:
    """Whether a part's or its computation's method was called for work of the step behind the open one: both steps are
    open."""
    part = getattr(args[0], "part", args[0])
    works = [one for arg in args for one in (arg, getattr(arg, "work", None)) if isinstance(one, StepWork)]
    return any(work.early and work.step > part.step + 1 for work in works)


def _arm(name: str, phase: str, count: int, fired: Path) -> None:
    owner, method, when = PHASES[phase.removeprefix(EARLY)]
    honest: Callable[..., Any] = getattr(owner, method)
    times, early = 0, phase.startswith(EARLY)

    def strike(args: tuple[Any, ...]) -> None:
        nonlocal times
        if early and not _is_early(args):
            return
        times += 1
        if times == count:
            with fired.open("a") as file:
                file.write(json.dumps({"name": name, "phase": phase, "early": early}) + "\n")
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(honest)
    def plain(*args: Any, **more: Any) -> Any:
        if when == "before":
            strike(args)
        result = honest(*args, **more)
        if when == "after":
            strike(args)
        return result

    @functools.wraps(honest)
    async def awaited(*args: Any, **more: Any) -> Any:
        if when == "before":
            strike(args)
        result = await honest(*args, **more)
        if when == "after":
            strike(args)
        return result

    is_async = method in ("_chunk", "reduce", "complete")
    setattr(owner, method, awaited if is_async else plain)

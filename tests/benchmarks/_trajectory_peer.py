"""A real peer that kills itself with -9 at a chosen point: the entry of the processes of ``trajectory``.

``TRAJECTORY_FATES`` in the environment is a JSON object: peer's name → [phase, count]: it dies at the count-th time
that it gets there, and says so first, in ``TRAJECTORY_FIRED``. A peer that was started again lives on.
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
from swarm.averaging.allreduce.service import AllReduce
from swarm.optim.part import TrainedPart
from swarm.pipeline.compute import StageCompute
from swarm.pipeline.stage.table import WorkQueue
from swarm.step.member.remote_leader import RemoteLeader

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
whose journey has come home."""


def run(settings: PeerSettings) -> int:
    """See :func:`peers.node.run_peer`."""
    fates = json.loads(os.environ["TRAJECTORY_FATES"])
    fired = Path(os.environ["TRAJECTORY_FIRED"])
    if settings.name in fates and not _has_fired(fired, settings.name):
        phase, count = fates[settings.name]
        _arm(settings.name, phase, count, fired)
    return run_peer(settings)


def _has_fired(fired: Path, name: str) -> bool:
    return fired.exists() and any(json.loads(line)["name"] == name for line in fired.read_text().splitlines())


def _arm(name: str, phase: str, count: int, fired: Path) -> None:
    owner, method, when = PHASES[phase]
    honest: Callable[..., Any] = getattr(owner, method)
    times = 0

    def strike() -> None:
        nonlocal times
        times += 1
        if times == count:
            with fired.open("a") as file:
                file.write(json.dumps({"name": name, "phase": phase}) + "\n")
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(honest)
    def plain(*args: Any, **more: Any) -> Any:
        if when == "before":
            strike()
        result = honest(*args, **more)
        if when == "after":
            strike()
        return result

    @functools.wraps(honest)
    async def awaited(*args: Any, **more: Any) -> Any:
        if when == "before":
            strike()
        result = await honest(*args, **more)
        if when == "after":
            strike()
        return result

    is_async = method in ("_chunk", "reduce", "complete")
    setattr(owner, method, awaited if is_async else plain)

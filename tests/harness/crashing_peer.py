"""A real peer that kills itself with -9 at a moment that it is told of: the entry of a
:class:`peers.local.launch.PeerGroup`.

``SWARM_FATES`` in the environment is a directory. ``NAME.json`` in it, which may appear at any time, is that peer's
fate: the kind of moment, as in :mod:`tests.harness.faults_messages`, and how many of that kind from then on it lives
to see. Who dies renames it to ``NAME.fired``.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import swarm.network.rpc.server
from peers.node import run_peer
from peers.settings import PeerSettings
from swarm.events.base import Event
from swarm.monitoring.recorder import Recorder
from swarm.network.endpoint import LibP2PEndpoint
from tests.harness.faults_messages import ANSWERS, ASKS

FATES = "SWARM_FATES"


class Fate:
    """When this process dies."""

    def __init__(self, place: Path, name: str) -> None:
        self._file, self._fired = place / f"{name}.json", place / f"{name}.fired"
        self._seen: dict[str, int] = {}

    def tell(self, kind: str) -> None:
        """Such a moment is here: does not return when it is the one."""
        try:
            told = json.loads(self._file.read_text())
        except FileNotFoundError:
            return
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if kind == told["kind"] and self._seen[kind] >= told["nth"]:
            self._file.rename(self._fired)
            os.kill(os.getpid(), signal.SIGKILL)


def run(settings: PeerSettings) -> int:
    """See :func:`peers.node.run_peer`."""
    _watch(Fate(Path(os.environ[FATES]), settings.name))
    return run_peer(settings)


def _watch(fate: Fate) -> None:
    """In this process every event and message is a moment from now on."""
    emit, handle = Recorder.emit, swarm.network.rpc.server.handle
    call, notify = LibP2PEndpoint.call, LibP2PEndpoint.notify

    def told_emit(self: Recorder, event: Event) -> None:
        emit(self, event)
        fate.tell(event.kind)

    async def told_call(self: Any, target: Any, rpc: Any, *args: Any, **more: Any) -> Any:
        fate.tell(ASKS + rpc.name)
        return await call(self, target, rpc, *args, **more)

    async def told_notify(self: Any, target: Any, rpc: Any, *args: Any, **more: Any) -> None:
        fate.tell(ASKS + rpc.name)
        await notify(self, target, rpc, *args, **more)

    async def told_handle(admitted: Any, *args: Any) -> Any:
        answer = await handle(admitted, *args)
        fate.tell(ANSWERS + admitted.method.rpc.name)
        return answer

    Recorder.emit = told_emit  # type: ignore[method-assign]
    LibP2PEndpoint.call = told_call  # type: ignore[method-assign]
    LibP2PEndpoint.notify = told_notify  # type: ignore[method-assign]
    swarm.network.rpc.server.handle = told_handle

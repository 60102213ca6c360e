"""The world of ``recovery``: local peers forked ready-made, so that starting one again costs a third of a second."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from peers.chaos.faults import CannotInflict, Kill, Pause, Restart, Resume
from peers.chaos.means import signal_all
from peers.chaos.plan import Fault
from peers.local.launch import PeerGroup
from peers.local.run import RunBroken
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.ids import PeerId
from swarm.monitoring.reader import EventTail, RawEvent
from tests.harness.processes import children_of

ENTRY = "tests.benchmarks._recovery_peer:run"
LOOK_EVERY_S = 0.01

Hear = Callable[[str, str, Mapping[str, Any]], None]


class ForkedWorld:
    """Implements :class:`peers.chaos.plan.World` for kills, pauses and restarts, one plan at a time.

    Nothing happens but in :meth:`look`: faults strike, and news are told, on the caller's thread. ``note`` hears every
    event first.
    """

    def __init__(self, root: Path, note: Hear) -> None:
        self.root, self._note = root, note
        self.group = PeerGroup(root / "fork.log", entry=ENTRY)
        self._clock = SystemClock()
        self._tails: dict[str, EventTail] = {}
        self._settings: dict[str, PeerSettings] = {}
        self._ids: dict[str, PeerId] = {}
        self._hear: Hear = lambda name, kind, fields: None
        self._dead: set[str] = set()
        self._paused: dict[str, float] = {}

    def start(self, settings: PeerSettings) -> None:
        """Start a peer, or one that ended again."""
        self._settings[settings.name] = settings
        path = settings.home / "events.jsonl"
        self._tails.setdefault(settings.name, EventTail({settings.name: path}))
        self.group.start(settings)

    def leave(self, name: str) -> None:
        """Ask a peer to leave in order. It may end now."""
        self._dead.add(name)
        self.group.signal(name, signal.SIGTERM)

    def look(self) -> None:
        """Tell what peers wrote since the last look; strikes what is due. Raises RunBroken when one ended that was not
        killed."""
        self._reap()
        news = [told for tail in self._tails.values() for told in tail.read()]
        for told in news:
            self._ids[told.name] = told.record.peer
            event = told.record.event
            fields = event.fields if isinstance(event, RawEvent) else event.fields()
            self._note(told.name, event.kind, fields)
            self._hear(told.name, event.kind, fields)
        for name in [name for name, until in self._paused.items() if until <= self._clock.monotonic()]:
            self.inflict(Resume((name,)))

    def _reap(self) -> None:
        for ended in self.group.poll(LOOK_EVERY_S):
            if ended.name not in self._dead:
                raise RunBroken(f"{ended} and was not meant to", ended.name)

    def stop(self) -> None:
        """End everybody."""
        for name in tuple(self._paused):
            self.inflict(Resume((name,)))
        self.group.stop()

    # --- the seam ------------------------------------------------------------------------------------------------

    def wall(self) -> float:
        """See :class:`~peers.chaos.plan.World`."""
        return self._clock.wall()

    def identity(self, name: str) -> str:
        """See :class:`~peers.chaos.plan.World`."""
        return self._ids[name]

    def listen(self, hear: Hear) -> None:
        """See :class:`~peers.chaos.plan.World`. One that listened before hears nothing any more."""
        self._hear = hear

    def check(self, fault: Fault) -> None:
        """See :class:`~peers.chaos.plan.World`."""
        if not isinstance(fault, Kill | Pause | Resume | Restart):
            raise CannotInflict(f"this world has no means for {fault.name}")

    def inflict(self, fault: Fault) -> Iterable[str]:
        """See :class:`~peers.chaos.plan.World`. A peer is hit with its daemon, as when its machine is."""
        self.check(fault)
        if isinstance(fault, Restart):
            return self._restart(fault.peer)
        for name in fault.victims:
            self._signal(name, fault)
        return fault.victims

    def _signal(self, name: str, fault: Fault) -> None:
        pid = self.group.pids[name]
        if isinstance(fault, Resume):
            self._paused.pop(name, None)
            signal_all([child.pid for child in children_of(pid)] + [pid], signal.SIGCONT)
            return
        signal_all([pid], signal.SIGSTOP)  # so that it starts nothing while we look
        family = [pid, *(child.pid for child in children_of(pid))]
        if isinstance(fault, Pause):
            self._paused[name] = math.inf if fault.seconds is None else self._clock.monotonic() + fault.seconds
        else:
            self._dead.add(name)
        signal_all(family, signal.SIGSTOP if isinstance(fault, Pause) else signal.SIGKILL)

    def _restart(self, name: str) -> tuple[str]:
        while name in self.group.pids:  # its end is reported within milliseconds
            self._reap()
        self.start(self._settings[name])
        self._dead.discard(name)
        return (name,)

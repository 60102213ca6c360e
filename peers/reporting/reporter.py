"""Hand a peer's figures on to trackers without its noticing: :class:`Reporting`.

A thread of its own opens the trackers, imports their libraries and waits for their servers. Whatever they do there,
the peer goes on: what finds no room is dropped, and a tracker that fails gets nothing more and one line of warning.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.console.event_words import harmless
from peers.reporting.trackers import FACTS, TRACKERS, Tracker, names_of, without_secrets
from peers.settings import PeerSettings
from swarm.clock import Clock
from swarm.events import (
    Event,
    EventSink,
    LinkUsage,
    LoopLag,
    PeerStopped,
    RosterChanged,
    RunFound,
    RunStarted,
    StepClosed,
)

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Events that wait for trackers that stand still."""
FLUSH_S = 15.0
"""How long a peer that ends waits for them."""
MAX_WORDS = 200

_TOLD = (RunFound, RunStarted, RosterChanged, StepClosed, LinkUsage, LoopLag)


class StepFigures:
    """Fold events into figures by step. Pure."""

    def __init__(self) -> None:
        self._members: int | None = None
        self._lag: LoopLag | None = None

    def take(self, event: Event) -> tuple[int, Mapping[str, float]] | None:
        """Return a step and what an event says of it; None for nothing."""
        match event:
            case RunStarted():
                self._members = len(event.roster)
            case RosterChanged() if self._members is not None:
                self._members += len(event.joined) - len(event.left)
            case LoopLag():
                self._lag = event
            case StepClosed():
                return event.step, _finite(self._of_step(event))
            case LinkUsage():
                return event.step, {"bytes_sent": event.bytes_sent, "bytes_received": event.bytes_received}
        return None

    def _of_step(self, event: StepClosed) -> dict[str, float]:
        found: dict[str, float] = {"tokens": event.tokens, "microbatches": event.microbatches, "lr": event.lr}
        if event.microbatches:  # else the step was given up
            found |= {"loss": event.loss, "grad_norm": event.grad_norm}
        if event.whole and event.seconds > 0:
            found |= {"tokens_per_s": event.tokens / event.seconds, "step_s": event.seconds}
        if self._members is not None:
            found["members"] = self._members
        if self._lag is not None:
            found |= {"loop_lag_p50_ms": self._lag.p50_ms, "loop_lag_max_ms": self._lag.max_ms}
        return found


def _finite(figures: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in figures.items() if math.isfinite(value)}


class Reporting:
    """Passes every event on, and those that say something of a step to trackers, too.

    Args:
        sink: Gets every event first.
        names: The trackers, as :data:`peers.reporting.trackers.TRACKERS` has them; none: nothing else is done.
        directory: Each writes below it, into a directory of its name.
        peer: What the peer that reports is called.
        clock: When.
    """

    def __init__(self, sink: EventSink, names: Sequence[str], directory: Path, peer: str, clock: Clock) -> None:
        self._sink, self._names, self._directory, self._peer, self._clock = sink, names, directory, peer, clock
        self._waiting: queue.Queue[Event | None] = queue.Queue(MAX_WAITING)
        self._full = False
        self._thread = threading.Thread(target=self._report, name="reporting", daemon=True) if names else None
        if self._thread is not None:
            self._thread.start()

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`. Never waits; the last event, PeerStopped, ends the reporting."""
        self._sink.emit(event)
        if self._thread is None or not isinstance(event, (*_TOLD, PeerStopped)):
            return
        try:
            self._waiting.put_nowait(None if isinstance(event, PeerStopped) else event)
        except queue.Full:
            if not self._full:
                logger.warning("trackers are too slow: they lack the figures of some steps")
            self._full = True

    def close(self) -> None:
        """Wait for what the trackers still have to hand on, FLUSH_S at most. After the last event; idempotent."""
        if self._thread is not None:
            self._thread.join(FLUSH_S)
            self._thread = None

    # --- in the thread -------------------------------------------------------------------------------------------

    def _report(self) -> None:
        figures, trackers = StepFigures(), dict[str, Tracker]()
        while (event := self._waiting.get()) is not None:
            if isinstance(event, RunFound) and not trackers:
                self._open(event, trackers)
            if (found := figures.take(event)) is not None:
                for name in list(trackers):
                    self._tried(name, trackers, trackers[name].log, *found)
        for name in list(trackers):
            self._tried(name, trackers, trackers[name].close)

    def _open(self, found: RunFound, trackers: dict[str, Tracker]) -> None:
        facts = {name: getattr(found, name) for name in FACTS} | {"peer": self._peer}
        for name in self._names:
            directory = self._directory / name
            try:
                directory.mkdir(parents=True, exist_ok=True)
                trackers[name] = TRACKERS[name](directory, facts, self._clock)
            except Exception as error:  # noqa: BLE001 - any library's own; it costs the peer nothing
                _warn(name, error)

    def _tried(self, name: str, trackers: dict[str, Tracker], act: Callable[..., None], *given: Any) -> None:
        try:
            act(*given)
        except Exception as error:  # noqa: BLE001 - see above
            del trackers[name]
            _warn(name, error)


def reporting_of(settings: PeerSettings, sink: EventSink, clock: Clock) -> Reporting:
    """Return what a peer's settings ask for."""
    options = settings.options
    directory = options.report_dir or settings.home / "reports"
    return Reporting(sink, names_of(options.report_to), directory, settings.name, clock)


def _warn(name: str, error: Exception) -> None:
    said = harmless(without_secrets(f"{type(error).__name__}: {error}"))[:MAX_WORDS]
    logger.warning("stopped reporting to %s; the run goes on: %s", name, said)

"""Write events to disk, one JSON object per line, appended and never rewritten; measure the event loop's lag."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm.clock import Clock
from swarm.disk import older
from swarm.events import Event, EventSink, LoopLag
from swarm.ids import PeerId

MAX_BYTES = 64 << 20
"""A file of this size is put aside, as the older of two, and another begun: a peer of weeks takes twice as much."""
CARRIED = ("RunFound",)
"""Kinds of which the last event is written again at the beginning of the next file: anyone who reads that one only
needs them."""

ENVELOPE = ("t", "m", "peer", "kind", "dropped")
"""Keys of a line that are not the event's own: wall and monotonic seconds, who wrote it, what it is, and (only when it
is not 0) how many events before it found no room. An event's field of such a name is stored as ``name_``."""


class Recorder:
    """An :class:`~swarm.events.EventSink` that appends to ``path``, created 0600 with its directory existing already.

    Each event is one write of one whole line in append mode, so what is written survives a kill of this process at
    any moment, and several writers do not tear each other's lines. A full disk costs events, which are counted and
    told in the next line that fits, and never raises. Safe from any thread. Cost: some 20 µs an event.
    Of ``max_bytes`` a file is renamed to :func:`swarm.disk.older`, in place of an earlier one, and another begun; while
    that cannot be, the file grows, as it does without a bound (``inf``). Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, peer: PeerId, clock: Clock, max_bytes: float = MAX_BYTES) -> None:
        self._path, self._max_bytes, self._carried = path, max_bytes, dict[str, bytes]()
        self._peer, self._clock = peer, clock
        self._lock = threading.Lock()
        self._dropped = 0
        self._file: int | None = _opened(path)
        self._torn = _ends_torn(self._file)
        self._size = os.fstat(self._file).st_size

    @property
    def dropped(self) -> int:
        """Events that found no room since the last line that did."""
        return self._dropped

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`. After :meth:`close` events are only counted."""
        with self._lock:
            line = self._line(event)
            if self._file is not None and self._size + len(line) > self._max_bytes:
                self._begin_anew()
            if event.kind in CARRIED:
                self._carried[event.kind] = line
            written = self._file is not None and self._append(self._file, line)
            self._dropped = 0 if written else self._dropped + 1

    def _begin_anew(self) -> None:
        try:
            another = _put_aside(self._path)
        except OSError:
            self._size = 0  # it grows on, and this is tried again after as much
            return
        if self._file is not None:
            os.close(self._file)
        self._file, self._torn, self._size = another, False, 0
        for line in self._carried.values():
            self._append(another, line)

    def close(self) -> None:
        """Put everything on the disk and close. Idempotent; a disk that fails now has nothing more to be told."""
        with self._lock:
            if self._file is None:
                return
            file, self._file = self._file, None
            try:
                os.fsync(file)
            except OSError:
                self._dropped += 1
            finally:
                os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _line(self, event: Event) -> bytes:
        line: dict[str, Any] = {"t": round(self._clock.wall(), 6), "m": round(self._clock.monotonic(), 6)}
        line |= {"peer": self._peer, "kind": event.kind}
        if self._dropped:
            line["dropped"] = self._dropped
        for name, value in event.fields().items():
            line[f"{name}_" if name in ENVELOPE else name] = value
        return encode_line(line)

    def _append(self, file: int, line: bytes) -> bool:
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(file, line)
        except OSError:
            return False
        self._size += written
        # A disk that fills up takes the beginning of a line: the next one starts on a line of its own.
        self._torn = 0 < written < len(line) or (self._torn and written == 0)
        return written == len(line)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _put_aside(path: Path) -> int:
    """Have ``path`` be a new file, and what it was the older one; returns the new one. Raises OSError, with ``path``
    still there: the new file is opened first, and given its name last."""
    new = path.with_name(f".{path.name}.new")
    another = _opened(new)
    try:
        os.replace(path, older(path))
        try:
            os.replace(new, path)
        except OSError:
            os.replace(older(path), path)
            raise
    except OSError:
        os.close(another)
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return another


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Compact JSON and a newline. Numbers that JSON lacks are written as the strings "nan", "inf" and "-inf"."""
    try:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_spelled(line), separators=(",", ":"), allow_nan=False, default=str)
    return text.encode() + b"\n"


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


# --- event loop lag --------------------------------------------------------------------------------------------------
# How late the loop is: the first thing to look at when everything is slow.


TICK_S = 0.05
"""200 samples in an interval, which is enough for a 99th percentile. Ten times as
many took, in a sampled profile, some two fifths of what a busy stage host's loop thread did."""


class LoopLagProbe:
    """Sleeps for a tick, again and again, and notes how much later it woke; emits one LoopLag per ``interval_s``."""

    def __init__(self, events: EventSink, clock: Clock, *, interval_s: float = 10.0, tick_s: float = TICK_S) -> None:
        self._events, self._clock = events, clock
        self._interval_s, self._tick_s = interval_s, tick_s

    async def run(self) -> None:
        """Until cancelled; what was measured since the last event is emitted then."""
        lags_s: list[float] = []
        told = self._clock.monotonic()
        try:
            while True:
                before = self._clock.monotonic()
                await self._clock.sleep(self._tick_s)
                now = self._clock.monotonic()
                lags_s.append(max(0.0, now - before - self._tick_s))
                if now - told >= self._interval_s:
                    told = now
                    self._emit(lags_s)
                    lags_s.clear()
        finally:
            self._emit(lags_s)

    def _emit(self, lags_s: Sequence[float]) -> None:
        if lags_s:
            self._events.emit(summarize(lags_s))


def summarize(lags_s: Sequence[float]) -> LoopLag:
    """Median, 99th percentile (nearest rank) and maximum of at least one lag."""
    ordered = sorted(lags_s)
    p50, p99, worst = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000 for share in (0.5, 0.99, 1.0))
    return LoopLag(p50_ms=p50, p99_ms=p99, max_ms=worst)

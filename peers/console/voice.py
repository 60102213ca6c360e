"""A peer's voice: lines on a terminal or in a pipe, which may stand still without holding up who speaks."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Protocol, TextIO

MAX_WAITING = 1000
"""Lines that wait for a reader who has stopped (Ctrl-S, a full pipe); later ones are dropped."""
FLUSH_S = 1.0


class Speaker(Protocol):
    """Prints lines: :class:`ConsolePrinter`, or a stand-in."""

    terminal: bool

    def say(self, text: str) -> None:
        """One line, or several."""

    def update(self, text: str) -> None:
        """A line that the next one replaces; on terminals only."""

    def close(self) -> None:
        """Nothing more will be said."""


class ConsolePrinter:
    """Says whole lines on ``out`` from a thread of its own: never blocks, never raises, whatever the reader does.

    On a terminal :meth:`update` writes a line that the next one replaces.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        out = out or sys.stdout
        self._file, self._encoding = out.fileno(), out.encoding or "utf-8"
        self.terminal = out.isatty()
        self._updating = False
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        # A daemon, and writing to the descriptor: a reader who never comes back must not keep the process alive.
        self._thread = threading.Thread(target=self._write, name="voice", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """One line, or several."""
        self._put(("\r\x1b[K" if self._updating else "") + text + "\n")
        self._updating = False

    def update(self, text: str) -> None:
        """A line that stands until the next one is said. For terminals."""
        self._put(f"\r{text}\x1b[K")
        self._updating = True

    def close(self) -> None:
        """Wait until everything is written, at most :data:`FLUSH_S`."""
        if self._updating:
            self.say("")
        try:
            self._waiting.put(None, timeout=FLUSH_S)
        except queue.Full:
            return
        self._thread.join(FLUSH_S)

    def _put(self, text: str) -> None:
        try:
            self._waiting.put_nowait(text.encode(self._encoding, errors="replace"))
        except queue.Full:
            return

    def _write(self) -> None:
        while (data := self._waiting.get()) is not None:
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                # The reader (head, less, a closed terminal) is gone: the rest is for nobody.
                continue

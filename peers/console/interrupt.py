"""Ctrl-C and SIGTERM as one exception, raised once, so that every command can end in order.

Standard library only: this is installed before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived. Not an Exception, so that no border swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    @property
    def said(self) -> str:
        """The signal as people call it: ``Ctrl-C``, ``SIGTERM``."""
        return "Ctrl-C" if self.number == signal.SIGINT else str(self)


class _Received:
    number: int | None = None
    kept_back: bool = False
    unraisable: Callable[[sys.UnraisableHookArgs], object] = sys.__unraisablehook__


_OUTLIVES_TERMINAL = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
"""``nohup`` started this process, or a supervisor that does the same: it goes on when its terminal is closed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *(() if _OUTLIVES_TERMINAL else (signal.SIGHUP,)))


def install() -> None:
    """Raise :class:`Interrupted` in the main thread at the first such signal, wherever it stands; ignore later ones.

    Later ones are ignored because clearing up has begun and is bounded in time.
    """
    _Received.number, _Received.kept_back = None, False
    if sys.unraisablehook is not _on_unraisable:
        _Received.unraisable, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    for number in SIGNALS:
        signal.signal(number, _on_signal)


def silence() -> None:
    """Ignore these signals from now on: for the last moments of a process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def defer() -> None:
    """From now on an interrupt is only noted: for moments that must not be cut short. Not by blocking signals, which
    only the calling thread would do: libraries start threads of their own, and any of them may receive one."""
    _Received.kept_back = True


def allow() -> None:
    """The end of :func:`defer`: raises Interrupted at once when a signal has arrived."""
    _Received.kept_back = False
    check()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let interrupts in, which are kept back outside."""
    try:
        allow()
        yield
    finally:
        defer()


def received() -> Interrupted | None:
    """The interrupt that arrived, if one did. The exception itself can get lost when the signal arrives inside a
    destructor or a foreign library's callback; loops and error paths therefore ask here."""
    return None if _Received.number is None else Interrupted(_Received.number)


def check() -> None:
    """Raise Interrupted when a signal has arrived."""
    interrupt = received()
    if interrupt is not None:
        raise interrupt


def _on_unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that came inside a destructor or a library's callback is remembered (:func:`received`): a traceback
    of it would only frighten."""
    if not isinstance(lost.exc_value, Interrupted):
        _Received.unraisable(lost)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _Received.number is None:
        _Received.number = number
        if not _Received.kept_back:
            raise Interrupted(number)

"""Waiting for something to become true, with a deadline and the last thing that was seen.

The looks are milliseconds apart and the deadline only bounds a failure: a test that passes never waits for a guessed
time. Where an event, a queue or a future can be awaited instead, do that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_EVERY_S = 0.005
LONG_S = 300.0
"""Long enough for whatever is waited for on a machine that is slow and busy. Who passes never waits for it."""


class NotInTime(AssertionError):
    """The condition did not become true before its deadline; the message has the last value seen."""


def wait_until(look: Callable[[], T], *, deadline_s: float = LONG_S, what: str = "") -> T:
    """The first truthy value of ``look()``; blocks the thread. Raises NotInTime after ``deadline_s`` seconds."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not (value := look()):
        if time.monotonic() >= end:
            raise NotInTime(_told(what, deadline_s, value))
        pause.wait(LOOK_EVERY_S)
    return value


async def eventually(look: Callable[[], T], *, deadline_s: float = LONG_S, what: str = "") -> T:
    """As :func:`wait_until`, letting the event loop run between looks. A cancelled wait ends at once."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while not (value := look()):
        if loop.time() >= end:
            raise NotInTime(_told(what, deadline_s, value))
        await asyncio.sleep(LOOK_EVERY_S)
    return value


def _told(what: str, deadline_s: float, value: object) -> str:
    return f"{what or 'the condition'} did not come true in {deadline_s} s; last seen: {value!r}"

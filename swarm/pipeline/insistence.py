"""Sending to a peer that is the only one to take it, until it is not busy any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm.clock import Clock
from swarm.errors import Busy
from swarm.waiting import ExponentialBackoff

T = TypeVar("T")


async def insist(send: Callable[[], Awaitable[T]], clock: Clock, *, within_s: float) -> T:
    """Send until the receiver is not Busy any more. For messages that only one peer can take: the way back.

    Raises what ``send`` raises, and its Busy when ``within_s`` seconds have passed.
    """
    patience, deadline = ExponentialBackoff(), clock.monotonic() + within_s
    while True:
        try:
            return await send()
        except Busy:
            pause = patience.pause_s()
            if clock.monotonic() + pause > deadline:
                raise
        await clock.sleep(pause)

"""Waiting for whichever comes first, and for what somebody else brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def first_done(*works: Coroutine[Any, Any, Any]) -> None:
    """Run these beside each other; return when one has ended, having cancelled the others. Raises what that one raised.
    Cancelled, it leaves no task that goes on."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


class News:
    """Those who wait for something here to change. A ``failure`` ends all their waiting."""

    def __init__(self) -> None:
        self._told = asyncio.Condition()
        self.failure: Exception | None = None

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Return when it holds; it is looked at whenever :meth:`tell` is called. Raises the failure."""
        async with self._told:
            await self._told.wait_for(lambda: self.failure is not None or condition())
        if self.failure is not None:
            raise self.failure

    async def tell(self) -> None:
        """Something has changed."""
        async with self._told:
            self._told.notify_all()

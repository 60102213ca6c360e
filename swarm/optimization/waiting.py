"""Waiting for whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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

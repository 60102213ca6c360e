"""A dashboard whose run goes on by itself, in a thread beside the browser's driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.harness.browser import browser
from tests.harness.rigs.dashboard import ScriptedSource, ServedDashboard, served

TOKEN = "the-token-of-the-page"


@dataclass(slots=True)
class Page:
    """A served dashboard, steered from another thread."""

    loop: asyncio.AbstractEventLoop
    dashboard: ServedDashboard
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.dashboard.port}/"

    @property
    def source(self) -> ScriptedSource:
        """What comes next."""
        return self.dashboard.source

    def advance(self, steps: int = 1) -> None:
        """Let seconds go by."""

        async def go() -> None:
            for _ in range(steps):
                await self.dashboard.clock.look()

        asyncio.run_coroutine_threadsafe(go(), self.loop).result(20)


def page_of(**arguments: Any) -> Iterator[Page]:
    """Serve a page in a thread of its own."""
    ready: list[Page] = []
    begun, over = threading.Event(), threading.Event()

    async def run() -> None:
        async with served(**arguments) as dashboard:
            ready.append(Page(asyncio.get_running_loop(), dashboard))
            begun.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert begun.wait(300)
    try:
        yield ready[0]
    finally:
        over.set()
        thread.join(300)


@pytest.fixture
def page() -> Iterator[Page]:
    """A page whose run has closed two steps, and goes on with :meth:`Page.advance`."""
    for one in page_of(steps=7):
        one.advance(2)
        yield one


@pytest.fixture
def locked_page() -> Iterator[Page]:
    """A page that takes a token."""
    yield from page_of(steps=7, token=TOKEN)


@pytest.fixture(scope="module")
def wide() -> Iterator[Any]:
    """A browser with a wide window."""
    with browser(width=1600) as driver:
        yield driver

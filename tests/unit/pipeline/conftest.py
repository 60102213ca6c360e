"""A scene that is open, its replica at work. Asynchronous tests of this folder run in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.harness.rigs.clocks import virtual_loops as pytest_asyncio_loop_factories
from tests.harness.rigs.pipeline import ReplicaScene, working

__all__ = ["pytest_asyncio_loop_factories", "scene"]


@pytest.fixture
async def scene() -> AsyncIterator[ReplicaScene]:
    """The replica in the middle of a route of three."""
    made = ReplicaScene()
    await made.open()
    async with working(made.replica):
        yield made

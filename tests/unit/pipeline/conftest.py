"""A scene that is open, its replica at work."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.harness.rigs.pipeline import ReplicaScene, working


@pytest.fixture
async def scene() -> AsyncIterator[ReplicaScene]:
    """The replica in the middle of a route of three."""
    made = ReplicaScene()
    await made.open()
    async with working(made.replica):
        yield made

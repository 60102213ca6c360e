"""One world and two peers for each module, on the module's loop."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.harness.rigs.network import WORLDS, Peer, ServiceBench, World


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["sim", pytest.param("libp2p", marks=pytest.mark.network)]
)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each network in turn."""
    home = Path(tempfile.mkdtemp(prefix="c-"))
    made = WORLDS[request.param](home)
    yield made
    await made.close()
    shutil.rmtree(home)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alice(world: World) -> Peer:
    """The one that asks."""
    return await world.peer()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _bob(world: World, alice: Peer) -> Peer:
    return await world.peer()


@pytest_asyncio.fixture(loop_scope="module")
async def bob(_bob: Peer) -> Peer:
    """The one that answers, its bench cleared."""
    ServiceBench.__init__(_bob.bench)
    return _bob

"""Streams to others, with a dialler that never gets through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.libp2p.streams import Outgoing
from swarm.network.rpc.link import ByteMeter

TARGET = PeerId("target")


def dialling_for_ever() -> tuple[Outgoing, asyncio.Event]:
    """What gives streams, and an event: a dial has begun."""
    begun = asyncio.Event()

    async def through(operation: Callable[[], Awaitable[object]]) -> object:
        return await operation()

    async def open_stream(target: PeerId, protocol: str) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    dialler = SimpleNamespace(open_stream=open_stream)
    return Outgoing(
        PeerId("me"), dialler, SimpleNamespace(through=through), SimpleNamespace(meter=ByteMeter()), 30.0
    ), begun


async def test_call_that_waits_for_a_dial_when_the_endpoint_closes_is_unreachable_and_not_cancelled() -> None:
    outgoing, begun = dialling_for_ever()
    waiting = asyncio.create_task(outgoing.stream(TARGET, "control"))
    await begun.wait()
    await outgoing.close()
    with pytest.raises(Unreachable, match="closed"):
        await waiting


async def test_call_that_is_cancelled_as_it_waits_for_a_dial_is_cancelled() -> None:
    outgoing, begun = dialling_for_ever()
    waiting = asyncio.create_task(outgoing.stream(TARGET, "control"))
    await begun.wait()
    waiting.cancel()
    await asyncio.gather(waiting, outgoing.close(), return_exceptions=True)
    assert waiting.cancelled()

"""Two streams joined: what ends them, and how fast a bounded one is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm.network.libp2p.splice import RateLimiter, Splice, SpliceLimits, Streams
from tests.harness.rigs.network import HandClock

KIB = 1 << 10


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Streams, Streams]]:
    ours, theirs = socket.socketpair()
    here = await asyncio.open_connection(sock=ours)
    there = await asyncio.open_connection(sock=theirs)
    try:
        yield here, there
    finally:
        for _, writer in (here, there):
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def spliced(clock: HandClock, *, bounded: bool) -> AsyncIterator[tuple[Streams, Streams, asyncio.Task[None]]]:
    """The outer ends of two streams whose inner ends are joined."""
    limits = SpliceLimits(bounded=lambda: bounded, bytes_per_s=10 * KIB, idle_s=90)
    splice = Splice(limits, clock, lambda size: None)
    async with pair() as (left, inner_left), pair() as (right, inner_right):
        task = asyncio.ensure_future(splice.run(inner_left, inner_right))
        try:
            yield left, right, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def say(source: Streams, target: Streams, text: bytes) -> None:
    source[1].write(text)
    assert await asyncio.wait_for(target[0].readexactly(len(text)), 60) == text


async def test_splice_passes_bytes_both_ways_until_both_have_ended() -> None:
    async with spliced(HandClock(100.0), bounded=True) as (left, right, task):
        await say(left, right, b"hello")
        await say(right, left, b"well")
        left[1].write_eof()
        assert await right[0].read() == b""
        await say(right, left, b"one more thing")
        right[1].write_eof()
        await asyncio.wait_for(task, 60)


async def test_splice_of_strangers_ends_when_nothing_is_said_and_that_of_members_does_not() -> None:
    for bounded in (True, False):
        clock = HandClock(100.0)
        async with spliced(clock, bounded=bounded) as (left, right, task):
            await clock.advance(80)
            await say(left, right, b"still here")
            await clock.advance(80)
            assert not task.done()
            await clock.advance(10)
            await clock.advance(90)
            assert task.done() == bounded
            if bounded:
                with pytest.raises(TimeoutError, match="90 s"):
                    task.result()


async def test_splice_of_strangers_passes_on_no_more_than_its_rate() -> None:
    clock = HandClock(100.0)
    async with spliced(clock, bounded=True) as (left, right, _):
        await say(left, right, bytes(19 * KIB))  # it saves up 20 KiB in two seconds
        await say(left, right, bytes(6 * KIB))
        left[1].write(b"later")
        waiting = asyncio.ensure_future(right[0].readexactly(5))
        await clock.advance(0.4)
        assert not waiting.done()
        await clock.advance(0.2)
        assert await asyncio.wait_for(waiting, 60) == b"later"


def test_pace_waits_for_what_is_beyond_the_burst() -> None:
    pace = RateLimiter(100.0, now=50.0)
    assert pace.wait_s(200, now=50.0) == 0
    assert pace.wait_s(50, now=50.0) == pytest.approx(0.5)
    assert pace.wait_s(100, now=50.5) == pytest.approx(1.0)
    assert pace.wait_s(200, now=1000.0) == 0, "no more than the burst is saved up"
    assert pace.wait_s(1, now=1000.0) > 0

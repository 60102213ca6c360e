"""Numbers that go on, stand still, or are no longer there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.ids import PeerId
from swarm.network.rpc.framing import Kind
from swarm.network.rpc.link import ByteMeter, Link
from tests.harness.expect import eventually

pytestmark = pytest.mark.usefixtures("_without_patience")


@pytest.fixture
def _without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.rpc.link.UNREAD_S", 0.0)
    monkeypatch.setattr("swarm.network.rpc.link.LAST_LOOK_S", 0.0)


class Unread:
    """A transport's buffer from which the other side takes ``takes`` bytes before each look, one after the other."""

    def __init__(self, *takes: int) -> None:
        self.left, self.held, self.over = list(takes), 1 << 20, asyncio.Event()

    def get_write_buffer_size(self) -> int:
        """See asyncio.WriteTransport."""
        self.held -= self.left.pop(0) if self.left else 0
        return self.held

    def write(self, piece: bytes) -> None:
        """See asyncio.WriteTransport."""
        self.held += len(piece)

    def abort(self) -> None:
        """See asyncio.WriteTransport."""
        self.over.set()


def link_over(transport: Unread) -> Link:
    owner = SimpleNamespace(on_lost=lambda reason: None)
    link = Link(PeerId("reader"), ByteMeter(), cast(Any, owner))
    link._transport = cast(Any, transport)
    return link


async def test_link_to_one_who_reads_slowly_stays_and_ends_when_he_reads_no_more() -> None:
    transport = Unread(0, *[1] * 50)
    link = link_over(transport)
    link.pause_writing()
    async with asyncio.timeout(60):
        await transport.over.wait()
    assert not transport.left, "it stayed for as long as he read"
    assert link.lost is not None
    assert "does not read" in link.lost.reason


async def test_link_to_one_who_does_not_read_ends_though_we_go_on_writing_small_frames() -> None:
    transport = Unread()
    link = link_over(transport)
    link.pause_writing()
    async with asyncio.timeout(60):
        while link.lost is None:
            link.send_nowait(Kind.CANCEL, 1)
            await asyncio.sleep(0)
    assert transport.held < 16 << 20, "it was not for what had piled up"


async def test_link_that_takes_more_again_is_watched_no_longer() -> None:
    transport = Unread()
    link = link_over(transport)
    link.pause_writing()
    link.resume_writing()
    await eventually(lambda: link._reading._timer is None, what="the last look")
    assert link.lost is None

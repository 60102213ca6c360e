"""What a peer that is no member may send, and a member may: driven frame by frame over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import pytest
from pydantic import Field

from swarm.clock import SystemClock
from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.network.rpc.bodies import pack_request
from swarm.network.rpc.dispatcher import Dispatcher, ServeLimits
from swarm.network.rpc.framing import HEADER_BYTES, MAX_STRANGER_BYTES, Kind, decode_header, encode_frame, encode_header
from swarm.network.rpc.link import ByteMeter, Link
from swarm.network.rpc.server import ServerStream
from swarm.network.rpc.strangers import (
    ALL_AT_ONCE,
    ALL_QUESTIONS_AT_ONCE,
    BARRED_S,
    BYTES_A_FRAME,
    FRAMES_AT_ONCE,
    FRAMES_S,
    LONGEST_PAUSE_S,
    LONGEST_WAIT_S,
    MAX_AHEAD,
    MAX_ASKING,
    MAX_BARRED,
    MAX_STRANGER_BODY_BYTES,
    QUESTIONS_AT_ONCE,
    QUESTIONS_S,
    STREAM_FRAMES,
    QuestionBudget,
    StrangerBudget,
)
from swarm.schema import Empty, Message
from tests.harness.expect import eventually

STRANGER, MEMBER = PeerId("stranger"), PeerId("member")


class Words(Message):
    """May be long."""

    words: Annotated[str, Field(max_length=1 << 20)]


SAY = Rpc("test/1/say", Words, Empty)


class Listener:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [SAY.handled(self._say)]

    async def _say(self, caller: PeerId, body: Words) -> Empty:
        self.told.append(len(body.words))
        return Empty()


class FrozenClock(SystemClock):
    """A clock that somebody else moves: no budget refills by itself."""

    now = 1000.0

    def monotonic(self) -> float:
        """Return the time that it was set to."""
        return self.now


class Door:
    """A service behind one stream, for peers of which MEMBER is a member."""

    def __init__(self, caller: PeerId) -> None:
        self.service, self.clock = Listener(), FrozenClock()
        self.budget = StrangerBudget(self.clock)
        self.budget.known = lambda peer: peer == MEMBER
        dispatcher = Dispatcher(ServeLimits(calls_per_peer=10_000))
        dispatcher.mount(self.service)
        self.stream = ServerStream(caller, dispatcher, SystemClock(), ByteMeter(), self.budget, public=False)


@contextlib.asynccontextmanager
async def door(caller: PeerId) -> AsyncIterator[tuple[Door, socket.socket]]:
    ours, theirs = socket.socketpair()
    opened = Door(caller)
    task = asyncio.create_task(opened.stream.serve(*await asyncio.open_connection(sock=theirs)))
    try:
        yield opened, ours
    finally:
        ours.close()
        await task


def say(call: int, size: int = 1, kind: Kind = Kind.NOTICE) -> bytes:
    head, body = pack_request(SAY.name, 30.0, 0, Words(words="x" * size))
    return encode_frame(kind, call, body, head=head)


async def told(caller: socket.socket) -> bytes:
    """All that is said until the stream is closed."""
    caller.setblocking(False)
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        while piece := await loop.sock_recv(caller, 1 << 16):
            received += piece
    return received


async def test_stranger_who_announces_a_long_body_is_told_no_before_it_is_sent() -> None:
    async with door(STRANGER) as (opened, caller):
        caller.send(encode_header(Kind.REQUEST, 1, MAX_STRANGER_BYTES + 1))
        assert b"exceeds the limit" in await told(caller)
        assert opened.service.told == []


async def test_member_s_long_body_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    from swarm.network.rpc import dispatcher

    decode = dispatcher.decode

    def note(*args: object) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(dispatcher, "decode", note)
    long = MAX_STRANGER_BODY_BYTES + 1
    async with door(MEMBER) as (opened, caller):
        sending = asyncio.to_thread(caller.sendall, say(1) + say(2, long))
        await sending
        await eventually(lambda: len(opened.service.told) == 2, what="both")
        assert opened.service.told == [1, long]
        assert threads == [True, False]


async def test_member_s_long_body_that_is_malformed_ends_the_stream_as_a_short_one_does() -> None:
    head, _ = pack_request(SAY.name, 30.0, 0, Words(words=""))
    async with door(MEMBER) as (opened, caller):
        frame = encode_frame(Kind.REQUEST, 1, b"\xc1" * (MAX_STRANGER_BODY_BYTES + 1), head=head)
        answer = asyncio.ensure_future(told(caller))
        caller.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(caller, frame)
        assert b"malformed body" in await answer
        assert opened.service.told == []


async def test_stranger_s_stream_pauses_when_its_budget_is_spent_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, pause = [], Link.pause

    def shorter(link: Link, seconds: float) -> None:
        pauses.append(seconds)
        pause(link, seconds / 1000)

    monkeypatch.setattr(Link, "pause", shorter)
    many = int(FRAMES_AT_ONCE) + 20
    async with door(STRANGER) as (opened, caller):
        caller.send(b"".join(say(call) for call in range(1, many)) + say(many, kind=Kind.REQUEST))
        header = decode_header(await asyncio.to_thread(caller.recv, HEADER_BYTES))
        assert (header.kind, header.call) == (Kind.REPLY, many)
        assert len(opened.service.told) == many, "nobody is refused for calling often"
        assert 15 < len(pauses) <= 25
        assert max(pauses) <= 25 / FRAMES_S


async def test_stranger_who_floods_while_it_is_to_pause_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.rpc.server.MAX_AHEAD", 20)
    many = int(FRAMES_AT_ONCE) + 200
    async with door(STRANGER) as (opened, caller):
        caller.send(b"".join(say(call) for call in range(1, many)))
        assert b"more calls at once" in await told(caller)
        assert (opened.budget.barred(STRANGER), opened.budget.barred(MEMBER)) == (True, False)
        opened.clock.now += BARRED_S
        assert not opened.budget.barred(STRANGER)


def test_those_that_are_barred_are_few_and_a_member_is_never_one() -> None:
    budget = StrangerBudget(FrozenClock())
    budget.known = lambda peer: peer == MEMBER
    for number in range(MAX_BARRED + 1):
        budget.bar(PeerId(f"peer-{number}"))
    assert not budget.barred(PeerId("peer-0")), "the first one is forgotten"
    assert budget.barred(PeerId(f"peer-{MAX_BARRED}"))
    budget.bar(MEMBER)
    assert not budget.barred(MEMBER), "it was a stranger when it flooded, and has joined"


def test_all_strangers_share_one_budget_and_new_streams_count() -> None:
    clock = FrozenClock()
    budget = StrangerBudget(clock)
    streams = [budget.stream() for _ in range(int(ALL_AT_ONCE / STREAM_FRAMES))]
    assert streams[0].pause_s(0) > 0.0
    assert streams[0].pause_s(2000 * BYTES_A_FRAME) > LONGEST_PAUSE_S, "what a stream owes by itself it pays"
    assert streams[1].pause_s(0) == LONGEST_PAUSE_S, "and no other pays much of it"
    clock.now += 1000.0
    assert streams[1].pause_s(0) == 0.0
    budget.expect(100)
    streams[0].pause_s(1000 * BYTES_A_FRAME)
    assert streams[1].pause_s(0) < 0.5, "those that are expected find room"


async def test_member_may_call_as_often_as_it_likes() -> None:
    many = int(FRAMES_AT_ONCE) + 4 * MAX_AHEAD
    async with door(MEMBER) as (opened, caller):
        caller.send(b"".join(say(call) for call in range(1, many + 1)))
        await eventually(lambda: len(opened.service.told) == many, what="all of them")


# --- questions to the directory --------------------------------------------------------------------------------------


class Slept(FrozenClock):
    """Writes down for how long somebody sleeps, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Pass at once."""
        self.slept.append(seconds)


def questions() -> tuple[QuestionBudget, Slept]:
    clock = Slept()
    budget = QuestionBudget(clock)
    budget.known = lambda peer: peer == MEMBER
    return budget, clock


async def asks(budget: QuestionBudget, peer: PeerId, times: int, size: int = 0) -> int:
    """How many of so many questions are answered."""
    for number in range(times):
        try:
            await budget.admit(peer, size)
        except Busy:
            return number
    return times


async def test_stranger_asks_some_at_once_then_waits_then_is_refused() -> None:
    budget, clock = questions()
    assert await asks(budget, STRANGER, int(QUESTIONS_AT_ONCE)) == QUESTIONS_AT_ONCE
    assert clock.slept == []
    assert await asks(budget, STRANGER, 100) == QUESTIONS_S * LONGEST_WAIT_S
    assert max(clock.slept) <= LONGEST_WAIT_S
    clock.now += 1.0
    assert await asks(budget, STRANGER, 100) == QUESTIONS_S


async def test_member_asks_as_much_as_it_likes_beside_strangers_who_may_not() -> None:
    budget, clock = questions()
    strangers = [PeerId(f"stranger-{number}") for number in range(100)]
    answered = [await asks(budget, stranger, 20) for stranger in strangers]
    assert ALL_QUESTIONS_AT_ONCE <= sum(answered) < 20 * len(strangers)
    assert answered[-1] == 0
    clock.slept.clear()
    assert await asks(budget, MEMBER, 1000, size=1 << 20) == 1000
    assert clock.slept == []


async def test_what_strangers_are_told_counts() -> None:
    budget, _ = questions()
    assert await asks(budget, STRANGER, 1) == 1
    budget.answered(MEMBER, 1 << 30)
    assert await asks(budget, STRANGER, 1) == 1
    budget.answered(STRANGER, BYTES_A_FRAME * int(QUESTIONS_AT_ONCE + 2 * QUESTIONS_S))
    assert await asks(budget, STRANGER, 1) == 0
    assert await asks(budget, PeerId("another"), 1) == 1


async def test_large_questions_count_for_several() -> None:
    budget, _ = questions()
    assert await asks(budget, STRANGER, 100, size=9 * BYTES_A_FRAME) == (QUESTIONS_AT_ONCE + QUESTIONS_S) // 10


async def test_nobody_is_a_stranger_until_somebody_says_who_is() -> None:
    budget = QuestionBudget(FrozenClock())
    assert await asks(budget, STRANGER, 1000, size=1 << 20) == 1000


async def test_strangers_that_are_counted_are_few() -> None:
    budget, clock = questions()
    for number in range(MAX_ASKING + 10):
        clock.now += 1.0
        await budget.admit(PeerId(f"stranger-{number}"), 0)
    assert len(budget._each) == MAX_ASKING

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peers.preemption.http import BODY_BYTES, HEAD_BYTES, HttpResponse, MetadataServer
from peers.preemption.notice_options import MetadataUrl
from peers.preemption.notice_source import SourceFailed
from tests.harness.expect import eventually


class Raw:
    """A server that says what it is told, byte for byte."""

    def __init__(self, says: bytes, *, stays: bool = False) -> None:
        self._says, self._stays = says, stays
        self.heard: list[bytes] = []
        self.open = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            self.heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self._says)
            await writer.drain()
            if self._stays:
                await reader.read()
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def raw(says: bytes, *, stays: bool = False) -> AsyncIterator[Raw]:
    one = Raw(says, stays=stays)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
        await eventually(lambda: not one.open, what="all connections closed")
    finally:
        server.close()


async def ask(one: Raw, *, timeout_s: float = 60.0, method: str = "GET", prefix: str = "") -> HttpResponse:
    server = MetadataServer(MetadataUrl(host="127.0.0.1", port=one.port, prefix=prefix))
    return await server.ask("/a/b?c=d", {"X-Own": "1"}, timeout_s=timeout_s, method=method)


@pytest.mark.parametrize(
    ("says", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc and more", b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 200\r\ncontent-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", b"no"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES + b"x" * BODY_BYTES, b"x" * BODY_BYTES),
    ],
)
async def test_answer_of_every_framing_is_whole(says: bytes, body: bytes) -> None:
    async with raw(says) as one:
        assert (await ask(one)).body == body


async def test_question_has_its_headers_and_no_others_that_matter() -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as one:
        await ask(one, method="PUT", prefix="/base")
        lines = one.heard[0].decode().split("\r\n")
    assert lines[0] == "PUT /base/a/b?c=d HTTP/1.1"
    assert f"Host: 127.0.0.1:{one.port}" in lines
    assert {"X-Own: 1", "Content-Length: 0", "Connection: close"} < set(lines)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
async def test_question_goes_through_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    async with (
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nP") as proxy,
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nS") as one,
    ):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        assert (await ask(one)).body == b"S"
    assert proxy.heard == []


async def test_redirect_is_an_answer_and_not_followed() -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nX") as elsewhere:
        location = b"http://127.0.0.1:%d/" % elsewhere.port
        says = b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n"
        async with raw(says) as one:
            assert (await ask(one)).status == 302
    assert elsewhere.heard == []


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (b"", "no good HTTP"),
        (b"\x00\xff\x17garbage\r\n\r\n", "no status line"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no status line"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "no status line"),
        (b"HTTP/1.1 9999 OK\r\n\r\n", "no status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "no good HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "a body of -1 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n", "a body of"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999999\r\n\r\n", "are allowed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES + 1), "are allowed"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (BODY_BYTES + 1), "a body of more than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx", "transfer encoding 'gzip'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "a chunk without a size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffff\r\n", "a body of more than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcde\r\n", "a chunk without an end"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * HEAD_BYTES + b"\r\n\r\n", "no good HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "got more than 100 headers"),
    ],
)
async def test_bad_answer_is_a_failure_in_words(says: bytes, told: str) -> None:
    async with raw(says) as one:
        with pytest.raises(SourceFailed, match=told):
            await ask(one)
        assert one.heard


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"])
async def test_server_that_hangs_is_given_up(says: bytes) -> None:
    async with raw(says, stays=True) as one:
        with pytest.raises(SourceFailed, match=r"no answer from 127\.0\.0\.1:\d+ in 0.05 s"):
            await ask(one, timeout_s=0.05)
        assert one.heard


async def test_server_that_is_not_there_is_told() -> None:
    async with raw(b"") as one:
        port = one.port
        one.heard.append(b"")
    with pytest.raises(SourceFailed, match="connection refused"):
        await MetadataServer(MetadataUrl(host="127.0.0.1", port=port)).ask("/", {}, timeout_s=60)


async def test_cancelled_question_closes_its_connection() -> None:
    async with raw(b"", stays=True) as one:
        asking = asyncio.ensure_future(ask(one, timeout_s=60))
        await eventually(lambda: one.heard)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize(
    ("date", "now"), [(b"Mon, 19 Sep 2016 18:29:47 GMT", 1474309787.0), (b"yesterday", 7.0), (b"", 7.0), (b"0", 7.0)]
)
async def test_answer_tells_the_servers_time_where_it_is_said(date: bytes, now: float) -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nDate: " + date + b"\r\nContent-Length: 0\r\n\r\n") as one:
        assert (await ask(one)).now(7.0) == now

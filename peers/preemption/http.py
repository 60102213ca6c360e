"""Ask a metadata server one question over HTTP/1.1; all that comes back is bounded.

Not urllib or http.client: their time-outs are per read, so that a slow drip holds them for ever, a thread that waits in
them cannot be cancelled, and urllib obeys proxies of the environment. A link-local address must not go through one.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message as Headers
from email.utils import parsedate_to_datetime
from typing import TypeVar

from pydantic import ConfigDict, ValidationError

from peers.preemption.notice_options import MetadataUrl
from peers.preemption.notice_source import SourceFailed
from swarm.schema import Message

ANSWER_S = 2.0
"""A metadata server is on the same host: it answers in milliseconds, or something is wrong."""
HEAD_BYTES = 16 << 10
BODY_BYTES = 1 << 20
"""An Azure scale set tells of the events of all its machines."""
_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5]\d\d)(?: [^\r\n]*)?\r\n")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[^\r\n]*)?\r\n")
_END = b"\r\n\r\n"


class Foreign(Message):
    """A cloud's answer in JSON: strict in the fields that we need; the others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


ForeignT = TypeVar("ForeignT", bound=Foreign)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A whole answer. Redirects are answers like others: nobody follows them."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str:
        """The first header of this name in any case, stripped; empty when there is none."""
        return str(self.headers.get(name, "")).strip()

    def successful(self) -> HttpResponse:
        """The same answer. Raises SourceFailed when its status is not 200."""
        if self.status != 200:
            raise SourceFailed(f"status {self.status}")
        return self

    def decoded(self, model: type[ForeignT]) -> ForeignT:
        """The body as JSON. Raises SourceFailed when it is none, or not of the model's form."""
        try:
            return model.model_validate_json(self.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(key) for key in first["loc"]) or "all of it"
            raise SourceFailed(f"its answer has another form than expected: {where}: {first['msg']}") from None

    def now(self, otherwise: float) -> float:
        """The server's time when it answered, in seconds since the Unix epoch: what it says about times is meant by
        its clock, and this machine's may be wrong. ``otherwise`` when it does not say."""
        try:
            return parsedate_to_datetime(self.header("Date")).timestamp()
        except (ValueError, TypeError, OverflowError):
            return otherwise


class MetadataServer:
    """Asks one server; a connection per question, no proxy, no redirect."""

    def __init__(self, url: MetadataUrl) -> None:
        self._url = url

    async def ask(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float, method: str = "GET"
    ) -> HttpResponse:
        """The answer, whatever its status. ``path`` and ``headers`` are sent as they are.

        Raises SourceFailed when there is none that is whole, well-formed, of at most HEAD_BYTES and BODY_BYTES, within
        ``timeout_s`` seconds for everything. Cancelled, it closes the connection at once.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(method, path, headers)
        except TimeoutError:
            raise SourceFailed(f"no answer from {self._url.authority} in {timeout_s:g} s") from None
        except OSError as error:
            words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or "no connection"
            raise SourceFailed(f"{self._url.authority}: {words.lower()}") from None
        except (EOFError, ValueError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
            raise SourceFailed(f"{self._url.authority} answers no good HTTP: {error}") from None

    async def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> HttpResponse:
        reader, writer = await asyncio.open_connection(self._url.host, self._url.port, limit=HEAD_BYTES)
        try:
            lines = [f"{method} {self._url.prefix}{path} HTTP/1.1", f"Host: {self._url.authority}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            lines += ["Accept: */*", "Connection: close", *(["Content-Length: 0"] if method == "PUT" else [])]
            writer.write("\r\n".join(lines).encode("ascii") + _END)
            await writer.drain()
            return await _read_answer(reader)
        finally:
            writer.transport.abort()


async def _read_answer(reader: asyncio.StreamReader) -> HttpResponse:
    head = await reader.readuntil(_END)
    status = _STATUS.match(head)
    if status is None:
        raise ValueError("no status line")
    headers = http.client.parse_headers(io.BytesIO(head[status.end() :]))
    return HttpResponse(status=int(status[1]), headers=headers, body=await _read_body(reader, headers, int(status[1])))


async def _read_body(reader: asyncio.StreamReader, headers: Headers, status: int) -> bytes:
    if status in (204, 304):
        return b""
    coding, length = str(headers.get("Transfer-Encoding", "")).strip().lower(), headers.get("Content-Length")
    if coding == "chunked":
        return await _read_chunks(reader)
    if coding:
        raise ValueError(f"transfer encoding {coding[:40]!r}")
    if length is None:
        return await _read_to_end(reader)
    if not re.fullmatch(r"[0-9]{1,9}", str(length).strip()) or int(str(length)) > BODY_BYTES:
        raise ValueError(f"a body of {str(length)[:20]} bytes; {BODY_BYTES} are allowed")
    return await reader.readexactly(int(str(length)))


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while piece := await reader.read(HEAD_BYTES):
        body += piece
        if len(body) > BODY_BYTES:
            raise ValueError(f"a body of more than {BODY_BYTES} bytes")
    return bytes(body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        match = _SIZE.fullmatch(await reader.readuntil(b"\r\n"))
        if match is None:
            raise ValueError("a chunk without a size")
        size = int(match[1], 16)
        if len(body) + size > BODY_BYTES:
            raise ValueError(f"a body of more than {BODY_BYTES} bytes")
        if not size:
            return bytes(body)  # what follows are trailers, and the connection is closed
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk without an end")

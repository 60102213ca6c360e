"""Serves the page, the state, its stream and the metrics of one run over HTTP: :func:`serve`.

Starlette and uvicorn do HTTP; what is ours is what they leave open: no more than MAX_CONNECTIONS, each with one request
that must come within REQUEST_S, and a reader that takes nothing is cut off instead of kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from peers.dashboard.access import HEADERS, Access
from peers.dashboard.feed import StateFeed, TooManyViewers
from peers.dashboard.metrics import CONTENT_TYPE, exposition

MAX_CONNECTIONS = 512
REQUEST_S = 10.0
SLOW_S = 10.0
"""A viewer that takes nothing for so long is cut off, and so is who has not taken an answer."""
END_S = 1.0
"""How long answers under way may take when the server ends."""
MAX_REQUEST_BYTES = 16 * 1024

ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Connections:
    """The connections that are open, by the client's address and port, as ASGI names it."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self._most = most
        self._open: dict[Any, asyncio.Transport] = {}
        self._deadlines: dict[Any, asyncio.TimerHandle] = {}
        self.refused = 0

    def admit(self, client: Any, transport: asyncio.Transport) -> bool:
        """Take one more, unless there are too many."""
        if len(self._open) >= self._most:
            self.refused += 1
            return False
        self._open[client] = transport
        return True

    def within(self, client: Any, seconds: float) -> None:
        """Cut a connection off unless it is over in so many seconds; in the place of what was said before."""
        self.without_end(client)
        loop = asyncio.get_running_loop()
        self._deadlines[client] = loop.call_later(seconds, self.cut, client)

    def without_end(self, client: Any) -> None:
        """Let a connection stay."""
        if (deadline := self._deadlines.pop(client, None)) is not None:
            deadline.cancel()

    def closed(self, client: Any) -> None:
        """It is gone."""
        self.without_end(client)
        self._open.pop(client, None)

    def cut(self, client: Any) -> None:
        """End a connection at once, with whatever waits to be sent on it."""
        if (transport := self._open.get(client)) is not None:
            transport.abort()

    def cut_all(self) -> None:
        """End all."""
        for transport in list(self._open.values()):
            transport.abort()


def bounded_protocol(connections: Connections) -> type[H11Protocol]:
    """Return uvicorn's HTTP with a limit on connections, and one on the time that a request may take to come."""

    class BoundedHTTP(H11Protocol):
        """One connection."""

        admitted = asked = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """See asyncio.Protocol."""
            self.name = tuple(transport.get_extra_info("peername")[:2])  # of IPv6 there is more in it
            self.admitted = connections.admit(self.name, transport)
            if not self.admitted:
                transport.abort()
                return
            connections.within(self.name, REQUEST_S)
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            """See asyncio.Protocol."""
            super().data_received(data)
            if self.cycle is not None and not self.asked:
                self.asked = True
                connections.within(self.name, SLOW_S)

        def connection_lost(self, exc: Exception | None) -> None:
            """See asyncio.Protocol."""
            if not self.admitted:
                return
            connections.closed(self.name)
            super().connection_lost(exc)

    return BoundedHTTP


class Gate:
    """Asks :class:`~peers.dashboard.access.Access` before anything else, and puts its headers on every answer."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1").lower()
            headers[key] = f"{headers[key]}, {value.decode('latin-1')}" if key in headers else value.decode("latin-1")

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *ours]}
            await send(message)

        refused = self._access.refuse(scope["method"], scope["path"], headers)
        if refused is None:
            await self._app(scope, receive, guarded)
            return
        status, reason = refused
        more = {"www-authenticate": "Bearer"} if status == 401 else {"allow": "GET, HEAD"} if status == 405 else {}
        await PlainTextResponse(f"{reason}\n", status, more)(scope, receive, guarded)


def application(feed: StateFeed, access: Access, connections: Connections) -> Gate:
    """Return the ASGI application."""

    async def state(request: Request) -> Response:
        return Response(feed.made("state", _plain), media_type="application/json")

    async def metrics(request: Request) -> Response:
        made = feed.made("metrics", lambda state: exposition(state, feed.viewers))
        return Response(made, media_type=CONTENT_TYPE)

    routes = [Route(path, _asset(*asset), methods=["GET"]) for path, asset in ASSETS.items()]
    routes += [
        Route("/api/v1/state", state, methods=["GET"]),
        Route("/api/v1/events", Stream(feed, connections)),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return Gate(Starlette(routes=routes), access)


def _plain(state: Mapping[str, Any]) -> bytes:
    return json.dumps(state, separators=(",", ":"), allow_nan=False).encode()


def _asset(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("peers.dashboard") / "page" / name).read_bytes()

    async def give(request: Request) -> Response:
        return Response(content, headers={"content-type": kind})

    return give


class Stream:
    """The stream of server-sent events: an ASGI application of its own, since a viewer that does not read must be cut
    off and not waited for."""

    def __init__(self, feed: StateFeed, connections: Connections) -> None:
        self._feed, self._connections = feed, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["method"] == "HEAD":
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        try:
            viewer = self._feed.enter()
        except TooManyViewers:
            await PlainTextResponse("too many look already: try again later\n", 503)(scope, receive, send)
            return
        client = tuple(scope["client"])
        self._connections.without_end(client)
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: viewer.dropped.set())
        # One that does not read would keep what waits for it, and its connection, for ever.
        dropped = asyncio.create_task(viewer.dropped.wait())
        dropped.add_done_callback(lambda _: self._connections.cut(client))
        try:
            start = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": start})
            async for message in self._feed.messages(viewer):
                async with asyncio.timeout(SLOW_S):
                    await send({"type": "http.response.body", "body": message, "more_body": True})
        except TimeoutError:
            pass
        finally:
            gone.cancel()
            dropped.cancel()
            self._feed.leave(viewer)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Server(uvicorn.Server):
    """Leaves the process's signals alone: its owner handles them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


async def serve(feed: StateFeed, access: Access, listener: socket.socket) -> None:
    """Serve on a listening socket, and keep the feed up to date, until cancelled; then every stream ends at once."""
    connections = Connections()
    config = uvicorn.Config(
        application(feed, access, connections),
        http=bounded_protocol(connections),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    feeding = asyncio.create_task(feed.run())
    try:
        await asyncio.wait({serving, feeding}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, feeding):
            if task.done():
                task.result()
    finally:
        feeding.cancel()
        feed.close()
        server.should_exit = True
        connections.cut_all()
        await asyncio.wait({serving}, timeout=END_S)
        serving.cancel()
        await asyncio.gather(serving, feeding, return_exceptions=True)
        listener.close()

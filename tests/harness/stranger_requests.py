"""What a machine serves beside the services of a run, and who gets an answer there: every route of the dashboard, by
callers without the token or with it in the wrong place, and every command of a peer's control socket.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

FOREIGN = "evil.example"
PORT = "{port}"
"""In a header's value: where the dashboard listens."""


def attempts(token: str, other: str) -> Mapping[str, Mapping[str, str]]:
    """The headers by which strangers try to read, by what is wrong with them.

    Args:
        token: That of the dashboard.
        other: That of the dashboard of another home.
    """
    ours, bearer = f"127.0.0.1:{PORT}", f"Bearer {token}"
    return {
        "no token": {"host": ours},
        "an empty token": {"host": ours, "authorization": "Bearer "},
        "a wrong token": {"host": ours, "authorization": f"Bearer {token[:-1]}!"},
        "a longer token": {"host": ours, "authorization": f"{bearer}x"},
        "another home's token": {"host": ours, "authorization": f"Bearer {other}"},
        "the token as a password": {"host": ours, "authorization": f"Basic {token}"},
        "the token, no scheme": {"host": ours, "authorization": token},
        "the token in a cookie": {"host": ours, "cookie": f"token={token}; authorization={token}"},
        "the token in a header of another name": {"host": ours, "x-api-key": token, "proxy-authorization": bearer},
        "the token in the query": {"host": ours, "?": f"token={token}&access_token={token}"},
        "a foreign Host": {"host": FOREIGN, "authorization": bearer},
        "no Host": {"authorization": bearer},
        "a forwarded Host": {"host": FOREIGN, "x-forwarded-host": ours, "authorization": bearer},
        "a foreign Origin": {"host": ours, "origin": f"http://{FOREIGN}", "authorization": bearer},
        "Origin null": {"host": ours, "origin": "null", "authorization": bearer},
        "a page of another site": {"host": ours, "sec-fetch-site": "cross-site", "authorization": bearer},
    }


UNTOKENED = (
    "a foreign Host",
    "no Host",
    "a forwarded Host",
    "a foreign Origin",
    "Origin null",
    "a page of another site",
)
"""Those that a dashboard of this machine alone, which has no token, refuses: anyone who is on the machine may read
it."""


def spellings(path: str) -> tuple[str, ...]:
    """Return other ways to write a path that a server may take for the same."""
    encoded = f"{path[:-1]}%{ord(path[-1]):02x}"
    return path, encoded, f"{path}/", f"/{path}", f"/.{path}", path.upper(), f"http://{FOREIGN}{path}"


async def status_of(port: int, path: str, headers: Mapping[str, str], method: str = "GET") -> int:
    """Return the status of an answer: 0 where there is none. The answer is not read: a stream has no end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    query = f"?{headers['?']}" if "?" in headers else ""
    lines = [f"{name}: {value.replace(PORT, str(port))}" for name, value in headers.items() if name != "?"]
    try:
        writer.write("\r\n".join([f"{method} {path}{query} HTTP/1.1", *lines, "", ""]).encode())
        first = (await reader.readline()).split()
    except ConnectionResetError:
        return 0
    finally:
        writer.close()
    return int(first[1]) if len(first) > 1 else 0


async def _routes() -> list[tuple[str, str, bool, bool]]:
    from peers.dashboard.access import ROUTES
    from peers.dashboard.start import token_for
    from tests.harness.rigs.dashboard import served

    found: list[tuple[str, str, bool, bool]] = []
    with tempfile.TemporaryDirectory(prefix="tokens-") as homes, mock.patch.dict(os.environ):
        os.environ.pop("SWARM_DASHBOARD_TOKEN", None)
        token, other = (token_for("0.0.0.0", Path(homes) / name) or "" for name in ("ours", "another"))
    tried = attempts(token, other)
    for kept, host in ((token, "0.0.0.0"), (None, "127.0.0.1")):
        async with served(token=kept, host=host) as dashboard:
            for path, reason in ROUTES.items():
                for caller in tried if kept else UNTOKENED:
                    for written in spellings(path):
                        status = await status_of(dashboard.port, written, tried[caller])
                        found.append(
                            (f"{caller}{'' if kept else ', on this machine'}", path, status == 200, bool(reason))
                        )
    return found


async def _commands() -> list[tuple[str, str, bool, bool]]:
    """A caller who asks at the control socket and is another user, also where its permissions were opened."""
    from peers.control.answers import NodeCommands
    from peers.control.server import ControlServer

    asked: list[str] = []

    async def answer(request: Mapping[str, Any]) -> str:
        asked.append(request["command"])
        return "well"

    none = cast(Any, None)
    names = NodeCommands(none, "peer", 0.0, lambda why: why).table()
    with tempfile.TemporaryDirectory(prefix="control-") as home:
        server = ControlServer(Path(home) / "control.sock", dict.fromkeys(names, answer))
        await server.start()
        try:
            with mock.patch("peers.control.server.peer_user", return_value=os.geteuid() + 1):
                for name in names:
                    reader, writer = await asyncio.open_unix_connection(server.path)
                    writer.write(f'{{"command": "{name}"}}\n'.encode())
                    try:
                        said = await reader.read()
                    except ConnectionResetError:
                        said = b""
                    asked += [name] if said else []
                    writer.close()
        finally:
            await server.close()
    return [("another user", f"control socket: {name}", name in asked, False) for name in names]


def tried_routes() -> list[tuple[str, str, bool, bool]]:
    """(caller, route, whether it was answered, whether the table lets everybody) for each way to write each route, and
    for each command of the control socket."""
    return [*asyncio.run(_routes()), *asyncio.run(_commands())]

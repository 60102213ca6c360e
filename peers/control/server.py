"""The control socket of a running peer: what ``swarm status``, ``peers``, ``drain`` and ``invite`` ask.

A Unix socket that only its user can open. One line of JSON in, one out, and the connection is closed; the form is in
``peers.control.client``. Nobody who connects can hold up the peer: sizes, durations and connections are bounded. What
was asked by somebody who is gone is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from peers.console.words import CommandError, reason_of, with_commands
from peers.control.client import MAX_REQUEST_BYTES, PATIENCE_S, peer_user, short_path
from peers.exit_codes import EXIT_ERROR, EXIT_USAGE, exit_code_of
from swarm.errors import ConfigError, RunEnded, SwarmError
from swarm.parsing import parse_json

logger = logging.getLogger(__name__)

Command = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Gets the request and gives what JSON can say: plain data, or our dataclasses. Raises SwarmError to say no."""

MAX_CONNECTIONS = 32
REQUEST_S = COMMAND_S = FETCH_S = 2 * PATIENCE_S
"""How long a client may take to send its request, a command to answer, and the client to fetch that. Anyone who uses
``ask`` has given up after half of it."""


class ControlServer:
    """Serves commands by name on a Unix socket. Construction does no I/O."""

    def __init__(self, path: Path, commands: Mapping[str, Command]) -> None:
        self.path = path
        self._commands = dict(commands)
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Make the socket (0600) and serve. What a killed process left under its name is replaced, so the directory
        must be the caller's own (a place that it has locked). Raises ConfigError when there can be no socket."""
        try:
            listener = self._listen()
        except OSError as error:
            raise ConfigError("control", str(self.path), "a path in a directory of this user",
                              "Choose another.", why=str(error.strerror)) from error  # fmt: skip
        self._server = await asyncio.start_unix_server(self._talk, sock=listener, limit=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        """Stop serving, cut off who is being served, remove the socket. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        await server.wait_closed()
        self.path.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self.path) as short:
                listener.bind(short)
            os.chmod(self.path, 0o600)  # before it listens: until then nobody can connect
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its request to its end; never raises."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - we are one
        self._talks.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError):
                if peer_user(writer.get_extra_info("socket")) in (os.geteuid(), 0):  # else it hangs up
                    await self._serve(reader, writer)
        finally:
            # Not close(): with a client that reads nothing it would keep the answer, and the descriptor, for ever.
            writer.transport.abort()
            self._talks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_S):
            try:
                line = await reader.readline()
            except ValueError:
                line = b""
                answer = _no(f"a request has {MAX_REQUEST_BYTES} bytes at most")
            else:
                answer = b""
        # A peer that was stopped, or busy, finds what was asked meanwhile when it goes on. Who asked has been told that
        # it does not answer: nothing is to be done in his name a minute later.
        if line.endswith(b"\n") and not _gone(writer.get_extra_info("socket")):
            answer = await self._answer(line)
        if answer:
            async with asyncio.timeout(FETCH_S):
                writer.transport.set_write_buffer_limits(0)  # drain() then waits until all of it is with the kernel
                writer.write(answer)
                await writer.drain()

    async def _answer(self, line: bytes) -> bytes:
        if len(self._talks) > MAX_CONNECTIONS:
            return _no(f"more than {MAX_CONNECTIONS} commands are being answered", next_="repeat the command later")
        try:
            request = parse_json(line)
            command = self._commands.get(request["command"])
        except (ValueError, KeyError, TypeError):
            return _no('a request is one line such as {"command": "status"}')
        if command is None:
            known = ", ".join(sorted(self._commands))
            return _no(f"this peer knows no command {request['command']!r}; it knows {known}", exit_code=EXIT_USAGE)
        return await _carry_out(command, request)


def _gone(link: socket.socket) -> bool:
    """Return whether the other end is closed, and not merely done with writing."""
    poller = select.poll()
    poller.register(link.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


async def _carry_out(command: Command, request: Mapping[str, Any]) -> bytes:
    """The line to send back, whatever the command does."""
    name = request["command"]
    try:
        async with asyncio.timeout(COMMAND_S):
            result = await command(request)
        return _line({"ok": True, "result": result})
    except TimeoutError:
        return _no(f"{name} was not done in {COMMAND_S:g} s", check="is the machine busy?", next_="repeat the command")
    except CommandError as error:
        return _no(error.cause, check=error.check, next_=error.next, exit_code=error.exit_code)
    except RunEnded as error:
        check, next_ = with_commands(error.check), with_commands(error.remedy)
        return _no(with_commands(error.reason), check=check, next_=next_, exit_code=exit_code_of(error))
    except SwarmError as error:
        return _no(reason_of(error), exit_code=exit_code_of(error))
    except Exception as error:  # the border of the peer: a bug in a command must not cost the peer its work
        logger.exception("the command %s failed", name)
        return _no(f"{name} failed: {type(error).__name__}: {error}", check="the peer's log has the details")


def _no(error: str, *, check: str = "", next_: str = "", exit_code: int = EXIT_ERROR) -> bytes:
    return _line({"ok": False, "error": error, "check": check, "next": next_, "exit_code": exit_code})


def _line(reply: Mapping[str, Any]) -> bytes:
    return json.dumps(reply, default=_plain, allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"a command gave {type(value).__name__}, which JSON cannot say")

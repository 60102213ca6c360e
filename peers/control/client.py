"""Asking a running peer something over its control socket: one line of JSON there, one back. Standard library only.

``{"command": "status"}`` is answered by ``{"ok": true, "result": …}`` or by
``{"ok": false, "error": …, "check": …, "next": …, "exit_code": n}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.console.words import CommandError
from peers.exit_codes import EXIT_ERROR, EXIT_INCOMPATIBLE, EXIT_UNREACHABLE
from swarm.parsing import parse_json

PATIENCE_S = 2.0
"""How long a peer may take to answer. Both ends are on one machine and a command computes nothing: who is later than
this has stopped."""
MAX_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 16 * 1024 * 1024

_PIECE_BYTES = 256 * 1024


class NotServing(CommandError):
    """Nobody listens on the socket: the peer is starting or ending, or it is gone."""


def ask(control: Path, command: str, *, who: str, timeout_s: float = PATIENCE_S, **arguments: object) -> Any:
    """The result of a command; blocks for ``timeout_s`` at most, whatever the peer does. ``who`` names it in errors.

    Raises NotServing when nobody listens, and CommandError when the peer is silent (exit code 3), answers what this
    version cannot read (4), or says no: then with its own words and exit code.
    """
    request = json.dumps({"command": command, **arguments}).encode() + b"\n"
    end = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            with short_path(control) as path:
                link.connect(path)
            if (other := peer_user(link)) not in (os.geteuid(), 0):
                raise CommandError(f"a process of another user (uid {other}) answers in place of {who}",
                                check=str(control), exit_code=EXIT_UNREACHABLE)  # fmt: skip
            link.sendall(request)
            line = _read_line(link, end)
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotServing(f"{who} does not listen", check="it is starting or ending: repeat the command",
                         exit_code=EXIT_UNREACHABLE) from None  # fmt: skip
    except (TimeoutError, BlockingIOError):  # the second: so many wait already that the kernel takes no more
        raise CommandError(f"{who} does not answer", check=f"no answer in {timeout_s:g} s: is it stopped, or is the "
                        "machine busy? Its last lines are in events.jsonl of its session",
                        next_="repeat the command once it goes on: this request is dropped",
                        exit_code=EXIT_UNREACHABLE) from None  # fmt: skip
    except OSError as error:
        raise CommandError(f"{who} cannot be asked: {error.strerror or error}", check=str(control),
                        exit_code=EXIT_UNREACHABLE) from error  # fmt: skip
    return _result(line, who)


def peer_user(link: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, as the kernel says it."""
    _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for a socket's path, valid inside the ``with`` only, that is never too long: a Unix socket's has 107 bytes
    at most, a home directory's may have more. Raises FileNotFoundError when the directory is not there."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _read_line(link: socket.socket, end: float) -> bytes:
    """Raises TimeoutError; what came is returned when the peer hangs up or sends too much."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= MAX_REPLY_BYTES:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link.settimeout(left)
        piece = link.recv(_PIECE_BYTES)
        if not piece:
            break
        line += piece
    return bytes(line)


def _result(line: bytes, who: str) -> Any:
    if not line:
        raise NotServing(f"{who} hung up without an answer", check="it is ending: repeat the command",
                         exit_code=EXIT_UNREACHABLE)  # fmt: skip
    try:
        reply = parse_json(line)
        if reply["ok"] is True:
            return reply["result"]
        refused = CommandError(str(reply["error"]), check=str(reply.get("check", "")), next_=str(reply.get("next", "")),
                            exit_code=int(reply.get("exit_code", EXIT_ERROR)))  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(f"{who} sent an answer that this version of swarm cannot read",
                        check="was the peer started with another version?",
                        exit_code=EXIT_INCOMPATIBLE) from None  # fmt: skip
    raise refused

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from peers.commands.look import standing_from
from peers.console.words import CommandError
from peers.control import server as control_module
from peers.control.client import MAX_REQUEST_BYTES, NotServing, ask, short_path
from peers.control.server import MAX_CONNECTIONS, ControlServer
from peers.control.status import StatusReport
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_UNREACHABLE, EXIT_USAGE, exit_code_of
from swarm.errors import ConfigError, Ending, RunEnded
from tests.harness.expect import eventually
from tests.harness.standing_peer import members, standing

WHO = "brave-otter (pid 7)"


class Commands:
    """What the tests ask for."""

    def __init__(self) -> None:
        self.held = asyncio.Event()

    async def status(self, request: Mapping[str, Any]) -> object:
        return standing("brave-otter")

    async def peers(self, request: Mapping[str, Any]) -> object:
        return members("brave-otter", request.get("count", 3))

    async def echo(self, request: Mapping[str, Any]) -> object:
        return dict(request)

    async def hold(self, request: Mapping[str, Any]) -> object:
        return await self.held.wait()

    async def usage(self, request: Mapping[str, Any]) -> object:
        raise ConfigError("grace", 7, "less", "Give less.")

    async def complain(self, request: Mapping[str, Any]) -> object:
        raise CommandError("no run yet", check="the bootstrap", next_="the same again", exit_code=4)

    async def over(self, request: Mapping[str, Any]) -> object:
        raise RunEnded("it is over", Ending.UNREACHABLE, check="its log", remedy="start it again")

    async def bug(self, request: Mapping[str, Any]) -> object:
        raise ZeroDivisionError("oops")

    async def unsayable(self, request: Mapping[str, Any]) -> object:
        return object()

    async def infinite(self, request: Mapping[str, Any]) -> object:
        return float("inf")

    def table(self) -> dict[str, Any]:
        names = [name for name in vars(Commands) if not name.startswith("_") and name != "table"]
        return {name: getattr(self, name) for name in names}


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest_asyncio.fixture
async def server(home: Path, commands: Commands) -> AsyncIterator[ControlServer]:
    server = ControlServer(home / "control.sock", commands.table())
    await server.start()
    yield server
    await server.close()


async def _ask(server: ControlServer, command: str, **arguments: Any) -> Any:
    return await asyncio.to_thread(ask, server.path, command, who=WHO, **arguments)


async def _raw(server: ControlServer, line: bytes) -> dict[str, Any]:
    with short_path(server.path) as path:
        reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(answer)


async def test_control_socket_is_its_users_alone_and_goes_away(server: ControlServer) -> None:
    assert server.path.stat().st_mode & 0o777 == 0o600
    await server.close()
    await server.close()
    assert not server.path.exists()
    with pytest.raises(NotServing):
        await _ask(server, "status")


async def test_control_with_a_path_too_long_for_a_socket_serves(home: Path, commands: Commands) -> None:
    deep = home / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    server = ControlServer(deep / "control.sock", commands.table())
    await server.start()
    assert await _ask(server, "echo") == {"command": "echo"}
    await server.close()
    assert list(deep.iterdir()) == []


async def test_control_where_there_can_be_no_socket_says_so(home: Path) -> None:
    with pytest.raises(ConfigError, match="control"):
        await ControlServer(home / "nowhere" / "control.sock", {}).start()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\n", "one line such as"),
        (b"status\n", "one line such as"),
        (b"[]\n", "one line such as"),
        (b'{"command": ["status"]}\n', "one line such as"),
        (b"[" * 9999 + b"\n", "one line such as"),
        (b"\xff\n", "one line such as"),
        (b'{"command": "stauts"}\n', "knows no command 'stauts'; it knows bug"),
        (b'{"command": null}\n', "knows no command None"),
        (b"x" * (MAX_REQUEST_BYTES + 2), f"{MAX_REQUEST_BYTES} bytes at most"),
    ],
)
async def test_control_request_that_is_none_is_answered(server: ControlServer, line: bytes, told: str) -> None:
    answer = await _raw(server, line)
    assert answer["ok"] is False
    assert told in answer["error"]
    assert await _ask(server, "echo") == {"command": "echo"}


@pytest.mark.parametrize(
    ("command", "told", "check", "next_", "code"),
    [
        ("usage", "grace = 7", "", "", EXIT_USAGE),
        ("complain", "no run yet", "the bootstrap", "the same again", 4),
        ("over", "it is over", "its log", "start it again", 3),
        ("bug", "bug failed: ZeroDivisionError: oops", "the peer's log has the details", "", 1),
        ("unsayable", "which JSON cannot say", "the peer's log has the details", "", 1),
        ("infinite", "infinite failed: ValueError", "the peer's log has the details", "", 1),
        ("nonsense", "knows no command 'nonsense'", "", "", EXIT_USAGE),
    ],
)
async def test_control_no_arrives_with_its_words_and_code(
    server: ControlServer, command: str, told: str, check: str, next_: str, code: int
) -> None:
    with pytest.raises(CommandError) as caught:
        await _ask(server, command)
    assert told in caught.value.cause
    assert (caught.value.check, caught.value.next, exit_code_of(caught.value)) == (check, next_, code)


async def test_control_client_that_says_nothing_stalls_nobody_and_is_cut_off(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with short_path(server.path) as path:
        reader, writer = await asyncio.open_unix_connection(path)
    assert await _ask(server, "echo") == {"command": "echo"}
    monkeypatch.setattr(control_module, "REQUEST_S", 0.01)
    with short_path(server.path) as path:
        impatient, other = await asyncio.open_unix_connection(path)
    assert await impatient.read() == b""
    await server.close()  # the first is cut off with the server
    assert await reader.read() == b""
    for one in (writer, other):
        one.close()
        await one.wait_closed()


async def test_control_client_that_reads_nothing_is_cut_off(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "FETCH_S", 0.05)
    with socket.socket(socket.AF_UNIX) as link:
        with short_path(server.path) as path:
            link.connect(path)
        link.sendall(b'{"command": "peers", "count": 9000}\n')
        await eventually(lambda: server._talks, what="the connection to be served")
        await eventually(lambda: not server._talks, what="the connection to be given up")


async def test_control_command_that_hangs_is_given_up(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "COMMAND_S", 0.01)
    with pytest.raises(CommandError, match="hold was not done"):
        await _ask(server, "hold")


async def test_control_with_too_many_at_once_answers_busy(server: ControlServer, commands: Commands) -> None:
    waiting = [asyncio.create_task(_raw(server, b'{"command": "hold"}\n')) for _ in range(MAX_CONNECTIONS)]
    await eventually(lambda: len(server._talks) == MAX_CONNECTIONS, what="all to be served")
    with pytest.raises(CommandError, match="being answered"):
        await _ask(server, "echo")
    commands.held.set()
    assert {answer["ok"] for answer in await asyncio.gather(*waiting)} == {True}
    assert await _ask(server, "echo") == {"command": "echo"}


def test_ask_of_a_silent_peer_ends_in_time_and_names_it(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "control.sock"))
        listener.listen(1)
        with pytest.raises(CommandError, match=r"brave-otter \(pid 7\) does not answer") as caught:
            ask(home / "control.sock", "status", who=WHO, timeout_s=0.02)
        assert exit_code_of(caught.value) == EXIT_UNREACHABLE
        # And so does the next, when nobody takes what waits in the queue.
        for _ in range(3):
            with pytest.raises(CommandError, match="does not answer"):
                ask(home / "control.sock", "status", who=WHO, timeout_s=0.02)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"", EXIT_UNREACHABLE),
        (b"hello\n", EXIT_INCOMPATIBLE),
        (b'{"ok": true', EXIT_INCOMPATIBLE),
        (b"[]\n", EXIT_INCOMPATIBLE),
        (b'{"ok": true}\n', EXIT_INCOMPATIBLE),
        (b'{"ok": false}\n', EXIT_INCOMPATIBLE),
        (b'{"ok": false, "error": "no", "exit_code": "x"}\n', EXIT_INCOMPATIBLE),
        (b'{"ok": false, "error": "no"}\n', 1),
    ],
)
async def test_ask_of_a_peer_that_answers_strangely_complains(home: Path, reply: bytes, code: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(reply)
        writer.close()

    server = await asyncio.start_unix_server(answer, path=str(home / "control.sock"))
    with pytest.raises(CommandError) as caught:
        await asyncio.to_thread(ask, home / "control.sock", "status", who=WHO)
    assert exit_code_of(caught.value) == code
    server.close()
    await server.wait_closed()
    (home / "control.sock").unlink(missing_ok=True)


@pytest.mark.parametrize("answer", [None, [], "status", {}, {"schema": 1, "name": "a"}])
def test_standing_from_another_version_complains(answer: object) -> None:
    with pytest.raises(CommandError) as caught:
        standing_from(StatusReport, answer, WHO)
    assert exit_code_of(caught.value) == EXIT_INCOMPATIBLE


class Told(Commands):
    """What was carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    async def echo(self, request: Mapping[str, Any]) -> object:
        self.told.append(request["who"])
        return request["who"]


async def _left_behind(path: Path, line: bytes, *, half: bool) -> bytes:
    """Send a request while the peer's loop stands still; then hang up, or only end the writing and read the answer."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as short:
        link.connect(short)
    link.sendall(line)
    if not half:
        link.close()
        return b""
    link.shutdown(socket.SHUT_WR)
    link.setblocking(False)
    answer = await asyncio.get_running_loop().sock_recv(link, 1 << 16)
    link.close()
    return answer


async def test_request_whose_asker_is_gone_is_dropped_when_the_peer_goes_on(home: Path) -> None:
    commands = Told()
    server = ControlServer(home / "control.sock", commands.table())
    await server.start()
    try:
        # Nothing is awaited between the call and the hanging up: the server sees both at once, as after a SIGCONT.
        assert await _left_behind(server.path, b'{"command": "echo", "who": "gone"}\n', half=False) == b""
        answer = await _left_behind(server.path, b'{"command": "echo", "who": "listens"}\n', half=True)
        assert json.loads(answer)["result"] == "listens"
        await eventually(lambda: not server._talks, what="both have been served")
        assert commands.told == ["listens"]
    finally:
        await server.close()

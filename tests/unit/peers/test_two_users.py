"""What two users of one machine can do to each other's peers. Needs root, to be both of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.cli.app import run
from peers.console.words import CommandError
from peers.control.client import ask
from peers.control.server import ControlServer
from peers.home.places import KEY_FILE, LOCK_FILE, list_places, take_place
from swarm.clock import SystemClock
from swarm.errors import ConfigError

MINE, OTHER = 61_001, 61_002

pytestmark = pytest.mark.root


def as_user(uid: int, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, as JSON can say it, in a child of that user; what it raises is raised here as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = json.dumps({"result": work()})
        except BaseException:  # noqa: BLE001 - the border of a process
            answer = json.dumps({"error": traceback.format_exc()[-2000:]})
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "error" in found:
        raise AssertionError(found["error"])
    return found["result"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home of MINE, reachable by all."""
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and str(above).startswith("/tmp/") and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o011)
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    os.chown(home, MINE, MINE)
    return home


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except (ConfigError, CommandError) as error:
        return f"{error}"
    return "nothing was refused"


def test_place_of_another_user_is_shown_and_passed_over(home: Path) -> None:
    foreign = home / "1"
    foreign.mkdir(mode=0o700)
    (foreign / LOCK_FILE).touch()

    def look() -> list[Any]:
        with take_place(home, clock=SystemClock()) as place:
            taken = place.name
        return [taken, [(one.name, one.owner, one.live) for one in list_places(home)]]

    assert as_user(MINE, look) == ["2", [["1", "root", False], ["2", "", False]]]
    named = as_user(MINE, lambda: refused(lambda: take_place(home, "1", clock=SystemClock())))
    assert "it belongs to root" in named
    assert as_user(MINE, lambda: run(["status", "--home", str(home)])) == 3, "nobody runs, and nothing broke"


def test_home_of_another_user_is_refused(home: Path) -> None:
    home.chmod(0o777)
    said = as_user(OTHER, lambda: refused(lambda: take_place(home, clock=SystemClock())))
    assert f"it belongs to user {MINE}, who could take this peer's key" in said
    assert not list(home.iterdir()), "nothing was made there"


def test_place_that_is_a_link_gets_no_key(home: Path) -> None:
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir()
    (home / "1").symlink_to(elsewhere)
    said = as_user(MINE, lambda: refused(lambda: take_place(home, "1", clock=SystemClock())))
    assert "is a link" in said
    assert not (elsewhere / KEY_FILE).exists()
    assert not list(elsewhere.iterdir())


def test_home_of_root_is_used_as_volumes_of_containers_are(home: Path) -> None:
    os.chown(home, 0, MINE)
    home.chmod(0o2775)
    as_user(MINE, lambda: take_place(home, clock=SystemClock()).close())
    assert (home / "1").stat().st_mode & 0o777 == 0o700
    assert home.stat().st_mode & 0o7777 == 0o2775, "what was there is not changed"


async def test_control_socket_hears_its_own_user_alone(home: Path) -> None:
    """Also where the permissions of the socket were opened."""
    asked: list[str] = []

    async def status(request: Any) -> str:
        asked.append(request["command"])
        return "well"

    path = home / "control.sock"
    server = ControlServer(path, {"status": status})
    await server.start()
    path.chmod(0o777)
    try:
        said = await asyncio.to_thread(as_user, OTHER, lambda: refused(lambda: ask(path, "status", who="it")))
        assert "it hung up" in said or "it cannot be asked" in said  # before or after it had said all
        assert asked == []
        assert await asyncio.to_thread(ask, path, "status", who="it") == "well"
    finally:
        await server.close()


def test_command_does_not_believe_a_socket_of_another_user(home: Path) -> None:
    path = home / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        os.seteuid(OTHER)
        listener.listen()  # whose socket it is is who listens
        os.seteuid(0)
        said = as_user(MINE, lambda: refused(lambda: ask(path, "status", who="it", timeout_s=0.2)))
    assert f"a process of another user (uid {OTHER}) answers in place of it" in said

"""Who reads which route: the table of the dashboard's routes, and all that strangers try."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import pytest

from peers.dashboard.access import MIN_TOKEN_CHARS, ROUTES, Access
from peers.dashboard.place import TOKEN_VARIABLE
from peers.dashboard.server import ASSETS, Connections, application
from peers.dashboard.start import token_for
from swarm.errors import ConfigError
from tests.harness.rigs.dashboard import served
from tests.harness.sources import PACKAGES, ROOT
from tests.harness.stranger_requests import UNTOKENED, attempts, status_of, tried_routes

TOKEN = "right-token-of-the-run"


def test_every_route_that_is_served_is_in_the_table() -> None:
    gate = application(cast(Any, None), Access(host="127.0.0.1"), Connections())
    assert {route.path for route in cast(Any, gate)._app.routes} == set(ROUTES)


SERVERS = {
    "peers.dashboard.server": "its routes are asked here",
    "peers.control.server": "its commands are asked here",
    "swarm.network.libp2p.attach": "a socket in a directory of its user alone: the daemon's way to us",
    "swarm.sim.proxy": "of the simulator: carries bytes between peers of a test, on loopback",
}
"""What listens for others, beside the daemon, and why it needs no row of its own."""


def test_whatever_listens_is_tried_or_has_a_reason() -> None:
    begins = {"start_server", "start_unix_server", "create_server", "create_unix_server", "HTTPServer", "TCPServer"}
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in (*begins, "uvicorn")):
            continue
        tree = ast.parse(text)
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        begun = {getattr(called, "attr", getattr(called, "id", "")) for called in calls} & begins
        imported = any(isinstance(node, ast.Import) and node.names[0].name == "uvicorn" for node in tree.body)
        if begun or imported:
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert found == set(SERVERS)


def test_what_needs_no_token_is_the_page_and_nothing_else() -> None:
    assert {path for path, reason in ROUTES.items() if reason} == set(ASSETS)


def test_route_that_is_not_in_the_table_needs_the_token() -> None:
    access = Access(host="127.0.0.1", token=TOKEN)
    for path in ("/new", "/api/v2/state", "/metrics/", "//", "/app.js/../metrics"):
        refused = access.refuse("GET", path, {"host": "127.0.0.1"})
        assert refused is not None, path
        assert refused[0] == 401


def test_no_route_and_no_command_answers_a_stranger() -> None:
    tried = tried_routes()
    assert [row for row in tried if row[2] and not row[3]] == []
    assert {route for _, route, _, _ in tried} > set(ROUTES)
    assert {route for _, route, answered, _ in tried if answered} == set(ASSETS), "and they were there to be asked"


async def test_every_route_answers_who_has_the_token() -> None:
    headers = {"host": "127.0.0.1:{port}", "authorization": f"Bearer {TOKEN}"}
    async with served(token=TOKEN) as dashboard:
        for path in ROUTES:
            assert await status_of(dashboard.port, path, headers) == 200, path
            assert await status_of(dashboard.port, path, headers | {"sec-fetch-site": "same-origin"}) == 200, path
    assert set(UNTOKENED) < set(attempts(TOKEN, TOKEN))


@pytest.mark.parametrize("given", ["short", "x" * (MIN_TOKEN_CHARS - 1), "x" * 257, "\N{SNOWMAN}" * 20])
def test_token_that_is_guessed_or_never_fits_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, given)
    with pytest.raises(ConfigError, match="16 to 256 characters") as refused:
        token_for("0.0.0.0", tmp_path)
    assert given not in str(refused.value)

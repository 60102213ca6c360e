"""The dashboard as it is served, to viewers that mean well and to others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from peers.dashboard import server as serving
from peers.dashboard.access import HEADERS, Access
from peers.dashboard.feed import MAX_BEHIND, StateFeed, Viewer, patch
from peers.dashboard.metrics import exposition
from peers.dashboard.overview import Overview
from peers.dashboard.place import TOKEN_VARIABLE, listening_place
from peers.dashboard.server import ASSETS
from peers.dashboard.start import TOKEN_FILE, DashboardOptions, DashboardPlace, own_address, token_for
from swarm.errors import ConfigError
from tests.harness.rigs.clocks import HandClock, turns
from tests.harness.rigs.dashboard import ScriptedSource, message, served
from tests.harness.rigs.peers import PEERS, eventful

MARKUP = "<img src=x onerror=alert(1)>"


async def until(true: Any, what: str) -> None:
    """Let the loop go on until something is the case."""
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"it did not come to be: {what}")


# --- viewers that mean well ------------------------------------------------------------------------------------------


async def test_page_state_and_metrics_are_served_with_every_guard() -> None:
    async with served() as dashboard:
        for path in (*ASSETS, "/api/v1/state", "/metrics", "/nothing"):
            status, headers, body = await dashboard.ask(path)
            assert status == (404 if path == "/nothing" else 200), path
            assert {name: headers[name] for name in HEADERS} == HEADERS
            assert body
        assert b"<script>" not in (await dashboard.ask("/"))[2], "the policy lets no inline script run"
        status, _, body = await dashboard.ask("/", method="HEAD")
        assert (status, body) == (200, b"")
        state = json.loads((await dashboard.ask("/api/v1/state"))[2])
        assert state["schema"] == 1
        assert "swarm_step" in (await dashboard.ask("/metrics"))[2].decode()


def test_patch_has_what_is_new_and_says_who_is_gone() -> None:
    overview = Overview({"kind": "peer", "label": "a test"})
    states = []
    for number, line in enumerate(eventful().lines):
        overview.record(line.record, float(number))
        states.append(overview.document(0.0))
    assert patch(states[3], states[3]) == {"set": {}}
    found = patch(states[2], states[3])
    assert found["peers"][PEERS["mole"]]["state"] == "lost"
    assert [row[0] for row in found["steps"]] == [3]
    assert [entry["what"] for entry in found["churn"]] == ["lost"]
    assert patch(states[3], states[2])["all_steps"] == states[2]["steps"]
    assert patch({**states[3], "peers": {"x": {}}}, states[3])["peers"]["x"] is None


def test_metrics_tell_the_run_its_peers_and_parts() -> None:
    overview = Overview({"kind": "peer", "label": "a test"})
    for number, line in enumerate(eventful().lines):
        overview.record(line.record, float(number))
    text = exposition(overview.document(0.0), 4).decode()
    peer = f'peer="{PEERS["otter"]}"'
    assert "\nswarm_step 6.0\n" in text
    assert "\nswarm_tokens_total 126.0\n" in text
    assert "\nswarm_dashboard_viewers 4.0\n" in text
    assert f'swarm_peer_committed_microbatches_total{{name="otter",part="stage-0",{peer}}} 12.0' in text
    assert 'swarm_part_live_replicas{part="stage-0"} 2.0' in text
    assert 'swarm_peers{state="lost"} 1.0' in text
    assert "\nswarm_fresh 1.0\n" in text


# --- viewers that do not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("127.0.0.1:7300", True), ("localhost:7300", True), ("[::1]:7300", True), ("127.0.0.1", True),
        ("evil.example:7300", False), ("127.0.0.1.evil.example", False), ("", False), ("10.0.0.1:7300", False),
        ("127.0.0.1, evil.example", False), ("localhost.", False),
    ],
)  # fmt: skip
def test_host_header_must_name_this_machine(host: str, fits: bool) -> None:
    refused = Access(host="127.0.0.1").refuse("GET", "/api/v1/state", {"host": host})
    assert (refused is None) == fits
    assert fits or refused is not None and refused[0] == 421


def test_other_machines_ask_by_address_or_by_a_name_that_was_given() -> None:
    access = Access(host="0.0.0.0", token="t" * 20, names=("lab.example",))
    headers = {"authorization": f"Bearer {'t' * 20}"}
    for host in ("10.1.2.3:7300", "[2001:db8::1]:7300", "lab.example:7300", "localhost"):
        assert access.refuse("GET", "/metrics", {"host": host, **headers}) is None
    assert access.refuse("GET", "/metrics", {"host": "other.example:7300", **headers}) is not None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_served(method: str) -> None:
    refused = Access(host="127.0.0.1").refuse(method, "/api/v1/state", {"host": "127.0.0.1"})
    assert refused is not None
    assert refused[0] == 405


async def test_other_host_foreign_origin_and_wrong_token_read_nothing() -> None:
    token = "right-token-of-the-run"
    async with served(token=token) as dashboard:
        bearer = f"Bearer {token}"
        own = f"http://127.0.0.1:{dashboard.port}"
        refusals = [
            (421, {"host": "evil.example", "authorization": bearer}),
            (403, {"origin": "https://evil.example", "authorization": bearer}),
            (403, {"origin": "null", "authorization": bearer}),
            (401, {}),
            (401, {"authorization": "Bearer wrong"}),
            (401, {"authorization": f"Basic {token}"}),
            (401, {"authorization": f"Bearer {token}x"}),
            (401, {"authorization": "Bearer " + "x" * 5000}),
        ]
        for status, headers in refusals:
            for path in ("/api/v1/state", "/api/v1/events", "/metrics"):
                answer = await dashboard.ask(path, **headers)
                assert answer[0] == status, (path, headers)
                assert b"schema" not in answer[2]
                assert token.encode() not in answer[2]
                assert answer[1]["content-security-policy"]
        assert (await dashboard.ask("/api/v1/state", authorization=bearer, origin=own))[0] == 200
        assert (await dashboard.ask("/"))[0] == 200, "the page itself tells nothing, and asks for the token"
        assert dashboard.feed.viewers == 0


async def test_names_with_markup_come_as_text() -> None:
    line = eventful().lines[0].record
    members = [one.model_copy(update={"name": f"{MARKUP}{n}"}) for n, one in enumerate(line.roster)]
    overview = Overview({"kind": "peer", "label": "a test"})
    overview.record(line.model_copy(update={"roster": tuple(members)}), 1.0)
    state = overview.document(1.0)
    assert {one["name"] for one in state["peers"].values()} == {f"{MARKUP}{n}" for n in range(len(members))}
    assert 'name="<img src=x onerror=alert(1)>0"' in exposition(state, 0).decode()
    async with served() as dashboard:
        kind = (await dashboard.ask("/api/v1/state"))[1]["content-type"]
        assert kind == "application/json", "with nosniff no browser takes it for a page"


async def test_of_a_thousand_connections_most_are_refused_and_viewers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 50)
    monkeypatch.setattr(serving.Connections.__init__, "__defaults__", (50,))
    async with served() as dashboard:
        reader, writer = await dashboard.stream()
        await message(reader)
        many = [socket.socket() for _ in range(1000)]
        try:
            for one in many:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", dashboard.port))
                if one.fileno() % 50 == 0:
                    await asyncio.sleep(0)
            await until(lambda: sum(map(_closed, many)) >= 900, "most connections are refused")
            await dashboard.clock.look()
            assert (await message(reader))[0] == "patch"
        finally:
            for one in many:
                one.close()
            writer.close()
        await until(lambda: dashboard.feed.viewers == 0, "the viewer is forgotten")
        assert (await dashboard.ask("/"))[0] == 200


def _closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_connection_without_a_request_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.01)
    async with served() as dashboard:
        reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: 127")
        with contextlib.suppress(ConnectionResetError):  # an end is as good
            assert await reader.read() == b""
        writer.close()


async def test_reader_that_never_reads_is_cut_off_and_costs_nobody_else() -> None:
    async with served(narrow=True) as dashboard:
        good, writer = await dashboard.stream()
        await message(good)
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.setblocking(False)
        await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", dashboard.port))
        request = f"GET /api/v1/events HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(lazy, request.encode())
        await until(lambda: dashboard.feed.viewers == 2, "both look")
        for number in range(200):
            if dashboard.feed.viewers < 2:
                break
            dashboard.source.extra = {"members": [], "vitals": {}, "seen": {"disk": f"{number}" * 10_000}}
            await dashboard.clock.look()
            assert (await message(good))[0] == "patch"
        assert dashboard.feed.viewers == 1, "who does not read is dropped"
        lazy.close()
        writer.close()


async def test_who_does_not_take_an_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[Any] = []
    monkeypatch.setattr(serving, "SLOW_S", 0.05)
    monkeypatch.setattr(serving.Connections, "cut", lambda self, client: cut.append(client))
    async with served(narrow=True) as dashboard:
        dashboard.source.extra = {"members": [], "vitals": {}, "seen": {"disk": "x" * 400_000}}
        await dashboard.clock.look()
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.setblocking(False)
        await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", dashboard.port))
        request = f"GET /api/v1/state HTTP/1.1\r\nhost: 127.0.0.1:{dashboard.port}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(lazy, request.encode())
        await until(lambda: lazy.getsockname() in cut, "it is cut off")
        lazy.close()


async def test_over_ipv6_a_reader_that_never_reads_is_cut_off_too() -> None:
    connections = serving.Connections()
    cut: list[int] = []

    class Transport:
        def get_extra_info(self, name: str) -> tuple[str, int, int, int]:
            return ("::1", 4711, 0, 0)

        def abort(self) -> None:
            cut.append(1)

    transport: Any = Transport()
    assert connections.admit(tuple(transport.get_extra_info("peername")[:2]), transport)
    connections.cut(("::1", 4711))  # as ASGI names it
    assert cut == [1]


async def test_what_was_seen_long_ago_is_not_shown_as_present() -> None:
    clock, source = HandClock(), ScriptedSource()
    feed = StateFeed(source, Overview({"kind": "peer", "label": "a test"}), clock)
    source.extra = {"members": [], "vitals": {}, "seen": {"disk": "full"}}
    await feed.update()
    assert feed.state()["notes"] == ["full"]
    clock.now += 100.0
    await feed.update()
    assert feed.state()["notes"] == []


async def test_viewer_that_falls_behind_is_dropped() -> None:
    viewer = Viewer()
    for _ in range(MAX_BEHIND):
        viewer.give(b"x")
    assert not viewer.dropped.is_set()
    viewer.give(b"x")
    assert viewer.dropped.is_set()


async def test_source_that_fails_for_a_moment_costs_no_viewer() -> None:
    source = ScriptedSource()
    feed = StateFeed(source, Overview({"kind": "peer", "label": "a test"}), HandClock())
    viewer = feed.enter()
    working = source.poll

    async def fails(overview: Overview, *, watched: bool) -> None:
        raise OSError("the disk is away")

    source.poll = fails
    await feed.update()
    source.poll = working
    await feed.update()
    await turns()
    assert viewer.waiting.qsize() == 2, "the state, and what was new when the disk was back"
    assert not viewer.dropped.is_set()


# --- where it listens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("7300", ("127.0.0.1", 7300)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::]:0", ("::", 0)),
        ("localhost:5", ("localhost", 5)),
    ],
)
def test_place_is_a_port_or_an_address_and_a_port(text: str, place: tuple[str, int]) -> None:
    assert listening_place(text) == place


@pytest.mark.parametrize("text", ["", "x", "70000", "-1", "lab.example:80", "1.2.3:80", ":", "0.0.0.0:"])
def test_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|address"):
        listening_place(text)


def test_token_is_asked_for_off_this_machine_and_kept_to_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert token_for("127.0.0.1", tmp_path) is None
    assert not list(tmp_path.iterdir())
    token = token_for("0.0.0.0", tmp_path)
    assert token is not None
    assert token == token_for("0.0.0.0", tmp_path)
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    place = DashboardPlace("--listen", DashboardOptions(listen="0.0.0.0:0", home=str(tmp_path)))
    place.listener.close()
    assert place.url == f"{place.address}#token={token}"
    (tmp_path / TOKEN_FILE).write_text("short\n")
    with pytest.raises(ConfigError, match="16 characters"):
        token_for("0.0.0.0", tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-environment")
    assert token_for("0.0.0.0", tmp_path) == "of-the-environment"


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_printed_address_opens_the_page(listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-environment")
    place = DashboardPlace("--listen", DashboardOptions(listen=listen, home=str(tmp_path)))
    place.listener.close()
    address, _, token = place.url.partition("#token=")
    host = urlsplit(address).netloc
    asked = {"host": host, "authorization": f"Bearer {token}"}
    assert place.access.refuse("GET", "/api/v1/state", asked) is None, host
    assert socket.gethostname() not in place.url
    assert not host.startswith(("0.0.0.0", "[::]")), "nobody can ask for that"


def test_without_a_route_the_printed_address_is_that_of_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unrouted(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError("no route")

    monkeypatch.setattr(socket, "socket", Unrouted)
    assert (own_address("0.0.0.0"), own_address("::")) == ("127.0.0.1", "::1")


def test_taken_port_is_an_error_that_names_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            DashboardPlace("--dashboard", DashboardOptions(listen=str(port)))
    assert "--dashboard 0" in str(refused.value)

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_USAGE, exit_code_of
from peers.invites.invite import (
    MAX_ADDRESSES,
    PREFIX,
    Contacts,
    Invite,
    contacts_from,
    invite_to,
    parse_invite,
    typed_invite,
)
from swarm import WIRE_VERSION
from swarm.errors import ConfigError, Incompatible, SwarmError
from swarm.ids import RunId
from swarm.security.signing import peer_of
from tests.harness.rigs.peers import Said, Typed

PEER = peer_of(bytes(range(32)))
RUN = RunId("9f2c41" + "0" * 58)
AT = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
HERE = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"
INVITE = Invite(run=RUN, name="tiny", at=(AT,))

peer_ids = st.binary(min_size=32, max_size=32).map(peer_of)
addresses = st.builds(
    lambda host, port, peer: f"/ip4/{host}/tcp/{port}/p2p/{peer}",
    st.ip_addresses(network="192.0.0.0/8").map(str),
    st.integers(1, 65535),
    peer_ids,
)
invites = st.builds(
    lambda run, name, at: Invite(run=RunId(run), name=name, at=tuple(at)),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.from_regex(r"[a-z0-9][a-z0-9-]{0,40}", fullmatch=True),
    st.lists(addresses, min_size=1, max_size=MAX_ADDRESSES, unique=True),
)


def _packed(fields: Any) -> str:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return PREFIX + base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def _with(**changed: Any) -> str:
    return _packed({"run": RUN, "name": "tiny", "at": [AT], "wire": WIRE_VERSION} | changed)


@given(invites)
def test_invite_comes_back_from_its_text(invite: Invite) -> None:
    assert parse_invite(invite.text()) == invite


def test_invite_pasted_with_line_breaks_and_padding_is_read() -> None:
    text = INVITE.text()
    assert parse_invite(f"  {text[:40]}\n{text[40:]}==\n") == INVITE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "an invite (swarm1:…) or a multiaddr"),
        ("hello", "an invite (swarm1:…) or a multiaddr"),
        ("swarm:abc", "an invite (swarm1:…) or a multiaddr"),
        (PREFIX, "the rest is missing"),
        (PREFIX + "ab!c", "there is '!' in it"),
        (PREFIX + "abcde", "cut off"),
        (INVITE.text()[:-7], "cut off"),
        (INVITE.text()[:60], "cut off"),
        *((_with() + "x" * more, "added") for more in (1, 2, 3, 8)),
        *((_with(name="tiny" + "y" * more) + "x", "added") for more in (1, 2)),
        (_packed(b"\xff\xfe{}"), "not JSON"),
        (_packed(b"[" * 2900), "not JSON"),
        (_packed([1]), "a list, not a set of fields"),
        (_packed({"wire": WIRE_VERSION}), "no 'at', no 'name', no 'run'"),
        (_with(port=1), "a strange 'port'"),
        (_with(run="9F" * 32), "its run is '9F9F"),
        (_with(run=7), "its run is 7"),
        (_with(name="Tiny swarm"), "its name is 'Tiny swarm'"),
        (_with(at=[]), "its addresses are []"),
        (_with(at=[AT] * 6), "1 to 5 addresses"),
        (_with(at=[7]), "its addresses are [7]"),
        (_with(at=["/ip4/203.0.113.7/tcp/31337"]), "ends in /p2p/"),
        (_with(at=["/ip4/999.0.0.1/tcp/1/p2p/x"]), "check the spelling"),
        (_with(at=["/ip4/1.2.3.4/tcp/1/ws/p2p/" + PEER]), "/ws cannot be used"),
        (_with(wire=True), "its wire version is True"),
        (_with(wire="1"), "its wire version is '1'"),
        (_with(wire=None), "its wire version is None"),
        (PREFIX + "A" * 9000, "longer"),
    ],
)
def test_invite_that_is_none_says_why(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_invite(text)
    assert told in str(caught.value)
    assert exit_code_of(caught.value) == EXIT_USAGE
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (_with(wire=WIRE_VERSION + 1, more="fields"), "this machine"),
        (_with(wire=WIRE_VERSION - 1, more="fields"), "the peers of that run"),
        ("swarm2:whatever", "this machine"),
    ],
)
def test_invite_of_another_version_says_who_must_update(text: str, who: str) -> None:
    with pytest.raises(Incompatible) as caught:
        parse_invite(text)
    assert exit_code_of(caught.value) == EXIT_INCOMPATIBLE
    assert f"update swarm on {who}" in caught.value.remedy.lower()


@given(st.one_of(st.text(), st.text().map(PREFIX.__add__), st.binary().map(_packed)))
def test_invite_from_garbage_raises_nothing_else(text: str) -> None:
    with pytest.raises(SwarmError):
        parse_invite(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["run", "name", "at", "wire"]), json_values)
def test_invite_with_one_field_changed_is_refused_or_whole(field: str, value: Any) -> None:
    try:
        invite = parse_invite(_with(**{field: value}))
    except SwarmError:
        return
    assert parse_invite(invite.text()) == invite


@given(st.lists(st.text() | st.text().map("/".__add__) | invites.map(Invite.text), max_size=3))
def test_contacts_from_anything_raise_nothing_else(arguments: list[str]) -> None:
    with contextlib.suppress(SwarmError):
        assert contacts_from(arguments).addresses


def test_contacts_from_invite_and_addresses_are_put_together() -> None:
    assert contacts_from([HERE]) == Contacts(addresses=(HERE,))
    found = contacts_from([INVITE.text(), HERE, AT])
    assert found == Contacts(addresses=(AT, HERE), run=RUN, run_name="tiny")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "swarm invite"),
        ([INVITE.text(), Invite(run=RunId("a" * 64), name="tiny", at=(AT,)).text()], "start one peer for each"),
        (["/ip4/203.0.113.7/tcp/31337"], "ends in /p2p/"),
    ],
)
def test_contacts_that_cannot_be_used_are_explained(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match="INVITE") as caught:
        contacts_from(arguments)
    assert told in str(caught.value)


def test_invite_to_a_run_prefers_what_others_can_reach() -> None:
    others = [f"/ip4/203.0.113.{number}/tcp/1/p2p/{PEER}" for number in range(6)]
    assert invite_to(RUN, "tiny", [HERE, AT, HERE]).at == (AT, HERE)
    assert invite_to(RUN, "tiny", [HERE, *others]).at == tuple(others[:5])
    assert (invite_to(RUN, "tiny", [HERE]).local, invite_to(RUN, "tiny", [HERE, AT]).local) == (True, False)
    with pytest.raises(ConfigError, match="--announce"):
        invite_to(RUN, "tiny", [])


READ_FROM_STDIN = ("join -", "ckpt pull --from -", "plan --swarm -", "relay --run -", "dashboard -")


@pytest.mark.usefixtures("clean_environment", "elsewhere")
def test_invite_from_standard_input_and_an_empty_one_are_told_with_what_to_type(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, snapshot: Any
) -> None:
    def from_input(command: str, text: str) -> Said:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return typed(command)

    empty = [from_input(command, "\n") for command in (*READ_FROM_STDIN, "service install -")]
    cut = [from_input(command, "swarm1:abc") for command in READ_FROM_STDIN]
    nothing = [
        typed(*command.split(), "") for command in ("join", "relay --run", "plan --swarm", "invite --countersign")
    ]
    assert {one.code for one in (*empty, *cut, *nothing)} == {EXIT_USAGE}
    assert all("expected a whole invite" in one.err for one in cut)
    assert [*empty, *nothing] == snapshot


def test_who_types_the_invite_into_a_terminal_is_asked_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO(f"{INVITE.text()}\nmore")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert typed_invite("-", "join -") == INVITE.text()
    assert "Paste the invite, and press Enter" in capsys.readouterr().err
    assert typed_invite("swarm1:abc", "join -") == "swarm1:abc"


@pytest.mark.parametrize("around", ["“{}”", '"{}"', "<{}>", "{}.", "({}),", "'{}'!"])
def test_invite_as_a_message_has_it_is_understood(around: str) -> None:
    text = INVITE.text()
    assert contacts_from((around.format(text),)).run == RUN


def test_invite_that_a_line_break_has_cut_is_put_together() -> None:
    text = INVITE.text()
    found = contacts_from((text[:40], text[40:90], text[90:], AT))
    assert (found.run, found.addresses) == (RUN, (AT,))


def test_address_of_a_compose_service_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(name: str, port: None, family: int, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        asked.append(name)
        return [(socket.AF_INET, type, 6, "", ("172.18.0.2", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    peer = AT.rpartition("/p2p/")[2]
    found = contacts_from((f"/dns4/my_service/tcp/4001/p2p/{peer}",))
    assert found.addresses == (f"/ip4/172.18.0.2/tcp/4001/p2p/{peer}",)
    assert asked == ["my_service"]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="getent hosts no_such_machine.invalid"):
        contacts_from((f"/dns4/no_such_machine.invalid/tcp/4001/p2p/{peer}",))

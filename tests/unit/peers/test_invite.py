from __future__ import annotations

import base64
import contextlib
import hashlib
import io
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
    Granted,
    Invite,
    contacts_from,
    invite_to,
    parse_invite,
    typed_invite,
)
from swarm import WIRE_VERSION
from swarm.errors import ConfigError, Incompatible, SwarmError
from swarm.ids import RunId
from swarm.security.credentials import Grant, sign_grant
from swarm.security.signing import PrivateIdentity, peer_of
from tests.harness.rigs.peers import Said, Typed

PEER = peer_of(bytes(range(32)))
RUN = RunId("9f2c41" + "0" * 58)
AT = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
HERE = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}"
INVITE = Invite(run=RUN, name="tiny", at=(AT,))

peer_ids = st.binary(min_size=32, max_size=32).map(peer_of)
hosts = st.one_of(
    st.ip_addresses(network="192.0.0.0/8").map("/ip4/{}".format),
    st.ip_addresses(network="2001:db8::/32").map("/ip6/{}".format),
    st.sampled_from(["/dns4/relay.example.org", "/dns/a.test"]),
)
direct = st.builds(
    lambda host, transport, port, peer: f"{host}/{transport.format(port)}/p2p/{peer}",
    hosts,
    st.sampled_from(["tcp/{}", "udp/{}/quic-v1"]),
    st.integers(1, 65535),
    peer_ids,
)
RELAY_OF_ANOTHER_KIND = "/ip4/192.0.2.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
addresses = st.one_of(
    direct,
    st.builds("{}/p2p-circuit/p2p/{}".format, st.one_of(direct, st.just(RELAY_OF_ANOTHER_KIND)), peer_ids),
)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True)


@st.composite
def grants(draw: st.DrawFn) -> Granted:
    seed = draw(st.none() | st.binary(min_size=32, max_size=32))
    grant = Grant(
        run=RUN,
        serial=draw(st.binary(min_size=8, max_size=8)).hex(),
        name=draw(names),
        organisation=draw(st.just("") | names),
        role=draw(st.sampled_from(["stage", "trainer", "observer", "any"])),
        vote=draw(st.booleans()),
        until_step=draw(st.integers(0, 1 << 32)),
        key=draw(peer_ids) if seed is None else PrivateIdentity(seed).peer,
    )
    signed = sign_grant(grant, PrivateIdentity(draw(st.binary(min_size=32, max_size=32))))
    return Granted(grant=signed, seed=seed)


invites = st.builds(
    lambda name, at, granted: Invite(run=RUN, name=name, at=tuple(at), granted=granted),
    st.from_regex(r"[a-z0-9][a-z0-9-]{0,40}", fullmatch=True),
    st.lists(addresses, min_size=1, max_size=MAX_ADDRESSES, unique=True),
    st.none() | grants(),
)


def _packed(body: bytes) -> str:
    """What somebody makes on purpose, who knows how."""
    whole = hashlib.sha256(body).digest()[:4] + body
    return PREFIX + base64.urlsafe_b64encode(whole).rstrip(b"=").decode()


def _body(invite: Invite = INVITE) -> bytes:
    text = invite.text().removeprefix(PREFIX)
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[4:]


def _changed(before: bytes, after: bytes, invite: Invite = INVITE) -> str:
    body = _body(invite)
    assert body.count(before) == 1
    return _packed(body.replace(before, after))


def _granted(seed: bytes | None = bytes(32)) -> Invite:
    issuer = PrivateIdentity(bytes([1]) * 32)
    key = peer_of(bytes(range(32))) if seed is None else PrivateIdentity(seed).peer
    grant = Grant(run=RUN, serial="ab" * 8, name="a" * 16, role="trainer", until_step=20_000, key=key)
    relayed = f"/ip4/203.0.113.9/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{issuer.peer}"
    at = (f"/ip4/203.0.113.7/tcp/4001/p2p/{issuer.peer}", relayed)
    return Invite(run=RUN, name="n" * 16, at=at, granted=Granted(grant=sign_grant(grant, issuer), seed=seed))


def test_invite_of_an_issuer_with_a_direct_and_a_relayed_address_is_short_enough_to_send() -> None:
    invite = _granted()
    assert len(invite.text()) == 373
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
        (INVITE.text() + "x", "added"),
        (INVITE.text().replace(INVITE.text()[30], "-"), "changed"),
        (_packed(b""), "cut off"),
        (_packed(_body()[:-1]), "ends too early"),
        (_packed(b"\xff" * 40), "a number in it has no end"),
        (_changed(b"\x04tiny", b"\x04Tiny"), "its name is none of a run"),
        (_changed(b"\x04tiny", b"\x04t\xffny"), "ascii"),
        (_packed(_body()[:-12] + b"\0"), "it has no address"),
        (_packed(_body()[:-12] + b"\6"), "6 of what it may have 5 at most"),
        (_packed(_body()[:-1] + b"\1"), "a peer that it does not have"),
        (_packed(_body() + b"\x10"), "its grant is of an unknown kind"),
        (_changed(b"\x04\xcb\0\x71\x07", b"\x7f\x7f\0\0\0"), "an address of it cannot be read"),
        (_changed(b"\x04\xcb\0\x71\x07", b"\x04\0\0\0\0"), "stands for all addresses"),
        (_packed(_body(_granted()) + b"x"), "more behind its end"),
        (_changed(b"\x10" + b"a" * 16, b"\x10-" + b"a" * 15, _granted()), "its grant cannot be used"),
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
        (_packed(bytes([WIRE_VERSION + 1]) + b"more"), "this machine"),
        (_packed(bytes([WIRE_VERSION - 1]) + b"less"), "the peers of that run"),
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


@given(invites.map(_body), st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3))
def test_invite_with_some_bytes_changed_is_refused_or_whole(body: bytes, at: int, put: bytes, out: int) -> None:
    at %= len(body)
    try:
        invite = parse_invite(_packed(body[:at] + put + body[at + out :]))
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

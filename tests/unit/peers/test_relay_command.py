"""``swarm relay``, ``--through`` and names: what is made of what is typed, and what is said where it does not work."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from multiaddr import Multiaddr

from peers import reaching
from peers.commands.preflight import check_listen, check_through
from peers.commands.relay import announced, everywhere, how_to_use, limits_of, run_named, shown_addresses
from peers.console.words import relaying_text
from peers.doctor.contacts import AddressProbe, no_relay, probe_addresses
from peers.doctor.through import judge_need
from peers.invites.invite import Invite
from peers.options.reading import read_relay_options
from peers.options.relay import RelayOptions
from peers.reaching import endpoint_config, names_without_address, nobody_answers
from peers.settings import PeerSettings
from swarm.errors import ConfigError
from swarm.ids import RunId
from swarm.network.endpoint import EndpointConfig
from swarm.network.reach.reachability import Finding
from swarm.security.signing import PrivateIdentity

R, F = PrivateIdentity.generate().peer, PrivateIdentity.generate().peer
AT = f"/dns4/relay.example.org/tcp/4001/p2p/{R}"
RUN = "ab" * 32


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("relay.example.org", "/dns4/relay.example.org/tcp/4001"),
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/4001"),
        ("2001:db8::7", "/ip6/2001:db8::7/tcp/4001"),
        ("[2001:db8::7]", "/ip6/2001:db8::7/tcp/4001"),
        ("/dns6/relay.example.org/tcp/443", "/dns6/relay.example.org/tcp/443"),
    ],
)
def test_relay_announces_a_name_an_address_or_a_multiaddr(typed: str, address: str) -> None:
    assert announced(typed, 4001) == address


@pytest.mark.parametrize("typed", ["relay example", "http://relay.example.org", "-x-", "a" * 300])
def test_relay_refuses_to_announce_what_is_no_name(typed: str) -> None:
    with pytest.raises(ConfigError, match="a domain name, an IP address, or a multiaddr"):
        announced(typed, 4001)


def test_relay_serves_the_runs_of_invites_and_of_ids() -> None:
    invite = Invite(run=RunId(RUN), name="mine", at=(AT,)).text()
    assert {run_named(invite), run_named(RUN)} == {RUN}
    with pytest.raises(ConfigError):
        run_named(RUN[:12])  # too little to know that it is the one


def test_limits_of_a_relay_are_what_was_typed_in_megabytes() -> None:
    options = read_relay_options({"slots": "5", "rate": "2.5", "rate_per_peer": "1", "stranger_rate": "0.5"})
    limits = limits_of(options, frozenset())
    assert limits.slots.reservations == limits.slots.stranger_reservations == 5
    assert limits.slots.bytes_per_s == 2.5e6
    assert limits.slots.bytes_per_s_of_peer == 1e6
    assert limits.slots.stranger_bytes_per_s == 0.5e6
    assert limits_of(RelayOptions(), frozenset()).slots.bytes_per_s is None
    with pytest.raises(ConfigError, match="--slots"):
        read_relay_options({"slots": "0"})


def test_relay_listens_on_both_families_where_there_are_both() -> None:
    assert everywhere(4001, with_ip6=True) == ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001")
    assert everywhere(4001, with_ip6=False) == ("/ip4/0.0.0.0/tcp/4001",)


def test_relay_shows_what_others_type_and_that_a_private_address_serves_nobody_outside() -> None:
    near = f"/ip4/127.0.0.1/tcp/4001/p2p/{R}"
    assert shown_addresses([AT, near]) == (AT,)
    assert shown_addresses([near]) == (near,)
    assert f"new --preset tiny --through {AT}" in how_to_use([AT])[0][1]
    assert [label for label, _ in how_to_use([AT])] == ["found a run", "join through"]
    assert "--announce" in how_to_use([f"/ip6/fd00::7/tcp/4001/p2p/{R}"])[-1][1], "a ULA is private (RFC 4193)"
    assert "--announce" in how_to_use([])[0][1]


def test_figures_of_a_relay_are_told_in_words() -> None:
    figures = {"slots": 3, "runs": 1, "circuits": 2, "relayed_bytes": 12_300_000, "refused": 0}
    assert relaying_text(figures) == "3 slots of 1 run, 2 circuits; 12.3 MB passed on, 0 requests refused"


def test_through_takes_the_address_of_a_relay_and_nothing_behind_it() -> None:
    check_through([AT, f"/ip6/2001:db8::7/tcp/4001/p2p/{R}"])
    with pytest.raises(ConfigError, match=f"--through {AT}"):
        check_through([f"{AT}/p2p-circuit/p2p/{F}"])
    with pytest.raises(ConfigError, match="/p2p/PEER_ID"):
        check_through(["/dns4/relay.example.org/tcp/4001"])


def test_name_to_listen_on_is_refused_with_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"--listen /ip4/0.0.0.0/tcp/4001 --announce /dns4/me.example.org/tcp/4001"):
        check_listen(["/dns4/me.example.org/tcp/4001"])


def settings_of(tmp_path: Any, role: str, *through: str, bootstrap: tuple[str, ...] = ()) -> PeerSettings:
    given: dict[str, Any] = {"home": tmp_path, "role": role, "bootstrap": bootstrap, "options": {"through": through}}
    return PeerSettings(**given)


def test_founder_that_was_told_of_a_relay_is_behind_nat_and_a_joiner_finds_it_in_its_invite(tmp_path: Any) -> None:
    founder = endpoint_config(settings_of(tmp_path, "bootstrap", AT))
    assert (founder.relays, founder.behind_nat) == ((Multiaddr(AT),), True)
    joiner = endpoint_config(settings_of(tmp_path, "stage", bootstrap=(f"{AT}/p2p-circuit/p2p/{F}",)))
    assert (joiner.relays, joiner.behind_nat) == ((Multiaddr(AT),), False)
    assert endpoint_config(settings_of(tmp_path, "stage", AT)).behind_nat is False


class Resolver:
    """Stands for the machine's: knows some names, and notes what it was asked."""

    def __init__(self, *known: str) -> None:
        self.known, self.asked = known, list[tuple[str, int]]()

    async def __call__(self, name: str, port: None, *, family: int, type: int) -> list[object]:
        self.asked.append((name, family))
        if name not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [object()]


async def nobody_probes(addresses: object) -> list[AddressProbe]:
    return []


async def test_name_without_an_address_is_told_as_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    resolver = Resolver("known.example")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver, raising=False)
    good, bad = (Multiaddr(f"/{name}/tcp/1/p2p/{R}") for name in ("dns6/known.example", "dns4/x.y"))
    assert await names_without_address([good, bad, bad]) == {"x.y": "Name or service not known"}
    assert resolver.asked[:2] == [("known.example", socket.AF_INET6), ("x.y", socket.AF_INET)]
    error = await nobody_answers(EndpointConfig(run_dir=tmp_path, relays=(good, bad)))
    assert "the name x.y has no address" in str(error)
    assert error.check.startswith("getent hosts x.y")
    monkeypatch.setattr(reaching, "probe_addresses", nobody_probes)
    known = await nobody_answers(EndpointConfig(run_dir=tmp_path, relays=(good,)))
    assert "no relay answers under that peer id" in str(known)
    assert reaching.Advice.RELAY_THERE in known.remedy


def test_relay_that_does_not_answer_is_told_with_its_cause_check_and_next_command() -> None:
    gone = no_relay([AddressProbe(address=AT, answered="no name", words="Name or service not known")])
    assert gone.exit_code == 3
    assert (gone.check, "swarm relay" in gone.next or "relay;" in gone.next) == ("getent hosts relay.example.org", True)
    closed = no_relay([AddressProbe(address=AT, answered="closed", words="Connection refused")])
    assert "no relay listens at that port" in closed.cause


async def test_probe_at_an_address_of_one_family_asks_for_that_family(monkeypatch: pytest.MonkeyPatch) -> None:
    families: list[int] = []

    async def refuse(host: str, port: int, *, family: int) -> None:
        families.append(family)
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    hosts = ("ip6/::1", "dns6/a.example", "dns4/a.example", "dns/a.example")
    probes = await probe_addresses([f"/{host}/tcp/1/p2p/{R}" for host in hosts])
    assert {probe.answered for probe in probes} == {"closed"}
    assert families == [socket.AF_INET6, socket.AF_INET6, socket.AF_INET, socket.AF_UNSPEC]


def test_doctor_says_whether_a_relay_is_needed_and_what_to_type() -> None:
    own = [f"/ip4/192.168.1.5/tcp/4001/p2p/{F}"]
    seen = Finding(R, observed=("203.0.113.7",))
    needed = judge_need(AT, own, [seen])
    assert (needed.level, needed.facts["how"]) == ("ok", "outgoing")
    assert needed.found.startswith("needed: ")
    assert f"new --preset tiny --through {AT}" in needed.found
    direct = judge_need(AT, own, [Finding(R, observed=("203.0.113.7",), answered=(f"/ip4/203.0.113.7/tcp/1/p2p/{F}",))])
    assert direct.found.startswith("none is needed")
    refused = judge_need(AT, own, [Finding(R, error="no method 'relay/1/dialback' here")])
    assert (refused.level, "swarm status" in refused.check) == ("fail", True)


@pytest.mark.parametrize(
    ("typed", "whole"),
    [
        ("relay.example.org", "/dns4/relay.example.org/tcp/4001"),
        ("relay.example.org:4002", "/dns4/relay.example.org/tcp/4002"),
        ("192.0.2.7:4002", "/ip4/192.0.2.7/tcp/4002"),
        ("[2001:db8::1]:4002", "/ip6/2001:db8::1/tcp/4002"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/4001"),
        ("/dns4/relay.example.org/tcp/4002", "/dns4/relay.example.org/tcp/4002"),
        ("/ip4/192.0.2.7", "/ip4/192.0.2.7/tcp/4001"),
    ],
)
def test_relay_without_its_peer_id_is_refused_with_where_to_find_it(typed: str, whole: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_through([typed])
    assert "ends in no /p2p/PEER_ID" in refused.value.why
    assert "status --peer relay shows it" in refused.value.remedy
    assert refused.value.remedy.endswith(f"--through {whole}/p2p/PEER_ID")

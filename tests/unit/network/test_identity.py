"""Keys, their files, and addresses."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.ids import PeerId
from swarm.network.addresses import parse_address
from swarm.network.libp2p.identity import load_or_create
from swarm.security.signing import PrivateIdentity, peer_of, public_key_of, verify

# libp2p's own test vector (specs, peer-ids.md): an Ed25519 private key as protobuf.
VECTOR = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)


def test_key_of_the_specification_is_read_and_written_as_it_is() -> None:
    identity = PrivateIdentity.from_protobuf(VECTOR)
    assert identity.to_protobuf() == VECTOR
    assert identity.peer.startswith("12D3KooW")
    assert public_key_of(identity.peer) == VECTOR[36:]
    assert peer_of(VECTOR[36:]) == identity.peer


def test_signature_is_accepted_for_its_peer_and_data_only() -> None:
    one, other = PrivateIdentity.generate(), PrivateIdentity.generate()
    signature = one.sign(b"data")
    assert verify(one.peer, b"data", signature)
    assert not verify(one.peer, b"date", signature)
    assert not verify(other.peer, b"data", signature)
    assert not verify(one.peer, b"data", signature[:-1])
    assert one.peer in repr(one)


@pytest.mark.parametrize("peer", ["", "1", "0OIl", "12D3KooW", "Qm" * 22, "1" * 52, "z" * 5000, "ß" * 52])
def test_peer_id_that_is_no_ed25519_key_verifies_nothing(peer: str) -> None:
    assert public_key_of(PeerId(peer)) is None
    assert not verify(PeerId(peer), b"", bytes(64))


def test_key_file_is_made_private_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "key"
    made = load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create(path).peer == made.peer
    assert os.listdir(path.parent) == ["key"]


def test_key_file_made_by_many_at_once_is_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        peers = set(pool.map(lambda _: load_or_create(tmp_path / "key").peer, range(8)))
    assert len(peers) == 1
    assert os.listdir(tmp_path) == ["key"]


def _open_to_others(path: Path) -> None:
    path.chmod(0o644)


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _mixed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:36] + bytes(32))


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("damage", [_open_to_others, _torn, _mixed, _linked, _longer])
def test_key_file_that_is_damaged_names_path_and_remedy(damage: object, tmp_path: Path) -> None:
    path = tmp_path / "key"
    load_or_create(path)
    damage(path)  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        load_or_create(path)
    assert str(path) in str(caught.value)


KNOWN = PrivateIdentity.from_protobuf(VECTOR).peer


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a multiaddr such as"),
        ("   ", "a multiaddr such as"),
        ("192.0.2.1:80", "check the spelling"),
        ("/foo/bar", "unknown protocol"),
        ("/ip4/300.1.1.1/tcp/80", "check the spelling"),
        (f"/ip4/192.0.2.1/tcp/99999/p2p/{KNOWN}", "check the spelling"),
        ("/ip4/192.0.2.1/tcp/80", "ends in /p2p/"),
        (f"/ip4/192.0.2.1/tcp/0/p2p/{KNOWN}", "port from 1"),
        (f"/ip4/192.0.2.1/udp/80/p2p/{KNOWN}", "quic-v1"),
        (f"/ip4/192.0.2.1/tcp/80/ws/p2p/{KNOWN}", "give a TCP address"),
        (f"/unix/tmp/x/p2p/{KNOWN}", "cannot be used"),
        ("/ip4/192.0.2.1/tcp/80/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "Ed25519"),
    ],
)
def test_address_that_cannot_be_used_says_why(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse_address(text, key="--initial-peer")
    assert "--initial-peer" in str(caught.value)


def test_address_to_listen_on_must_not_name_a_peer() -> None:
    with pytest.raises(ConfigError, match="without /p2p/"):
        parse_address(f"/ip4/192.0.2.1/tcp/80/p2p/{KNOWN}", use="announce")

"""Endpoints on different machines: namespaces of this one, some behind routers that let nobody in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tests.harness.far_peer import FarPeer, PeerAnswered
from tests.harness.namespaces import Net, behind_nat, lan

pytestmark = [pytest.mark.root, pytest.mark.network]

ANYWHERE = "/ip4/0.0.0.0/tcp/0"
MANIFEST = '{"tokenizer":{"digest":"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}}'
MIB = 1 << 20


@pytest.fixture
def net() -> Iterator[Net]:
    """Two machines that can be dialled, two homes."""
    with lan("boot", "far") as made, behind_nat(made, "left", "sister"), behind_nat(made, "right"):
        yield made


class Peers:
    """Far peers, ended together."""

    def __init__(self, net: Net, home: Path, listen: Sequence[str] = (ANYWHERE,)) -> None:
        self._net, self._home, self._listen = net, home, list(listen)
        self._stack = contextlib.AsyncExitStack()

    async def start(self, *hosts: str, **first: object) -> list[FarPeer]:
        """Peers that have entered the run, the first of which, with these settings, is the others' contact."""
        contact, *others = [await self.spawn(host) for host in hosts]
        await contact.open(listen=self._listen, **first)
        await contact.ask("enter")
        await asyncio.gather(*(peer.open(listen=self._listen, bootstrap=contact.addresses) for peer in others))
        await asyncio.gather(*(peer.ask("enter") for peer in others))
        return [contact, *others]

    async def spawn(self, host: str) -> FarPeer:
        """A process on a host, not opened yet."""
        peer = await FarPeer.start(self._home / host, functools.partial(self._net.command, host))
        self._stack.push_async_callback(peer.close)
        return peer

    async def close(self) -> None:
        """End all of them."""
        await self._stack.aclose()


@pytest_asyncio.fixture
async def peers(net: Net, home: Path) -> AsyncIterator[Peers]:
    made = Peers(net, home)
    yield made
    await made.close()


async def test_second_machine_joins_and_is_dialled_back(net: Net, peers: Peers) -> None:
    boot, far = await peers.start("boot", "far")
    assert boot.addresses[0].startswith(f"/ip4/{net.address('boot')}/tcp/"), "what others can dial comes first"
    assert boot.addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
    await boot.ask("serve", manifest=MANIFEST)
    assert await far.ask("fetch", peer=boot.peer) == MANIFEST
    assert await far.ask("call", peer=boot.peer, size=4 * MIB) == 4 * MIB
    reach = await far.ask("reach", contacts=[boot.peer])
    assert reach["how"] == "direct", reach
    assert f"dialled it at /ip4/{net.address('far')}" in reach["detail"]
    assert await far.ask("links") == {boot.peer: "direct"}
    assert (await boot.ask("reach", contacts=[]))["how"] == "unknown"


async def test_peers_behind_two_nats_reach_each_other_until_the_relay_dies(net: Net, peers: Peers) -> None:
    boot, left, right = await peers.start("boot", "left", "right")
    for peer in (left, right):
        reach = await peer.ask("reach", contacts=[boot.peer])
        assert reach["how"] == "relayed", reach
        assert f"through {boot.peer}" in reach["detail"]
        assert reach["addresses"][0].startswith(f"/ip4/{net.address('boot')}/tcp/")
        assert reach["addresses"][0].endswith(f"/p2p/{boot.peer}/p2p-circuit/p2p/{peer.peer}")
        await peer.ask("announce", name="p")
    # All either of them ever learns is in the directory.
    told = await left.ask("lookup")
    assert right.peer in told
    await left.ask("learn", peer=right.peer, addresses=told[right.peer])
    # More than the daemon's own relay lets through, by far.
    assert await left.ask("call", peer=right.peer, size=8 * MIB) == 8 * MIB
    assert (await left.ask("links"))[right.peer] == "relayed"
    await boot.kill()
    with pytest.raises(PeerAnswered) as caught:
        await left.ask("call", peer=right.peer, size=MIB, timeout_s=8)
    assert caught.value.kind in ("Unreachable", "DeadlineMissed")
    assert right.peer in caught.value.text


async def test_peer_behind_nat_is_called_and_invites_others(net: Net, peers: Peers) -> None:
    boot, far, left = await peers.start("boot", "far", "left")
    invited = await peers.spawn("right")
    await far.ask("learn", peer=left.peer, addresses=left.addresses)
    with pytest.raises(PeerAnswered, match="Unreachable"):
        await far.ask("call", peer=left.peer, timeout_s=5)
    await left.ask("learn", peer=far.peer, addresses=far.addresses)
    reach = await left.ask("reach", contacts=[boot.peer, far.peer])
    assert reach["how"] == "relayed", reach
    assert boot.peer in reach["detail"]
    assert far.peer in reach["detail"], "both relay, so that one may die"
    await far.ask("learn", peer=left.peer, addresses=reach["addresses"])
    assert await far.ask("call", peer=left.peer, size=MIB) == MIB
    await left.ask("serve", manifest=MANIFEST)
    await invited.open(listen=[ANYWHERE], bootstrap=[each for each in reach["addresses"] if "circuit" in each])
    assert await invited.ask("fetch", peer=left.peer) == MANIFEST
    await invited.ask("enter")
    assert await invited.ask("call", peer=left.peer, size=MIB) == MIB
    assert (await invited.ask("links"))[left.peer] == "relayed"
    # Its contact cannot tell how it is reached, and cannot relay: it turns to those that it has learned of.
    await invited.ask("learn", peer=far.peer, addresses=far.addresses)
    reach = await invited.ask("reach", contacts=[left.peer])
    assert (reach["how"], "is not connected directly" in reach["detail"]) == ("relayed", True), reach
    assert f"through {far.peer}:" in reach["detail"]


async def test_peer_whose_contact_relays_for_nobody_can_only_call(net: Net, peers: Peers) -> None:
    boot, left = await peers.start("boot", "left", relay="off")
    reach = await left.ask("reach", contacts=[boot.peer])
    assert reach["how"] == "outgoing", reach
    assert "relays for nobody" in reach["detail"]
    assert await left.ask("call", peer=boot.peer, size=MIB) == MIB


async def test_peers_in_one_home_reach_each_other_without_the_relay(net: Net, peers: Peers) -> None:
    boot, left, sister = await peers.start("boot", "left", "sister")
    for peer in (left, sister):
        assert (await peer.ask("reach", contacts=[boot.peer]))["how"] == "relayed"
    await left.ask("learn", peer=sister.peer, addresses=await sister.ask("addresses"))
    assert await left.ask("call", peer=sister.peer, size=MIB) == MIB
    assert (await left.ask("links"))[sister.peer] == "direct"

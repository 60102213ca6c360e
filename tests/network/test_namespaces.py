"""Endpoints on different machines: namespaces of this one, some behind routers that let nobody in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
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
    """Two machines that can be dialled, two homes with one machine each."""
    with lan("boot", "far") as made, behind_nat(made, "left"), behind_nat(made, "right"):
        yield made


class Peers:
    """Far peers, one for each host."""

    def __init__(self, net: Net, home: Path) -> None:
        self._net, self._home = net, home
        self._stack = contextlib.AsyncExitStack()
        self.at: dict[str, FarPeer] = {}

    async def start(self, *hosts: str, **config: object) -> None:
        """Start peers side by side, each with the first one's addresses as its invite, and enter the run."""
        bootstrap = self.at["boot"].addresses if "boot" in self.at else ()
        starting = [
            FarPeer.start(
                self._home / host,
                functools.partial(self._net.command, host),
                **{"listen": [ANYWHERE], "bootstrap": bootstrap} | config,
            )
            for host in hosts
        ]
        for host, peer in zip(hosts, await asyncio.gather(*starting), strict=True):
            self._stack.push_async_callback(peer.close)
            self.at[host] = peer
            await peer.ask("enter")

    async def close(self) -> None:
        """End all of them."""
        await self._stack.aclose()


@pytest_asyncio.fixture
async def peers(net: Net, home: Path) -> AsyncIterator[Peers]:
    made = Peers(net, home)
    yield made
    await made.close()


async def test_second_machine_joins_and_is_dialled_back(net: Net, peers: Peers) -> None:
    await peers.start("boot")
    boot = peers.at["boot"]
    assert boot.addresses[0].startswith(f"/ip4/{net.address('boot')}/tcp/"), "what others can dial comes first"
    assert boot.addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
    await boot.ask("serve", manifest=MANIFEST)
    await peers.start("far")
    far = peers.at["far"]
    assert await far.ask("fetch", peer=boot.peer) == MANIFEST
    assert await far.ask("call", peer=boot.peer, size=4 * MIB) == 4 * MIB
    reach = await far.ask("reach", contacts=[boot.peer])
    assert reach["how"] == "direct", reach
    assert f"dialled it at /ip4/{net.address('far')}" in reach["detail"]
    assert await far.ask("links") == {boot.peer: "direct"}
    assert (await boot.ask("reach", contacts=[]))["how"] == "unknown"


async def test_peers_behind_two_nats_reach_each_other_until_the_relay_dies(net: Net, peers: Peers) -> None:
    await peers.start("boot")
    boot = peers.at["boot"]
    await peers.start("left", "right")
    left, right = peers.at["left"], peers.at["right"]
    for peer in (left, right):
        reach = await peer.ask("reach", contacts=[boot.peer])
        assert reach["how"] == "relayed", reach
        assert f"through {boot.peer}" in reach["detail"]
        assert reach["seconds"] < 3
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


async def test_peer_behind_nat_is_called_by_one_that_is_not(net: Net, peers: Peers) -> None:
    await peers.start("boot")
    boot = peers.at["boot"]
    await peers.start("far", "left")
    far, left = peers.at["far"], peers.at["left"]
    await far.ask("learn", peer=left.peer, addresses=left.addresses)
    with pytest.raises(PeerAnswered, match="Unreachable"):
        await far.ask("call", peer=left.peer, timeout_s=3)
    reach = await left.ask("reach", contacts=[boot.peer, far.peer])
    assert reach["how"] == "relayed", reach
    await far.ask("learn", peer=left.peer, addresses=reach["addresses"])
    assert await far.ask("call", peer=left.peer, size=MIB) == MIB


async def test_peer_whose_contact_relays_for_nobody_can_only_call(net: Net, peers: Peers) -> None:
    await peers.start("boot", relay="off")
    boot = peers.at["boot"]
    await peers.start("left")
    reach = await peers.at["left"].ask("reach", contacts=[boot.peer])
    assert reach["how"] == "outgoing", reach
    assert "relays for nobody" in reach["detail"]
    assert await peers.at["left"].ask("call", peer=boot.peer, size=MIB) == MIB

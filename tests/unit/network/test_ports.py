"""Which ports the next daemon is told to listen at."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from multiaddr import Multiaddr

from swarm.network.libp2p.daemon import pin, pinned

TCP, UDP = False, True


@pytest.mark.parametrize(
    ("listen", "bound", "chosen"),
    [
        ("/ip4/127.0.0.1/tcp/0", {(TCP, "127.0.0.1", 5000)}, "/ip4/127.0.0.1/tcp/5000"),
        ("/ip4/127.0.0.1/tcp/4001", {(TCP, "127.0.0.1", 5000)}, "/ip4/127.0.0.1/tcp/4001"),
        ("/ip4/0.0.0.0/tcp/0", {(TCP, "127.0.0.1", 5000), (TCP, "0.0.0.0", 6000)}, "/ip4/0.0.0.0/tcp/6000"),
        ("/ip6/::/tcp/0", {(TCP, "0.0.0.0", 5000), (TCP, "::", 6000)}, "/ip6/::/tcp/6000"),
        ("/ip4/0.0.0.0/udp/0/quic-v1", {(TCP, "0.0.0.0", 5), (UDP, "0.0.0.0", 6)}, "/ip4/0.0.0.0/udp/6/quic-v1"),
        ("/ip4/127.0.0.1/tcp/0", set(), "/ip4/127.0.0.1/tcp/0"),
        ("/dns4/here/tcp/0", {(TCP, "127.0.0.1", 5000)}, "/dns4/here/tcp/0"),
    ],
)
def test_ports_left_open_are_those_that_were_chosen(
    listen: str, bound: set[tuple[bool, str, int]], chosen: str
) -> None:
    assert pin([Multiaddr(listen)], bound) == (Multiaddr(chosen),)


def test_ports_of_two_equal_addresses_are_both_kept() -> None:
    listen = [Multiaddr("/ip4/127.0.0.1/tcp/0")] * 2
    bound = {(TCP, "127.0.0.1", 5000), (TCP, "127.0.0.1", 5001)}
    assert sorted(map(str, pin(listen, bound))) == ["/ip4/127.0.0.1/tcp/5000", "/ip4/127.0.0.1/tcp/5001"]


async def test_ports_are_those_the_process_listens_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = await pinned([Multiaddr("/ip4/127.0.0.1/tcp/0")], os.getpid())
    assert str(found) == f"/ip4/127.0.0.1/tcp/{port}"


async def test_ports_of_a_process_that_is_gone_stay_open() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    assert await pinned([Multiaddr("/ip4/127.0.0.1/tcp/0")], process.pid) == (Multiaddr("/ip4/127.0.0.1/tcp/0"),)

"""Which relays a peer asks, how many at a time, and what it does when one withdraws."""

from __future__ import annotations

import asyncio
from collections import Counter

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.network.reach.leases import RelayLease
from swarm.network.reach.reachability import Reserved
from swarm.network.reach.relay_slots import RESERVED_S
from swarm.security.signing import PrivateIdentity
from tests.harness.expect import eventually
from tests.harness.rigs.network import DialClock

ME, *PEERS = [PrivateIdentity.generate().peer for _ in range(31)]


class _Endpoint:
    """Peers in ``willing`` relay, the others refuse."""

    peer = ME

    def __init__(self, *willing: PeerId) -> None:
        self.willing, self.asked = set(willing), list[PeerId]()
        self.refusals = Counter[PeerId]()

    async def reserve(self, target: PeerId) -> Reserved:
        """A reservation."""
        self.asked.append(target)
        self.refusals[target] -= 1
        if self.refusals[target] >= 0 or target not in self.willing:
            raise Refused("this peer relays for nobody")
        return Reserved(seconds=RESERVED_S, addresses=(f"/ip4/10.0.0.1/tcp/1/p2p/{target}",))


def lease_of(endpoint: _Endpoint, clock: DialClock | None = None) -> RelayLease:
    return RelayLease(ME, clock or DialClock(100.0), lambda: PEERS, lambda peer: endpoint.reserve(peer), lambda: None)


async def test_lease_that_has_two_asks_nobody_more() -> None:
    endpoint = _Endpoint(*PEERS)
    lease = lease_of(endpoint)
    await asyncio.gather(lease.fill(), lease.fill())
    assert lease.relays == tuple(PEERS[:2])
    endpoint.asked.clear()
    await lease.fill()
    assert endpoint.asked == []


async def test_lease_replaces_a_relay_that_withdraws_at_once_and_leaves_it_alone() -> None:
    endpoint, clock = _Endpoint(*PEERS[:3]), DialClock(100.0)
    lease = lease_of(endpoint, clock)
    await lease.renew()
    keeping = asyncio.ensure_future(lease.keep())
    try:
        lease.withdrawn(PEERS[7])  # no relay of ours: nothing happens
        assert lease.relays == tuple(PEERS[:2])
        lease.withdrawn(PEERS[0])
        assert [str(address).split("/p2p/")[1] for address in lease.addresses] == [f"{PEERS[1]}/p2p-circuit"]
        await eventually(lambda: lease.relays == (PEERS[1], PEERS[2]))
        lease.withdrawn(PEERS[2])
        endpoint.asked.clear()
        await eventually(lambda: len(endpoint.asked) == 13, what="the one that is left and twelve others")
        assert PEERS[0] not in endpoint.asked, "it could make us ask for ever"
        clock.now += RESERVED_S
        await lease.renew()
        assert set(lease.relays) == {PEERS[1], PEERS[0]}
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_lease_asks_a_relay_to_which_a_stream_broke_soon_and_once_more() -> None:
    endpoint = _Endpoint(*PEERS[:2])
    lease = lease_of(endpoint)
    lease._renewals.after_s = (0.001, 0.001)
    await lease.renew()
    keeping = asyncio.ensure_future(lease.keep())
    try:
        endpoint.asked.clear()
        endpoint.refusals[PEERS[0]] = 2  # all that it is asked at first
        lease.shaken(PEERS[7])  # no relay of ours: nothing happens
        lease.shaken(PEERS[0])
        assert lease.relays == tuple(PEERS[:2]), "it may only be starting anew"
        await eventually(lambda: lease.relays == (PEERS[1], PEERS[0]))
        assert endpoint.asked.count(PEERS[0]) == 3
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_relay_that_withdraws_while_it_is_asked_is_not_taken() -> None:
    endpoint = _Endpoint(*PEERS[:2])
    lease = lease_of(endpoint)
    await lease.renew()
    ask = endpoint.reserve

    async def withdrawing(target: PeerId) -> Reserved:
        if target == PEERS[0]:
            lease.withdrawn(target)
        return await ask(target)

    endpoint.reserve = withdrawing  # type: ignore[method-assign]
    await lease.renew()
    assert lease.relays == (PEERS[1],)

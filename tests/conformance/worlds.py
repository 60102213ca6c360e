"""The two networks behind one face: the same tests run in both."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Protocol

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from swarm.clock import SystemClock
from swarm.ids import PeerId, RunId
from swarm.network.addresses import parse_address
from swarm.network.discovery.records import PeerRecord, key_name, seal, wrap
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.protocols import Directory, Endpoint
from swarm.network.rpc.dispatcher import ServeLimits
from swarm.security.signing import PrivateIdentity
from swarm.sim.network import SimNetwork
from tests.conformance.service import Bench

RUN = RunId("5a" * 32)
LIMITS = ServeLimits(calls_per_peer=80, payload_bytes_per_peer=96 << 20)


class ShiftedClock(SystemClock):
    """The real clock, and a wall clock that tests move."""

    shift_s = 0.0

    def wall(self) -> float:
        """Real time and the shift."""
        return super().wall() + self.shift_s


class Peer(Protocol):
    """What tests hold: an endpoint that has entered RUN, and what its service saw."""

    endpoint: Endpoint
    directory: Directory
    bench: Bench


class _Peer:
    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.directory = endpoint.directory
        self.bench = Bench()
        endpoint.mount(self.bench)


class SimWorld:
    """The network in memory."""

    def __init__(self, _: Path) -> None:
        self.clock = ShiftedClock()
        self._network = SimNetwork(self.clock, limits=LIMITS)
        self._names = itertools.count()

    async def peer(self) -> _Peer:
        """A new peer that knows the others."""
        endpoint = self._network.endpoint(f"peer{next(self._names)}")
        await endpoint.enter(RUN)
        return _Peer(endpoint)

    async def stranger(self) -> Endpoint:
        """One that has entered no run; whoever asks for it closes it."""
        return self._network.endpoint(f"stranger{next(self._names)}")

    async def kill(self, peer: _Peer) -> None:
        """The peer dies without a word."""
        self._network.kill(peer.endpoint.peer)

    async def plant(self, at: _Peer, owner: PeerId | None, expiry: float, body: bytes, *, forged: bool = False) -> bool:
        """Try to store a record at a peer as a stranger would; whether it was taken."""
        stranger = PeerId("Stranger1")
        signer = PeerId("Other1") if forged else stranger
        return self._network.store(key_name(RUN, PeerRecord), owner or stranger, signer, expiry, body)

    async def close(self) -> None:
        """End it."""


class LibP2PWorld:
    """Real daemons on loopback."""

    def __init__(self, home: Path) -> None:
        self.clock = ShiftedClock()
        self._home = home
        self._peers: list[_Peer] = []

    async def peer(self) -> _Peer:
        """A new peer, joined through the first one and introduced to all."""
        endpoint = await self._open(f"p{len(self._peers)}")
        await endpoint.enter(RUN)
        for other in self._peers:
            endpoint.learn(other.endpoint.peer, other.endpoint.addresses)
            other.endpoint.learn(endpoint.peer, endpoint.addresses)
        self._peers.append(_Peer(endpoint))
        return self._peers[-1]

    async def stranger(self) -> Endpoint:
        """One that has entered no run; whoever asks for it closes it."""
        return await self._open("stranger")

    async def _open(self, name: str) -> LibP2PEndpoint:
        known = [parse_address(peer.endpoint.addresses[0]) for peer in self._peers[:1]]
        config = EndpointConfig(run_dir=self._home / name, bootstrap=known, limits=LIMITS)
        return await LibP2PEndpoint.open(config, load_or_create(self._home / f"{name}.key"), self.clock)

    async def kill(self, peer: _Peer) -> None:
        """The peer dies without a word."""
        await peer.endpoint.close()

    async def plant(self, at: _Peer, owner: PeerId | None, expiry: float, body: bytes, *, forged: bool = False) -> bool:
        """Try to store a record at a peer as a stranger would; whether it was taken."""
        stranger = PrivateIdentity.generate()
        signer = PrivateIdentity.generate() if forged else stranger
        key = DHTID.generate(source=key_name(RUN, PeerRecord))
        value = seal(signer, key.to_bytes(), expiry, wrap(body))
        if forged:
            value = seal(stranger, key.to_bytes(), expiry, wrap(body))[:60] + value[60:]
        attacker = next(peer for peer in self._peers if peer is not at)
        protocol = attacker.directory._node.protocol
        target = PeerID.from_base58(at.endpoint.peer)
        stored = await protocol.call_store(target, [key], [value], expiry, subkeys=[owner or stranger.peer])
        assert stored is not None, "the store call itself failed"
        return bool(stored[0])

    async def close(self) -> None:
        """End it."""
        for peer in reversed(self._peers):
            await peer.endpoint.close()


World = SimWorld | LibP2PWorld
WORLDS: dict[str, type[SimWorld] | type[LibP2PWorld]] = {"sim": SimWorld, "libp2p": LibP2PWorld}

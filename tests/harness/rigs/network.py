"""The rig of ``swarm.network``: the two networks behind one face, and a service that shows what a handler may do.

world = WORLDS["sim"](home)  # or "libp2p": the same tests run in both
alice, bob = await world.peer(), await world.peer()
await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(number=7), timeout_s=5)
assert bob.bench.handled == 1
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from swarm.clock import SystemClock
from swarm.errors import PEER_ERRORS, Busy, Violation
from swarm.ids import PeerId, RunId
from swarm.network.addresses import parse_address
from swarm.network.discovery.records import PeerRecord, key_name, seal, wrap
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.protocols import PUBLIC_PREFIX, Answer, AnyMethod, Directory, Endpoint, Incoming, Rpc
from swarm.network.rpc.bodies import pack_request
from swarm.network.rpc.dispatcher import ServeLimits
from swarm.network.rpc.framing import Kind, encode_frame
from swarm.schema import Empty, Message
from swarm.security.signing import PrivateIdentity
from swarm.sim.network import SimNetwork
from tests.harness.rigs.clocks import DialClock as DialClock
from tests.harness.rigs.clocks import HandClock as HandClock
from tests.harness.rigs.clocks import LoopClock as LoopClock

RUN = RunId("5a" * 32)
LIMITS = ServeLimits(calls_per_peer=80, payload_bytes_per_peer=96 << 20)


class Note(Message):
    """A body with everything bodies have: text, numbers, nesting, bytes."""

    text: str = ""
    number: int = 0
    value: float = 0.0
    pairs: tuple[tuple[str, int], ...] = ()
    blob: bytes = b""


class Anything(Message):
    """A body that takes any plain data, to send what no schema allows."""

    content: Any


ECHO = Rpc("test/1/echo", Note, Note)
UP = Rpc("test/1/up", Note, Note)
DOWN = Rpc("test/1/down", Note, Note)
RAISE = Rpc("test/1/raise", Note, Note)
HANG = Rpc("test/1/hang", Note, Note)
HANG_UPLOAD = Rpc("test/1/hang-upload", Note, Note)
FULL = Rpc("test/1/full", Note, Note)
BROKEN_ADMIT = Rpc("test/1/broken-admit", Note, Note)
WRONG_ANSWER = Rpc("test/1/wrong-answer", Note, Note)
PUBLIC = Rpc(f"{PUBLIC_PREFIX}test", Note, Note)
"""Who has entered no run may call it, too."""
NOTHING = Rpc("test/1/nothing", Note, Note)
"""Nobody serves it."""


class ServiceBench:
    """The methods, and what they saw."""

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.handled = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.deadlines: list[float] = []

    def methods(self) -> Sequence[AnyMethod]:
        """See Service."""
        return [
            ECHO.handled(self._echo),
            PUBLIC.handled(self._echo),
            UP.handled_with_payload(self._up, admit=self._admit_exactly),
            DOWN.handled_with_payload(self._down),
            RAISE.handled(self._raise),
            HANG.handled_with_payload(self._hang),
            HANG_UPLOAD.handled_with_payload(self._hang, admit=self._admit_exactly),
            FULL.handled(self._echo, admit=self._full),
            BROKEN_ADMIT.handled(self._echo, admit=self._broken_admit),
            WRONG_ANSWER.handled(self._wrong_answer),
        ]

    def _admit_exactly(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        self.admitted.append(payload_bytes)
        if payload_bytes != body.number:
            raise Violation(f"expected {body.number} bytes, not {payload_bytes}")

    def _full(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        raise Busy("the queue is full")

    def _broken_admit(self, caller: PeerId, body: Note, payload_bytes: int) -> None:
        raise ZeroDivisionError

    async def _echo(self, caller: PeerId, body: Note) -> Note:
        self.handled += 1
        return body

    async def _up(self, caller: PeerId, body: Note, incoming: Incoming) -> Answer[Note]:
        self.handled += 1
        payload = incoming.payload
        payload[:1] = b"!"  # the buffer is the receiver's own
        return Answer(Note(number=len(payload), value=float(sum(payload[1:64]))))

    async def _down(self, caller: PeerId, body: Note, incoming: Incoming) -> Answer[Note]:
        return Answer(Note(text="down"), payload=bytes(range(256)) * (body.number // 256))

    async def _raise(self, caller: PeerId, body: Note) -> Note:
        if body.text == "bug":
            raise ZeroDivisionError("a secret")
        raise PEER_ERRORS[body.text]("as asked")

    async def _hang(self, caller: PeerId, body: Note, incoming: Incoming) -> Answer[Note]:
        self.deadlines.append(incoming.deadline)
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Answer(Note(text="released"))

    async def _wrong_answer(self, caller: PeerId, body: Note) -> Any:
        return Anything(content=body.text)


# --- two worlds -------------------------------------------------------------------------------------------------------


class ShiftedClock(SystemClock):
    """The real clock, and a wall clock that tests move."""

    shift_s = 0.0

    def wall(self) -> float:
        """Return the real time and the shift."""
        return super().wall() + self.shift_s


class Peer(Protocol):
    """What tests hold: an endpoint that has entered RUN, and what its service saw."""

    endpoint: Endpoint
    directory: Directory
    bench: ServiceBench


class _Peer:
    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.directory = endpoint.directory
        self.bench = ServiceBench()
        endpoint.mount(self.bench)


class SimWorld:
    """The network in memory."""

    def __init__(self, _: Path) -> None:
        self.clock = ShiftedClock()
        self._network = SimNetwork(self.clock, limits=LIMITS)
        self._names = itertools.count()

    async def peer(self) -> _Peer:
        """Return a new peer that knows the others."""
        endpoint = self._network.endpoint(f"peer{next(self._names)}")
        await endpoint.enter(RUN)
        return _Peer(endpoint)

    async def stranger(self) -> Endpoint:
        """Return an endpoint that has entered no run; the caller closes it."""
        return self._network.endpoint(f"stranger{next(self._names)}")

    async def kill(self, peer: _Peer) -> None:
        """Have a peer die without a word."""
        self._network.kill(peer.endpoint.peer)

    async def plant(self, at: _Peer, owner: PeerId | None, expiry: float, body: bytes, *, forged: bool = False) -> bool:
        """Try to store a record at a peer as a stranger would, and return whether it was taken."""
        stranger = PeerId("Stranger1")
        signer = PeerId("Other1") if forged else stranger
        return self._network.store(key_name(RUN, PeerRecord), owner or stranger, signer, expiry, body)

    async def close(self) -> None:
        """End the world."""


class LibP2PWorld:
    """Real daemons on loopback."""

    def __init__(self, home: Path) -> None:
        self.clock = ShiftedClock()
        self._home = home
        self._peers: list[_Peer] = []

    async def peer(self) -> _Peer:
        """Return a new peer, joined through the first one and introduced to all."""
        endpoint = await self._open(f"p{len(self._peers)}")
        await endpoint.enter(RUN)
        for other in self._peers:
            endpoint.learn(other.endpoint.peer, other.endpoint.addresses)
            other.endpoint.learn(endpoint.peer, endpoint.addresses)
        self._peers.append(_Peer(endpoint))
        return self._peers[-1]

    async def stranger(self) -> Endpoint:
        """Return an endpoint that has entered no run; the caller closes it."""
        return await self._open("stranger")

    async def _open(self, name: str) -> LibP2PEndpoint:
        known = [parse_address(peer.endpoint.addresses[0]) for peer in self._peers[:1]]
        config = EndpointConfig(run_dir=self._home / name, bootstrap=known, limits=LIMITS)
        return await LibP2PEndpoint.open(config, load_or_create(self._home / f"{name}.key"), self.clock)

    async def kill(self, peer: _Peer) -> None:
        """Have a peer die without a word."""
        await peer.endpoint.close()

    async def plant(self, at: _Peer, owner: PeerId | None, expiry: float, body: bytes, *, forged: bool = False) -> bool:
        """Try to store a record at a peer as a stranger would, and return whether it was taken."""
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
        """End the world."""
        for peer in reversed(self._peers):
            await peer.endpoint.close()


World = SimWorld | LibP2PWorld
WORLDS: dict[str, type[SimWorld] | type[LibP2PWorld]] = {"sim": SimWorld, "libp2p": LibP2PWorld}


# --- services of one method -------------------------------------------------------------------------------------------


class Ask(Message):
    """A question without content."""


GIVE = Rpc("test/1/give", Ask, Empty)
SLOW = Rpc("test/1/slow", Ask, Empty)


class Generous:
    """A service whose one method answers with many bytes."""

    def __init__(self, size: int) -> None:
        self._size, self.over = size, 0

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [GIVE.handled_with_payload(self._give, over=self._over)]

    async def _give(self, caller: PeerId, body: Ask, incoming: Incoming) -> Answer[Empty]:
        return Answer(Empty(), bytes(self._size))

    def _over(self, caller: PeerId, body: Message) -> None:
        self.over += 1


class Slow:
    """A service whose one method takes a payload and never answers."""

    def __init__(self) -> None:
        self.begun = 0

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [SLOW.handled(self._slow, admit=lambda caller, body, size: None)]

    async def _slow(self, caller: PeerId, body: Ask) -> Empty:
        self.begun += 1
        return await asyncio.get_running_loop().create_future()


def request(
    call: int, what: str = "slow", *, remaining_s: float = 30.0, payload_bytes: int = 0, max_reply_bytes: int = 0
) -> bytes:
    """Return the frame of a call of ``test/1/WHAT``."""
    head, body = pack_request(f"test/1/{what}", remaining_s, max_reply_bytes, Ask())
    return encode_frame(Kind.REQUEST, call, body, payload_bytes, head=head)

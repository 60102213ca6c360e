"""The attacks of one identity, each a coroutine that goes on until it is cancelled, at most so fast.

An attacker does not keep to interfaces: streams are opened and records are stored past those of the endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from peers.chaos.strangers.bodies import AnyRpc, all_rpcs, frames, oversized, well_formed
from peers.chaos.strangers.findings import Attack, StrangerFindings
from swarm.clock import SystemClock
from swarm.consensus.changes import admission_bytes
from swarm.consensus.roster import Member
from swarm.errors import PeerError, Unreachable
from swarm.ids import PeerId, RunId
from swarm.network.discovery.records import PeerRecord, encode_record, key_name, seal, wrap
from swarm.network.endpoint import PUBLIC_PROTOCOL, LibP2PEndpoint
from swarm.network.protocols import Rpc
from swarm.network.rpc.framing import MAX_STRANGER_BYTES, Kind, encode_header
from swarm.network.rpc.strangers import MAX_STRANGER_BODY_BYTES
from swarm.schema import Message
from swarm.security.signing import PrivateIdentity
from swarm.step.messages import JOIN
from swarm.step.observe_messages import HASH, STANDING, HashRequest, StandingRequest

BYTES_S = 1e6
"""Of large frames, of all identities together."""
CALLS_S, LOOKUPS_S, RECORDS_S = 1000.0, 100.0, 200.0
"""Of small calls, of questions to directories and of records, of all identities together."""
AT_ONCE = 48
"""Calls of one identity that wait for an answer: below what a stranger is cut off for."""
ANSWER_S, REFUSED_S = 2.0, 0.05
EACH, LEAST_BYTES = 8, 8 << 10
HALF_FRAMES = 64
"""Streams of one identity with half a frame."""
TRIES = 3
MOST_ANSWERED = 64 << 20
RECORD_S = 110.0


class PlainBody(Message):
    """A body that is sent as the plain data it holds, whatever its method's form."""

    content: Any

    def to_wire(self) -> Any:
        """See :class:`~swarm.schema.Message`."""
        return self.content


@dataclass(slots=True)
class Stranger:
    """One identity, which has entered the run's protocols where it knows the ``run``. ``shares`` are its part of what
    all identities together do, by attack; ``findings`` are theirs together."""

    endpoint: LibP2PEndpoint
    run: RunId | None
    targets: tuple[PeerId, ...]
    rng: random.Random
    shares: Mapping[Attack, float]
    findings: StrangerFindings
    _turn: Iterator[PeerId] = field(init=False)

    def __post_init__(self) -> None:
        self.turn_to(self.targets, self.findings)

    def turn_to(self, targets: tuple[PeerId, ...], findings: StrangerFindings) -> None:
        """Attack these from now on, and write down there what comes of it."""
        self.targets, self.findings, self._turn = targets, findings, itertools.cycle(targets)

    def rpcs(self) -> list[AnyRpc]:
        """Those it can call: public ones without the run's id."""
        return [rpc for rpc in all_rpcs() if self.run is not None or rpc.public]

    def next_target(self) -> PeerId:
        """Each in turn."""
        return next(self._turn)

    async def call(self, rpc: AnyRpc, content: Any, *, most: int = 0, target: PeerId | None = None) -> Any:
        """Make one call and count it; what was answered, None when nothing was."""
        loose: AnyRpc = Rpc(rpc.name, PlainBody, rpc.reply)
        self.findings.calls += 1
        try:
            answer, _ = await self.endpoint.call(
                target or self.next_target(),
                loose,
                PlainBody(content=content),
                timeout_s=ANSWER_S,
                max_reply_bytes=most,
            )
        except PeerError as error:
            self.findings.outcomes[type(error).__name__] += 1
            if isinstance(error, Unreachable):
                await asyncio.sleep(REFUSED_S)
            return None
        self.findings.outcomes["answered"] += 1
        self.findings.answered[rpc.name] += 1
        return answer


class _Pace:
    """Lets units go at a rate."""

    def __init__(self, rate: float) -> None:
        self._rate, self._gone, self._began = rate, 0.0, asyncio.get_running_loop().time()

    async def take(self, units: float) -> None:
        """Wait until these may go."""
        self._gone += units
        await asyncio.sleep(max(0.0, self._began + self._gone / self._rate - asyncio.get_running_loop().time()))


async def _send(stranger: Stranger, shots: Iterator[tuple[AnyRpc, Any, float]], rate: float) -> None:
    """Make calls, some at once, at ``rate`` units a second; each costs as many as it says."""
    pace, free = _Pace(rate), asyncio.Semaphore(AT_ONCE)

    async def shoot(rpc: AnyRpc, content: Any) -> None:
        try:
            await stranger.call(rpc, content)
        finally:
            free.release()

    async with asyncio.TaskGroup() as group:
        for rpc, content, units in shots:
            await pace.take(units)
            await free.acquire()
            group.create_task(shoot(rpc, content))


async def large(stranger: Stranger) -> None:
    """Frames of legal size: most as long as a stranger's may be, some as long as a member's."""
    rpcs = stranger.rpcs()

    def one() -> tuple[AnyRpc, Any, float]:
        """As long as may be; made when it is sent: making all before takes seconds."""
        for _ in range(EACH):
            rpc = stranger.rng.choice(rpcs)
            (packed,) = frames(rpc, 1, stranger.rng.randrange(1 << 30), MAX_STRANGER_BODY_BYTES)
            if len(packed) >= LEAST_BYTES:
                break
        return rpc, msgpack.unpackb(packed, use_list=False, strict_map_key=False), _counted(stranger, len(packed))

    def shots() -> Iterator[tuple[AnyRpc, Any, float]]:
        too_long = oversized(stranger.rng)
        for number in itertools.count():
            if number % 24 == 23:
                content = next(too_long)
                yield stranger.rng.choice(rpcs), content, _counted(stranger, len(msgpack.packb(content)))
            else:
                yield one()

    await _send(stranger, shots(), BYTES_S * stranger.shares["large"])


def _counted(stranger: Stranger, size: int) -> float:
    stranger.findings.bytes += size
    return float(size)


async def small(stranger: Stranger) -> None:
    """Many small calls of every method, of its form."""
    rpcs, known = stranger.rpcs(), await _known(stranger)

    def shots() -> Iterator[tuple[AnyRpc, Any, float]]:
        while True:
            rpc = stranger.rng.choice(rpcs)
            yield rpc, well_formed(rpc, stranger.rng, known), 1.0

    await _send(stranger, shots(), CALLS_S * stranger.shares["small"])


async def methods(stranger: Stranger) -> None:
    """Every method of every target some times, with bodies that may be answered: what strangers can read."""
    for rpc in stranger.rpcs():
        for target in stranger.targets:
            known = await _known(stranger)
            for _ in range(TRIES):
                body = well_formed(rpc, stranger.rng, known)
                await stranger.call(rpc, body, most=MOST_ANSWERED, target=target)
                if rpc.name in stranger.findings.answered:
                    break


async def directory(stranger: Stranger) -> None:
    """Store records of identities that nobody has, in every target's directory, and ask for all records again and
    again."""
    if stranger.run is None:
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(_store(stranger, stranger.run))
        group.create_task(_look_up(stranger, stranger.run))


async def _store(stranger: Stranger, run: RunId) -> None:
    protocol, key, ids = _protocol(stranger, run)
    clock, pace = SystemClock(), _Pace(RECORDS_S * stranger.shares["directory"])
    for number in itertools.count():
        await pace.take(1.0)
        owner = PrivateIdentity(stranger.rng.randbytes(32))
        expiry = clock.wall() + RECORD_S
        record = PeerRecord(
            role="stage" if number % 2 else "trainer", name=f"sybil-{number}", incarnation=1, status="waiting", step=0,
            addresses=(f"/ip4/127.0.0.1/tcp/9/p2p/{owner.peer}",),
        )  # fmt: skip
        value = seal(owner, key.to_bytes(), expiry, wrap(encode_record(record)))
        for target in ids:
            taken = await protocol.call_store(target, [key], [value], [expiry], [str(owner.peer)])
            if taken and taken[0]:
                stranger.findings.records_taken += 1
            else:
                stranger.findings.records_refused += 1


async def _look_up(stranger: Stranger, run: RunId) -> None:
    protocol, key, ids = _protocol(stranger, run)
    pace = _Pace(LOOKUPS_S * stranger.shares["directory"])
    for target in itertools.cycle(ids):
        await pace.take(1.0)
        stranger.findings.lookups += 1
        stranger.findings.lookups_answered += await protocol.call_find(target, [key]) is not None


def _protocol(stranger: Stranger, run: RunId) -> tuple[Any, Any, list[Any]]:
    """hivemind's protocol, the key of all records, and the targets as it names them."""
    node = stranger.endpoint.directory._node
    name_of = type(node.protocol.p2p.peer_id).from_base58
    return (
        node.protocol,
        type(node.node_id).generate(source=key_name(run, PeerRecord)),
        list(map(name_of, stranger.targets)),
    )


async def slow(stranger: Stranger) -> None:
    """Streams with half a frame each; who closes one gets another."""
    async with asyncio.TaskGroup() as group:
        for _ in range(HALF_FRAMES):
            group.create_task(_half_frames(stranger))


async def _half_frames(stranger: Stranger) -> None:
    protocol = PUBLIC_PROTOCOL if stranger.run is None else f"swarm/control/1/{stranger.run[:32]}"
    size = MAX_STRANGER_BYTES if stranger.run is not None else 4 << 10
    while True:
        with contextlib.suppress(Unreachable, OSError):
            reader, writer = await stranger.endpoint._outgoing.dialler.open_stream(stranger.next_target(), protocol)
            try:
                writer.write(encode_header(Kind.REQUEST, 1, size) + b"\0" * (size // 2))
                await writer.drain()
                stranger.findings.slow += 1
                await reader.read()
            finally:
                writer.close()
        await asyncio.sleep(1.0)


async def join(stranger: Stranger) -> None:
    """Ask to be in the roster, as a trainer and as a host of the first stage."""
    if stranger.run is None:
        return
    for number in itertools.count():
        target = stranger.next_target()
        standing = await stranger.call(STANDING, StandingRequest().to_wire(), target=target)
        if standing is not None and standing.closed is not None:
            await _join(stranger, stranger.run, target, standing.closed, stage=bool(number % 2))
        await asyncio.sleep(1.0)


async def _join(stranger: Stranger, run: RunId, target: PeerId, closed: int, *, stage: bool) -> None:
    before = await stranger.call(HASH, HashRequest(step=closed).to_wire(), target=target)
    member = Member(
        peer=stranger.endpoint.peer, role="stage" if stage else "trainer", name="stranger", incarnation=1,
        part="stage-0" if stage else None, addresses=stranger.endpoint.addresses,
    )  # fmt: skip
    digest = "" if before is None else before.digest
    signature = stranger.endpoint._identity.private.sign(admission_bytes(run, closed + 1, digest, member))
    body = {"step": closed + 1, "member": member.to_wire(), "signature": signature}
    await stranger.call(JOIN, body, target=target)


async def _known(stranger: Stranger) -> Mapping[str, Any]:
    """Return what a body that is to be answered must have right, as far as strangers find it out."""
    known: dict[str, Any] = {"run": stranger.run, "part": "stage-0", "peer": stranger.endpoint.peer, "chunk": 0}
    if stranger.run is not None:
        standing = await stranger.call(STANDING, StandingRequest().to_wire())
        if standing is not None and standing.closed is not None:
            known["step"] = standing.closed
            told = await stranger.call(HASH, HashRequest(step=standing.closed).to_wire())
            known |= {} if told is None else {"digest": told.digest}
    return known


DOERS: Mapping[Attack, Callable[[Stranger], Coroutine[Any, Any, None]]] = {
    "large": large,
    "small": small,
    "directory": directory,
    "slow": slow,
    "methods": methods,
    "join": join,
}

"""What a hop got and sent, by hashes: its receipt signs their digest, and each sender signs the hash of what it sends.

So two neighbours that tell different things of one tensor are told apart: by the sender's own signature, which the
receiver shows. Hashed are the bytes on the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from blake3 import blake3

from swarm.errors import Violation
from swarm.ids import JourneyKey, PeerId, RunId
from swarm.network.protocols import Payload
from swarm.security.signing import receipt_bytes, route_bytes, seal_bytes

HASH_BYTES = 32
NOTHING = bytes(HASH_BYTES)
"""In the place of a hash: nothing was got, or sent."""
OFF_LOOP_BYTES = 1 << 20
"""A payload that is larger is hashed off the event loop, which would else stand still meanwhile."""


class Check(Protocol):
    """Verifies a signature by a peer."""

    def __call__(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Return whether ``signature`` over ``data`` is ``peer``'s."""


async def hash_of(payload: Payload | None) -> bytes:
    """Return the BLAKE3 of a payload; NOTHING of none. 0.1 to 0.3 ms a MiB."""
    if payload is None:
        return NOTHING
    data = memoryview(payload).cast("B")
    if data.nbytes < OFF_LOOP_BYTES:
        return blake3(data).digest()
    return await asyncio.to_thread(lambda: blake3(data).digest())


class Content(NamedTuple):
    """The hashes of what one replica got and sent for a microbatch: its input, its output, the gradient of its output
    (of a last stage that computes the loss: the targets), and the gradient of its input."""

    input: bytes = NOTHING
    output: bytes = NOTHING
    gradient: bytes = NOTHING
    sent: bytes = NOTHING

    def to_wire(self) -> bytes:
        """One after the other."""
        return b"".join(self)

    @classmethod
    def from_wire(cls, data: bytes) -> Content:
        """Raises Violation for another length."""
        if len(data) != len(cls._fields) * HASH_BYTES:
            raise Violation(f"a receipt of {len(data)} bytes of hashes")
        return cls(*(data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)))


def told_digest(content: bytes, seals: tuple[bytes, bytes]) -> bytes:
    """Return what a receipt signs of a content on the wire and of the signatures under what came.

    The receipt goes to the step's leader, perhaps in another organisation. There hashes alone would confirm a guessed
    microbatch; the signatures are known only to those between whom its tensors went."""
    return blake3(b"".join((content, *seals))).digest()


class Sealed(NamedTuple):
    """A payload that came: its hash, and its sender's signature."""

    hash: bytes = NOTHING
    signature: bytes = b""


class Across(NamedTuple):
    """Where a tensor of one microbatch goes: ``hop`` is the stage of who gets it, "forward" or "backward"."""

    key: JourneyKey
    hop: int
    direction: str

    @property
    def again(self) -> Across:
        """The same for what is asked for with a recall, which knows of no attempt, and may be computed anew."""
        return Across(self.key._replace(attempt=0), self.hop, f"{self.direction} again")


class Seals:
    """One peer's signatures under what it sends in a run, and its checks of those of others."""

    def __init__(self, run: RunId, sign: Callable[[bytes], bytes], verify: Check) -> None:
        self._run, self._sign, self._verify = run, sign, verify

    def choose(self, key: JourneyKey, route: Sequence[PeerId]) -> bytes:
        """Return our signature, as its trainer, that an attempt at a microbatch takes a route."""
        return self._sign(route_bytes(self._run, key, route))

    def chosen(self, key: JourneyKey, route: Sequence[str], signature: bytes) -> bool:
        """Return whether an attempt takes a route, as its trainer signed."""
        return self._verify(key.microbatch.trainer, route_bytes(self._run, key, route), signature)

    def seal(self, across: Across, hashed: bytes) -> bytes:
        """Return our signature under what we send."""
        return self._sign(seal_bytes(self._run, across.key, across.hop, across.direction, hashed))

    def sealed_by(self, peer: PeerId, across: Across, sealed: Sealed) -> bool:
        """Return whether ``peer`` signed that it sends this."""
        signed = seal_bytes(self._run, across.key, across.hop, across.direction, sealed.hash)
        return self._verify(peer, signed, sealed.signature)

    def receipted_by(self, peer: PeerId, key: JourneyKey, hop: int, told: bytes, tokens: int, receipt: bytes) -> bool:
        """Return whether the receipt is of what ``peer`` ``told`` of its stage ``hop`` (:func:`told_digest`)."""
        return self._verify(peer, receipt_bytes(self._run, key, hop, told, tokens), receipt)

    async def opened(self, sender: PeerId, across: Across, payload: Payload, signature: bytes) -> Sealed:
        """Return the hash of what came, with the signature. Raises Violation where that is not its sender's."""
        sealed = Sealed(await hash_of(payload), signature)
        if not self.sealed_by(sender, across, sealed):
            raise Violation("the signature is not of what was sent", peer=sender)
        return sealed


class Shown(NamedTuple):
    """What a replica said of one hop: what it got and sent, and the signatures under what it got. ``named`` are all
    that the hop was ever given to; ``again`` says that its trainer asked again for what it gets or sends."""

    replica: PeerId
    named: frozenset[PeerId]
    content: Content
    seals: tuple[bytes, bytes]
    again: bool = False


class Differing(NamedTuple):
    """A replica of ``stage`` that told of a tensor what cannot be. Where it was computed anew, perhaps to other bits,
    nobody can say who lies, or whether any does: it is one ``among`` these."""

    stage: int
    peer: PeerId
    why: str
    among: frozenset[PeerId] = frozenset()


def differing(seals: Seals, key: JourneyKey, way: Sequence[Shown]) -> Differing | None:
    """Return who of two neighbours does not tell the truth of what went from one to the other, else among whom it is;
    None where all agree. The ``way`` begins and ends with the trainer.

    Who got something must show the signature of one that was given the hop before it, where the hop's replica says that
    it sent something else. Who signed another thing than its receipt says lies itself; not where the hop, or the one
    that it sent to, was given to a second replica, or either was asked again, or the receiver shows what it asked for
    itself: what is asked for again may be computed anew, to other bits. Signatures of a way that was given up are of no
    use in another. The trainer names others, never itself.
    """
    found = [
        one
        for stage, (before, behind) in enumerate(pairwise(way))
        for one in (
            _differs(seals, Across(key, stage, "forward"), (before, behind)),
            _differs(seals, Across(key, stage - 1, "backward"), (behind, before)),
        )
        if one is not None
    ]
    return min(found, key=lambda one: bool(one.among), default=None)


def _differs(seals: Seals, across: Across, between: tuple[Shown, Shown]) -> Differing | None:
    """Return which of a sender and a receiver it is, or that nobody can say; None where they agree."""
    sender, receiver = between
    if across.direction == "forward":
        said, came = sender.content.output, Sealed(receiver.content.input, receiver.seals[0])
        at, why = across.hop - 1, "differs about what it got, or sent, on the way out"
    else:
        said, came = sender.content.sent, Sealed(receiver.content.gradient, receiver.seals[1])
        at, why = across.hop + 1, "differs about a gradient that it got, or sent"
    if came.hash == said:
        return None
    anew = {peer for peer in sender.named if seals.sealed_by(peer, across.again, came)}
    by = anew or {peer for peer in sender.named if seals.sealed_by(peer, across, came)}
    trainer = across.key.microbatch.trainer
    if not by and receiver.replica != trainer:
        return Differing(across.hop, receiver.replica, why)
    if sender.replica == trainer:
        return None
    unsure = anew or (by and any(len(one.named) > 1 or one.again for one in between))
    among = frozenset([*by, sender.replica, receiver.replica]) - {trainer} if unsure else frozenset()
    return Differing(at, sender.replica, why, among)

"""The links between peers in memory, and what can be wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from swarm.clock import Clock
from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.protocols import Payload
from swarm.sim.links import LinkShape, Traffic

Delay = Callable[[PeerId, PeerId, int], float]
"""(from, to, bytes) -> seconds that a message takes."""


ACTIVATIONS = ("pipeline/1/", "trainer/1/")
"""Methods whose payloads are activations and gradients between stages, but for token ids."""
TOKENS = "pipeline/1/targets"
AVERAGES = ("averaging/1/", "versions/1/", "mass/1/")
"""Methods whose payloads are a part's sums, means or weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadWeights:
    """Bytes on the virtual wire for which one byte of a payload stands, so that a tiny real model is as heavy on its
    links as a large one. All other messages, heads, records and digests among them, weigh what they are.

    Attributes:
        activations: Of what travels between stages.
        averages: Of what travels in averaging, by a pattern of the sender's name, because parts differ in real size.
            The first that fits counts.
    """

    activations: float = 1.0
    averages: Mapping[str, float] = field(default_factory=dict)

    def added(self, method: str, sender: str, payload_bytes: int) -> int:
        """Return the bytes that a payload weighs beyond its own; negative where it stands for a smaller one.

        Args:
            method: Name of the call that it belongs to, as its question or its answer.
            sender: Name of the peer that sends it.
            payload_bytes: Its real size.
        """
        factor = 1.0
        if method.startswith(ACTIVATIONS) and method != TOKENS:
            factor = self.activations
        elif method.startswith(AVERAGES):
            fitting = (weight for pattern, weight in self.averages.items() if fnmatchcase(sender, pattern))
            factor = next(fitting, 1.0)
        return round(payload_bytes * (factor - 1.0))


def _no_delay(source: PeerId, target: PeerId, size: int) -> float:
    return 0.0


class Wires:
    """Carries messages as ``traffic`` describes, whose names of peers are ``names`` (by default their ids); ``delay``
    is added; ``weights`` say for how many bytes payloads stand. Commands take effect at once, also on what is under
    way."""

    def __init__(self, clock: Clock, traffic: Traffic | None, delay: Delay = _no_delay) -> None:
        self.clock, self.traffic, self.delay = clock, traffic or Traffic(), delay
        self.weights = PayloadWeights()
        self.names: dict[PeerId, str] = {}
        self._held: set[PeerId] = set()
        self._corrupt: dict[tuple[PeerId, PeerId], int] = {}
        self._changed = asyncio.Event()

    def cut(self, source: PeerId, target: PeerId) -> None:
        """From now on nothing from ``source`` reaches ``target``: calls over that way, also those that wait for their
        answer, run into their deadline, as when packets are dropped; what is still wanted when the link is mended
        arrives then. One direction; call twice for both."""
        self.traffic.cut((self._named(source),), (self._named(target),), both=False)

    def mend(self, source: PeerId, target: PeerId) -> None:
        """Undo :meth:`cut`, and slowness, in both directions."""
        self.traffic.heal((self._named(source),), (self._named(target),))
        self._wake()

    def heal(self) -> None:
        """Mend all links."""
        self.traffic.heal()
        self._wake()

    def slow(self, source: PeerId, target: PeerId, shape: LinkShape, *, both: bool = True) -> None:
        """The link has another shape from now on."""
        self.traffic.slow(self._named(source), self._named(target), shape, both=both)

    def hold(self, peer: PeerId) -> None:
        """Nothing reaches the peer or leaves it until :meth:`release`: as others see a process that was stopped."""
        self._held.add(peer)

    def release(self, peer: PeerId) -> None:
        """What was held travels on."""
        self._held.discard(peer)
        self._wake()

    def corrupt(self, source: PeerId, target: PeerId, messages: int = 1) -> None:
        """The next payloads in this direction arrive with one bit flipped (the top exponent bit of a float32 in the
        middle), as from a machine with bad memory: the transport itself would notice."""
        self._corrupt[source, target] = self._corrupt.get((source, target), 0) + messages

    def corrupt_left(self, source: PeerId, target: PeerId) -> int:
        """Return how many payloads are still to be corrupted."""
        return self._corrupt.get((source, target), 0)

    def received(self, source: PeerId, target: PeerId, payload: Payload) -> bytearray:
        """The receiver's own copy of a payload."""
        copy = bytearray(payload)
        left = self._corrupt.get((source, target), 0)
        if copy and left:
            self._corrupt[source, target] = left - 1
            copy[min(len(copy) - 1, len(copy) // 8 * 4 + 3)] ^= 0x40
        return copy

    def added_weight(self, method: str, sender: PeerId, payload_bytes: int) -> int:
        """See :meth:`PayloadWeights.added`."""
        return self.weights.added(method, self._named(sender), payload_bytes)

    async def carry(self, source: PeerId, target: PeerId, size: int) -> None:
        """Let a message travel. Waits while the link is cut or a side is held: a deadline may end it. Raises
        Unreachable when the link resets the connection. Cancel freely."""
        names = self._named(source), self._named(target)
        fate = self.traffic.fate(*names, size, self.clock.monotonic())
        seconds = fate.seconds + self.delay(source, target, size)
        if seconds > 0:
            await self.clock.sleep(seconds)
        if fate.reset:
            raise Unreachable("the stream broke", peer=target)
        while self.traffic.is_cut(*names) or source in self._held or target in self._held:
            await self._changed.wait()

    def _named(self, peer: PeerId) -> str:
        return self.names.get(peer, peer)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

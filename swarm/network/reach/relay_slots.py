"""Limit each peer's share of a relay: a decider without I/O, so that each bound can be tested alone.

A peer is *known* when the run's predicate says so (the roster's members); everybody else is a *stranger*: somebody who
is joining, or somebody who has only read the public manifest. Strangers share small bounds of their own, so that they
never take what a member needs, however many identities they make up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.errors import Busy
from swarm.ids import PeerId

RESERVED_S = 60.0
"""How long a reservation holds unless it is renewed."""

MayRelay = Callable[[PeerId], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Each number counts peers or streams held at one time; those of strangers count towards the others, too.

    A *handshake* is a stream whose caller has not been connected yet. A circuit counts for both its ends and is
    a stranger's when one of them is; a pair of peers needs one. Those of strangers end after ``stranger_idle_s``
    without a byte (libp2p's own keep-alive sends some every 30 s) and carry ``stranger_bytes_per_s``, both ways
    together. No total: anyone who joins downloads its state before it is known. ``bytes_per_s`` is for all circuits
    together, ``bytes_per_s_of_peer`` for those of one peer; None: no limit.
    """

    reservations: int = 128
    stranger_reservations: int = 8
    handshakes: int = 128
    handshakes_per_peer: int = 32
    stranger_handshakes: int = 32
    handshakes_per_stranger: int = 8
    circuits: int = 256
    circuits_per_peer: int = 64
    stranger_circuits: int = 32
    circuits_per_stranger: int = 8
    stranger_idle_s: float = 90.0
    stranger_bytes_per_s: float = 8 << 20
    bytes_per_s: float | None = None
    bytes_per_s_of_peer: float | None = None


@dataclass(slots=True, eq=False)
class RelaySlot:
    """One stream of ``caller``'s. ``target`` is whom it is being connected to; ``shaking`` until it is."""

    caller: PeerId
    target: PeerId | None = None
    shaking: bool = True


class RelaySlots:
    """Reservations and streams, and the bounds on both."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self.may: MayRelay = lambda peer: False
        self._taken: set[RelaySlot] = set()
        self._reserved: dict[PeerId, float] = {}

    @property
    def circuits(self) -> int:
        """The number of pairs of streams connected now."""
        return sum(not slot.shaking for slot in self._taken)

    @property
    def ends(self) -> frozenset[PeerId]:
        """Those at an end of a circuit, or of one that is being made."""
        return frozenset(end for slot in self._taken for end in (slot.caller, slot.target) if end is not None)

    def reserve(self, peer: PeerId, now: float) -> None:
        """Hold a reservation for 60 s from ``now``; renewing is the same. Raises Busy when too many have asked."""
        self._reserved = {each: until for each, until in self._reserved.items() if until > now}
        others = [each for each in self._reserved if each != peer]
        if len(others) >= self.limits.reservations:
            raise Busy(f"this relay serves {len(others)} peers already")
        if not self.may(peer) and sum(not self.may(each) for each in others) >= self.limits.stranger_reservations:
            raise Busy(f"this relay serves {self.limits.stranger_reservations} peers already that are not members")
        self._reserved[peer] = now + RESERVED_S

    def holders(self, now: float) -> tuple[PeerId, ...]:
        """The peers with a reservation."""
        return tuple(peer for peer, until in self._reserved.items() if until > now)

    def holds(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer has a reservation."""
        return self._reserved.get(peer, 0.0) > now

    def sit(self, caller: PeerId) -> RelaySlot | None:
        """Room for a stream that has just come, to be given back by :meth:`leave`; None when there is none."""
        limits, known = self.limits, self.may(caller)
        shaking = [slot for slot in self._taken if slot.shaking]
        own = sum(slot.caller == caller for slot in shaking)
        if len(shaking) >= limits.handshakes or own >= (
            limits.handshakes_per_peer if known else limits.handshakes_per_stranger
        ):
            return None
        if not known and sum(not self.may(slot.caller) for slot in shaking) >= limits.stranger_handshakes:
            return None
        slot = RelaySlot(caller)
        self._taken.add(slot)
        return slot

    def aim(self, slot: RelaySlot, target: PeerId) -> bool:
        """Return whether a stream may become a circuit to ``target``; it counts as one from then on."""
        limits = self.limits
        circuits = [(each.caller, each.target) for each in self._taken if each.target is not None]
        if len(circuits) >= limits.circuits:
            return False
        for end in (slot.caller, target):
            most = limits.circuits_per_peer if self.may(end) else limits.circuits_per_stranger
            if sum(end in ends for ends in circuits) >= most:
                return False
        if self.bounded(slot.caller, target):
            foreign = sum(self.bounded(caller, there) for caller, there in circuits if there is not None)
            if foreign >= limits.stranger_circuits:
                return False
        slot.target = target
        return True

    def leave(self, slot: RelaySlot) -> None:
        """The stream is over."""
        self._taken.discard(slot)

    def bounded(self, caller: PeerId, target: PeerId) -> bool:
        """Return whether what these two send each other is limited: unless both are known. Changes when one becomes
        so."""
        return not (self.may(caller) and self.may(target))

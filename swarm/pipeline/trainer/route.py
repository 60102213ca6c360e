"""The route of one microbatch: who computed what, whose turn it is, and what was tried at each hop. Pure.

A hop's turn begins when the hop before it (on the way back: the one after it) reported; from then on its deadline runs.
Every replica that was ever named at a hop may still answer: the first answer counts, and names its sender.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from swarm.ids import PeerId
from swarm.pipeline.trainer.pace import Work
from swarm.waiting import ExponentialBackoff


@dataclass(frozen=True, slots=True)
class Receipt:
    """A replica's signature that it added the microbatch; with hosted ends the last stage's loss."""

    signature: bytes
    loss_sum: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Hop:
    """One stage of the way."""

    replica: PeerId
    named: set[PeerId]
    """Everybody who was ever given the hop."""
    forwarded: bool = False
    receipts: dict[PeerId, Receipt] = field(default_factory=dict)
    asked: dict[PeerId, tuple[float, Work]] = field(default_factory=dict)
    """When each replica's turn began and for what, until it is heard of."""
    due: float | None = None
    """The end of the present turn; None while it is nobody's turn."""
    misses: int = 0
    """Turns that passed."""
    tried: set[PeerId] = field(default_factory=set)
    """Who is not chosen again before all others were."""
    failed: list[PeerId] = field(default_factory=list)
    """Who failed on the microbatch itself, in order."""
    turned: float | None = None
    """When the present replica handed the gradient on, so that only its receipt is missing; None before."""
    nudged: bool = False
    """Whether the present replica was asked for news that only did not arrive."""
    backoff: ExponentialBackoff | None = None
    """Pauses after all replicas were tried; None before that happened."""

    @property
    def contributed(self) -> bool:
        """Whether the replica that the route names has added the microbatch."""
        return self.replica in self.receipts


class RouteState:
    """Where one journey stands. ``back`` is set when the loss was computed and the way back began."""

    def __init__(self, route: Sequence[PeerId]) -> None:
        self.hops = [Hop(peer, {peer}) for peer in route]
        self.attempt = 0
        self.back = False
        self.home = False
        """Whether the first stage's gradient is here, or none is awaited."""

    def extend(self, peer: PeerId) -> None:
        """Choose the replica of the next stage."""
        self.hops.append(Hop(peer, {peer}))

    @property
    def route(self) -> tuple[PeerId, ...]:
        """One replica per stage."""
        return tuple(hop.replica for hop in self.hops)

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.hops) - 1

    @property
    def complete(self) -> bool:
        """Whether every stage has added the microbatch, and the gradient is home."""
        return self.home and all(hop.contributed for hop in self.hops)

    @property
    def returned(self) -> bool:
        """Whether the gradient has come all the way, so that only receipts may be missing."""
        return self.back and self.home and (self.hops[0].turned is not None or self.hops[0].contributed)

    def handed_on(self, at: int) -> bool:
        """Whether the gradient that a hop hands on has arrived: before it something was done with it, or it is here."""
        return self.home if at == 0 else self.hops[at - 1].turned is not None or self.hops[at - 1].contributed

    def turn_of(self, hop: Hop) -> Work:
        """What a hop whose turn it is does."""
        if not self.back:
            return "forward"
        return "backward" if hop.turned is None else "weights"

    def done(self, at: int) -> bool:
        """Whether nothing more is awaited of a hop in this direction."""
        hop = self.hops[at]
        if not self.back:
            return hop.forwarded
        return hop.contributed and (at > 0 or self.home)

    def ever_named(self, at: int, peer: PeerId) -> bool:
        """Whether the trainer ever gave this hop to this replica."""
        return 0 <= at <= self.last and peer in self.hops[at].named

    def begin_turn(self, at: int, now: float, seconds: float, work: Work) -> None:
        """From now on the hop's replica has so long."""
        hop = self.hops[at]
        hop.due = now + seconds
        hop.asked.setdefault(hop.replica, (now, work))

    def asked_at(self, at: int, peer: PeerId) -> float | None:
        """Return when the replica's turn began, of which it has told nothing yet; None where that is unknown."""
        asked = self.hops[at].asked.get(peer)
        return None if asked is None else asked[0]

    def heard_of(self, at: int, peer: PeerId, now: float) -> tuple[Work, float] | None:
        """A replica reported: what it did and how long it took since its turn began; None where that is unknown."""
        asked = self.hops[at].asked.pop(peer, None)
        return None if asked is None else (asked[1], now - asked[0])

    def forwarded(self, at: int, peer: PeerId) -> bool:
        """``peer`` computed the hop on the way out, and so did all before it. False when that is no news. Who answers
        first takes the hop."""
        hop = self.hops[at]
        if self.back or hop.forwarded:
            return False
        self._name(at, peer)
        for earlier in self.hops[: at + 1]:
            earlier.forwarded, earlier.due = True, None
        return True

    def turned_back(self, at: int, peer: PeerId, now: float) -> bool:
        """``peer`` handed the gradient on. False when that is no news, or of one that was replaced."""
        hop = self.hops[at]
        if hop.replica != peer or hop.contributed or hop.turned is not None:
            return False
        hop.turned = now
        return True

    def contributed(self, at: int, peer: PeerId, receipt: Receipt) -> bool:
        """``peer`` added the microbatch. False when that is no news, or another's counts already."""
        hop = self.hops[at]
        hop.receipts.setdefault(peer, receipt)
        if hop.contributed and peer != hop.replica:
            return False
        self._name(at, peer)
        hop.forwarded = True
        if self.done(at):
            hop.due = None
        return True

    def move(self, at: int, new: PeerId) -> None:
        """Another replica takes the hop; a new attempt. On the way out, what is after it has to be done, too."""
        hop = self.hops[at]
        hop.replica, hop.due, hop.nudged, hop.turned = new, None, False, None
        hop.named.add(new)
        hop.asked.pop(new, None)
        self.attempt += 1
        if not self.back:
            for later in self.hops[at:]:
                later.forwarded, later.due = False, None

    def lost(self, peer: PeerId) -> list[int]:
        """A replica is gone with what it held. Returns the hops that have to be done again, or whose turn it has: a hop
        that it handed on is not missed before the way back."""
        found = []
        for at, hop in enumerate(self.hops):
            had = hop.receipts.pop(peer, None) is not None
            if hop.replica != peer:
                continue
            standing_in = next(iter(hop.receipts), None)
            if had and standing_in is not None:
                hop.replica = standing_in
            elif had or hop.due is not None:
                found.append(at)
        return found

    def overdue(self, now: float, silent: Container[PeerId] = ()) -> list[int]:
        """Hops whose turn has passed, or is one of somebody who has fallen silent."""
        hops = enumerate(self.hops)
        return [at for at, hop in hops if hop.due is not None and (hop.due <= now or hop.replica in silent)]

    def next_due(self) -> float | None:
        """When the first turn ends; None while nothing is awaited."""
        return min((hop.due for hop in self.hops if hop.due is not None), default=None)

    def _name(self, at: int, peer: PeerId) -> None:
        """The replica that answered is the one on the route."""
        if self.hops[at].replica != peer:
            self.hops[at].replica = peer
            self.attempt += 1

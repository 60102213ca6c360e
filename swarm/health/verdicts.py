"""Decide which peers are there from answers and silences: a verdict needs evidence, not a rumour (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from swarm.errors import PeerError
from swarm.health.heartbeat import HeartbeatReply
from swarm.ids import PeerId

WATCHED_PEERS = 3
MISSES_TO_LOSE = 3
SHORTEST_LOSS_S = 1.5
"""Three misses in a row, over one and a half seconds at least, make a loss: a peer whose connections are refused is
lost within some two seconds and a half, one that has fallen silent within about six. A daemon that is started anew,
half a second, is forgiven, and so is a stall of four: an answer to the first question, which comes behind the tensors
of a narrow link, is an answer to the third."""
WITNESSES = 2
"""So many others who each found that out for themselves make one miss of ours enough: so all who must agree on a loss
learn of it at about the same time, and none on hearsay alone."""
ANEW_S = 2.0
"""How long another life must answer in a member's name before it is believed that the member was started anew: a second
peer with its identity, while the first lives, finds out before and ends
(:meth:`~swarm.health.watch.HealthWatch.twin`)."""
STRANGER_BEATS = 5
"""A member that says that often in a row that it does not take part has been started anew, or cut off."""


@dataclass(slots=True)
class _Record:
    misses: int = 0
    since: float = 0.0
    incarnation: int | None = None
    anew: float | None = None
    strange: int = 0
    witnesses: set[PeerId] = field(default_factory=set)


class Health:
    """The evidence about each peer. Pure; times are seconds of one clock."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}
        self.missing: set[PeerId] = set()
        """Who has not answered the last time."""

    def forget(self, peers: Iterable[PeerId]) -> None:
        """They left the roster: what comes under their name later is somebody new."""
        for peer in peers:
            self._records.pop(peer, None)
            self.missing.discard(peer)

    def answered(
        self, peer: PeerId, standing: HeartbeatReply | None = None, now: float = 0.0, *, judged: bool = True
    ) -> str | None:
        """The peer is there. Returns the reason for calling it lost all the same: it is not who was in the roster, or,
        ``judged`` by one who takes part, does not take part."""
        record = self._records.setdefault(peer, _Record())
        record.misses = 0
        self.missing.discard(peer)
        if standing is None or standing.member:
            record.witnesses.clear()
        if standing is None:
            return None
        if record.incarnation is None:
            record.incarnation = standing.incarnation
        if record.incarnation != standing.incarnation:
            record.anew = now if record.anew is None else record.anew
            return "it was started anew" if now - record.anew >= ANEW_S else None
        record.anew = None
        record.strange = 0 if standing.member or not judged else record.strange + 1
        if record.strange >= STRANGER_BEATS:
            return "it does not take part any more"
        return None

    def missed(self, peer: PeerId, reason: str, now: float) -> str | None:
        """One miss more. Returns the reason for calling the peer lost, or None while it may still come back."""
        record = self._records.setdefault(peer, _Record())
        record.since = now if record.misses == 0 else record.since
        record.misses += 1
        self.missing.add(peer)
        if record.misses >= MISSES_TO_LOSE and now - record.since >= SHORTEST_LOSS_S:
            return f"no answer to {record.misses} pings in a row: {reason}"
        if self.agreed(peer):
            return f"no answer to {record.misses} pings in a row, nor to {len(record.witnesses)} others: {reason}"
        return None

    def heard(self, peer: PeerId) -> None:
        """Something came from it, though no answer: what is missed from now on is another row of misses."""
        self._records.setdefault(peer, _Record()).misses = 0

    def life(self, peer: PeerId) -> int | None:
        """Return the incarnation that has answered; None while none has."""
        record = self._records.get(peer)
        return None if record is None else record.incarnation

    def told(self, peer: PeerId, witness: PeerId) -> None:
        """Another, or one that stands for its machine, calls the peer lost. That counts until the peer answers us that
        it takes part, and only together with a miss, or with its own word that it does not."""
        self._records.setdefault(peer, _Record()).witnesses.add(witness)

    def agreed(self, peer: PeerId) -> bool:
        """Return whether so many call the peer lost that a miss of ours is enough, or its word that it takes no part:
        what one says may be of a former life of it, or a lie."""
        record = self._records.get(peer)
        return record is not None and len(record.witnesses) >= WITNESSES


class WatchedRoster:
    """The peers that are watched, and what is believed of them.

    Attributes:
        peers: Those that are watched, without this one.
        gone: Those that do not answer, with the reason.
        unanswered: The error of the last question to each of these, where that is the reason.
        rumours: What others said of a loss that is not confirmed here yet.
        departures: Those that said themselves that they leave, with the life that did, where that is known.
        expelled: Those that must go, with the reason: what they answer does not count.
        told: Those of the gone of whom this peer told all, or that told it themselves.
    """

    def __init__(self) -> None:
        self.peers: tuple[PeerId, ...] = ()
        self.gone: dict[PeerId, str] = {}
        self.unanswered: dict[PeerId, PeerError] = {}
        self.rumours: dict[PeerId, str] = {}
        self.departures: dict[PeerId, int | None] = {}
        self.expelled: dict[PeerId, str] = {}
        self.told: set[PeerId] = set()
        self._lives: dict[PeerId, int] = {}

    def life(self, peer: PeerId) -> int | None:
        """Which life of a peer takes part, as far as the roster says."""
        return self._lives.get(peer)

    def follow(self, peers: tuple[PeerId, ...], lives: Mapping[PeerId, int]) -> set[PeerId] | None:
        """Watch these from now on. Return those of whom nothing is believed any more: they left, or another life of
        theirs takes part; None when nothing has changed."""
        known, self._lives = self._lives, dict(lives)
        anew = {peer for peer, life in self._lives.items() if known.get(peer, life) != life}
        if peers == self.peers and not anew:
            return None
        before, self.peers = set(self.peers), peers
        left = (before - set(peers)) | (before & anew)
        self.told -= left
        for peer in left:
            for believed in (self.gone, self.unanswered, self.rumours, self.departures, self.expelled):
                believed.pop(peer, None)
        return left


# --- the ring: who watches whom --------------------------------------------------------------------------------------


def watched(me: PeerId, roster: Sequence[PeerId], count: int = WATCHED_PEERS) -> tuple[PeerId, ...]:
    """The ``count`` peers after me on the hash ring of the roster: everybody is watched by as many."""
    ring = _ring(tuple(roster))
    if me not in ring:
        return ()
    at = ring.index(me)
    return (ring[at + 1 :] + ring[:at])[:count]


def watchers(peer: PeerId, roster: Sequence[PeerId], count: int = WATCHED_PEERS) -> tuple[PeerId, ...]:
    """Those of the roster that watch a peer: the ``count`` before it, the nearest first."""
    ring = _ring(tuple(roster))
    if peer not in ring:
        return ()
    at = ring.index(peer)
    return (ring[at + 1 :] + ring[:at])[::-1][:count]


@lru_cache(maxsize=16)
def _ring(roster: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Return the roster in the order of its ring; asked for each second, and another one only when somebody is gone."""
    return tuple(sorted(roster, key=lambda peer: hashlib.sha256(peer.encode()).digest()))

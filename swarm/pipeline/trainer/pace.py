"""How long to wait for one peer, which replicas have fallen silent, and which to choose. Pure.

Deadlines follow from what a peer took lately, never from a guess.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.pipeline.wiring import Wiring
from swarm.waiting import LATER_S, OTHERS, AdaptiveDeadline, longest_s

FLOOR_S = 1.0
"""Shorter waits condemn a peer for one burst, or for one pause of its garbage collector."""
CEILING_S = 60.0
YOUNG = 64
"""Until so many pieces of work in a direction were measured, what was measured is no rule: how many microbatches are
under way grows as soon as a few have come home, so those of the next step wait in queues four times as long. (Measured
on two cores: a healthy swarm moved work to and fro in its first three steps.)"""

Work = Literal["forward", "backward", "weights", "adopt"]
"""``weights`` is adding a contribution whose gradient was handed on, which a replica does when there is nothing else to
do; ``adopt`` is taking a hop over: fetching what it takes, and both directions."""


class JourneyDeadlines:
    """Deadlines in seconds per (peer, kind of work): a multiple of a high quantile of its recent durations, within
    bounds, and within what is usual among the others where there are two. Pure.

    So who takes a little longer each time cannot teach anybody to wait for it. Of a peer that was never measured the
    other peers' durations are expected, and the ceiling before anything was measured: an unknown peer on an unknown
    link gets all the time there is. Memory: 64 numbers per peer and kind. Asking costs O(peers · window log window).
    """

    def __init__(self, *, floor_s: float = FLOOR_S, ceiling_s: float = CEILING_S, factor: float = 3.0) -> None:
        self.ceiling_s = ceiling_s
        self._floor_s, self._factor = floor_s, factor
        self._measured: Counter[Work] = Counter()
        self._peers: dict[tuple[PeerId, Work], AdaptiveDeadline] = {}
        self._all: dict[Work, AdaptiveDeadline] = {}

    def observe(self, peer: PeerId, work: Work, seconds: float) -> None:
        """A piece of work took this long, from when it could begin until its report was here."""
        self._peers.setdefault((peer, work), self._deadline()).observe(seconds)
        self._all.setdefault(work, self._deadline()).observe(seconds)
        self._measured[work] += 1

    def young(self, work: Work) -> bool:
        """Return whether so little was measured that who is late, and alive, may just have a queue that still grows."""
        return self._measured[work] < YOUNG

    def seconds(self, peer: PeerId, work: Work) -> float:
        """Return how long to wait for the next piece."""
        if work == "weights" and self.young(work):  # the first ones are done at once, the next wait for all others
            return self.ceiling_s
        known = self._peers.get((peer, work)) or self._all.get(work)
        if known is not None:
            own = known.seconds()
            return own if own <= LATER_S else min(own, self.most(peer, work))
        if work == "adopt":  # nobody has taken over anything yet: twice what both directions may take
            return min(self.ceiling_s, 2 * (self.seconds(peer, "forward") + self.seconds(peer, "backward")))
        return self.ceiling_s

    def most(self, peer: PeerId, work: Work) -> float:
        """The longest that anybody is waited for, by what the others take."""
        others = [kept.typical() for (other, what), kept in self._peers.items() if what == work and other != peer]
        if len(others) < OTHERS:
            return self.ceiling_s
        return longest_s(median(others))

    def follow(self, peers: Collection[PeerId]) -> None:
        """Forget everybody else."""
        self._peers = {key: kept for key, kept in self._peers.items() if key[0] in peers}

    def _deadline(self) -> AdaptiveDeadline:
        return AdaptiveDeadline(floor_s=self._floor_s, ceiling_s=self.ceiling_s, factor=self._factor, window=64)


# --- silent replicas, as one trainer sees them -----------------------------------------------------------------------
# What one journey finds out holds for all of them.


class UnresponsivePeers:
    """A replica that let a whole turn pass and meanwhile said nothing, about any microbatch, is late with everything:
    no other turn there is waited for to its end, until it is heard of or tried again. Who is merely slow with one
    microbatch goes on telling of others. Times are monotonic seconds; memory is a number per replica."""

    def __init__(self) -> None:
        self._heard: dict[PeerId, float] = {}
        self._silent: set[PeerId] = set()

    def __contains__(self, peer: object) -> bool:
        return peer in self._silent

    def heard(self, peer: PeerId, now: float) -> None:
        """It said something, whatever that was."""
        self._heard[peer] = now
        self._silent.discard(peer)

    def passed(self, peer: PeerId, since: float) -> bool:
        """A turn that began at ``since`` has passed. Whether it is news that the peer is silent."""
        if peer in self._silent or self._heard.get(peer, -math.inf) >= since:
            return False
        self._silent.add(peer)
        return True

    def lost(self, peer: PeerId) -> None:
        """Its connection broke."""
        self._silent.add(peer)

    def tried(self, peer: PeerId) -> None:
        """It is given a microbatch again, and the time for it."""
        self._silent.discard(peer)

    def follow(self, peers: Collection[PeerId]) -> None:
        """Forget everybody else."""
        self._heard = {peer: at for peer, at in self._heard.items() if peer in peers}
        self._silent &= set(peers)


# --- what one trainer knows of the replicas, for all its journeys ----------------------------------------------------


def nobody() -> Collection[PeerId]:
    """Nobody is believed to be gone."""
    return ()


@dataclass(slots=True, kw_only=True)
class ReplicaChoice:
    """Which replica takes a hop, and how long it may take. ``gone`` are those whom the health watch believes to be
    gone: they are chosen for nothing; ``doubted``, who has not answered it the last time, only where nobody else is
    left, as are those that were proven ``wrong`` in the open step. All are looked at with every decision. ``since`` is
    the first step of replicas that joined: who has not the parameters after ``version`` takes no work that is computed
    with these. A microbatch has one ``choice`` of variants, of those in ``choices`` that its trainer's may have."""

    wiring: Wiring
    pace: JourneyDeadlines = field(default_factory=JourneyDeadlines)
    silence: UnresponsivePeers = field(default_factory=UnresponsivePeers)
    gone: Callable[[], Collection[PeerId]] = nobody
    doubted: Callable[[], Collection[PeerId]] = nobody
    wrong: set[PeerId] = field(default_factory=set)
    since: dict[PeerId, int] = field(default_factory=dict)
    version: int | None = None
    choice: int = 0
    choices: Collection[int] = (0,)

    def of(self, version: int | None, choice: int) -> ReplicaChoice:
        """Return the choice for work that is computed with these parameters, of one choice of variants; of all else it
        is the same."""
        return replace(self, version=version, choice=choice)

    def _out(self) -> set[PeerId]:
        version = self.version
        new = () if version is None else (peer for peer, since in self.since.items() if since > version + 1)
        return {*self.gone(), *new}

    def choose(self, stage: int, tried: Collection[PeerId], now: float) -> tuple[PeerId, str] | None:
        """(replica, reason) for a hop, none of those ``tried``; None when nobody may be chosen now."""
        out = {*tried, *self._out()}
        for left_out in ({*out, *self.doubted(), *self.wrong}, out):
            try:
                chosen = self.wiring.choose(stage, left_out, now=now, choice=self.choice)
            except Refused:
                continue
            self.silence.tried(chosen[0])
            return chosen
        return None

    def takes_part(self, stage: int, peer: PeerId) -> bool:
        """Return whether the open step's roster has that replica at that stage."""
        return peer in self.wiring.replicas(stage, self.choice)

    def present(self, stage: int) -> set[PeerId]:
        """The replicas of a stage that are there, as far as we see."""
        return set(self.wiring.replicas(stage, self.choice)) - self._out()

    def has_way(self) -> bool:
        """Return whether every stage has a replica that is there, as far as we see, whatever comes next. What is leased
        without would be kept from those who may see more."""
        return all(self.wiring.has_way(self._out(), choice) for choice in self.choices)

    def follow(self, stages: Sequence[Sequence[PeerId]], since: Mapping[PeerId, int] | None = None) -> None:
        """Know exactly these replicas from now on; ``since`` when says who joined."""
        self.wiring.follow(stages)
        self.wrong.clear()
        self.since.clear()
        self.since.update(since or {})
        everybody = {peer for replicas in stages for peer in replicas}
        self.pace.follow(everybody)
        self.silence.follow(everybody)

"""Whose fault it is that a hop of a journey failed: a replica's, which is left out for a while, or the microbatch's."""

from __future__ import annotations

from collections import defaultdict

from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.pipeline.trainer.context import JourneyContext

GONE = ("unreachable", "deadline")
"""Codes that say something about a peer or its link."""
POISON = ("violation", "failed")
"""Codes that say something about the microbatch, or about what is wrong with one replica."""


class Poisoned(Exception):
    """The microbatch cannot be computed, whoever tries: it is to be set aside. Handled by the trainer."""


class OwnFailure(Poisoned):
    """It cannot be computed by its trainer's own part. One after the other: something is wrong with that."""


class JourneyFailures:
    """What went wrong on one journey, by stage. Being busy, or a step ahead or behind, is no fault."""

    def __init__(self, context: JourneyContext) -> None:
        self._context = context
        self._failures: dict[int, list[PeerId]] = defaultdict(list)

    def failed(self, at: int) -> set[PeerId]:
        """The replicas of a stage that failed on the microbatch itself."""
        return set(self._failures[at])

    def on(self, at: int, peer: PeerId, error: PeerError) -> None:
        """A replica failed. Raises Poisoned when two different ones, or twice the only one, failed on the data."""
        if error.code in GONE:
            self.gone(at, peer, error)
        elif error.code in POISON:
            self._failures[at].append(peer)
            self._check(at, error)

    def gone(self, at: int, peer: PeerId, error: PeerError) -> None:
        """It does not answer, or not in time: it is left out for a while, and the health watch looks at it."""
        self._context.suspect(peer, error.reason)
        self._context.wiring.fail(at, peer, now=self._context.clock.monotonic(), reason=error.reason)

    def answered(self, at: int, peer: PeerId) -> None:
        """The hop was done by ``peer``: whoever failed on it before is left out for a while, unlike with poison."""
        for other in self.failed(at) - {peer}:
            why = "it failed on a microbatch that another replica computed"
            self._context.wiring.fail(at, other, now=self._context.clock.monotonic(), reason=why)
        self._failures.pop(at, None)

    def _check(self, at: int, error: PeerError) -> None:
        failed = self._failures[at]
        others = set(self._context.wiring.replicas(at)) - set(self._context.gone()) - set(failed)
        if len(set(failed)) >= 2 or (not others and len(failed) >= 2):
            raise Poisoned(f"stage {at} failed on {', '.join(dict.fromkeys(failed))}: {error.code}: {error.reason}")

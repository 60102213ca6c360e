"""Who is left out of a step by its leader though it is there, and when (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from swarm.errors import Busy, DeadlineMissed, PeerError, Unreachable
from swarm.ids import PeerId

MOST_FAILURES = 3
"""How often a member that answers pings may fail to answer a question, before it is left out of the step."""


class Fitness:
    """Of the members, in one term of a step. ``unfit`` are those left out, with the reason."""

    def __init__(self) -> None:
        self.unfit: dict[PeerId, str] = {}
        self._failures: Counter[PeerId] = Counter()

    def failed(self, peer: PeerId, error: PeerError, *, there: bool, last: bool) -> None:
        """It gave no answer. Who is ``there`` and says no, or fails again and again, is unfit; the ``last`` of a part
        may be late as often as others may be busy: without it nothing can be closed."""
        self._failures[peer] += 1
        may_pass = isinstance(error, (Unreachable, Busy)) or (last and isinstance(error, DeadlineMissed))
        if there and not (may_pass and self._failures[peer] < MOST_FAILURES):
            self.unfit[peer] = str(error)

    def lacks(self, peer: PeerId, why: str) -> None:
        """It does not hold what counts: once or twice, that may be because who was to help it died meanwhile."""
        self._failures[peer] += 1
        if self._failures[peer] >= MOST_FAILURES:
            self.unfit[peer] = why

    def forgive(self, peers: Iterable[PeerId]) -> None:
        """They are asked again, as if they had never failed."""
        for peer in peers:
            self.unfit.pop(peer, None)
            self._failures.pop(peer, None)

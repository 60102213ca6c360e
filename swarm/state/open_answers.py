"""How many answers one caller may have on their way at once: who never reads what it asked for holds no more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from swarm.errors import Busy, Violation
from swarm.ids import PeerId


def _all_alike(body: Any) -> str:
    return ""


FEW = 2


class OpenAnswers:
    """Counts calls from their admission until they are over, the answer's way included: one more than ``most`` of a
    caller and of one ``kind`` is Busy. When there are ``in_all`` a caller has FEW, so that those who read nothing keep
    nobody out, until there are twice as many: identities are free, memory is not. For methods that take no payload:
    give them :meth:`admit` and :meth:`over`.

    The endpoint's own bound is for small answers: as many of some MiB each would be a gigabyte.
    """

    def __init__(self, most: int, in_all: float = math.inf, *, kind: Callable[[Any], str] = _all_alike) -> None:
        self._most, self._in_all, self._kind = most, in_all, kind
        self._open: Counter[tuple[PeerId, str]] = Counter()

    def admit(self, caller: PeerId, body: Any, payload_bytes: int) -> None:
        """See :class:`~swarm.network.protocols.Method`. Raises Busy, and Violation for a payload."""
        if payload_bytes:
            raise Violation("this takes no payload", peer=caller)
        key = caller, self._kind(body)
        if self._open[key] >= self._most:
            raise Busy(f"{self._most} answers to this peer are on their way")
        in_all = self._open.total()
        if in_all >= (2 if self._open[key] < FEW else 1) * self._in_all:
            raise Busy(f"{in_all} answers are on their way")
        self._open[key] += 1

    def over(self, caller: PeerId, body: Any) -> None:
        """See :class:`~swarm.network.protocols.Method`."""
        key = caller, self._kind(body)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]

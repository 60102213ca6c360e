"""Who of those that announce themselves is asked whether it is there. Pure.

Anybody may write records into the directory, thousands of them, with any address and any claim about age. So what
counts is what was found out here: who answered first comes first, who did not answer is left alone for a while, and
however many there are, few are called at a time.
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping

from swarm.ids import PeerId
from swarm.optimization.roster import Role

NEWCOMERS = 16
"""How many that never answered are called at a time."""
LEFT_ALONE_S = 10.0


class WaitingRoom:
    """``places`` says how many of each role are needed. A decision costs O(records)."""

    def __init__(self, places: Mapping[Role, int], rng: random.Random) -> None:
        self._places, self._rng = places, rng
        self._came: dict[PeerId, float] = {}
        self._silent: dict[PeerId, float] = {}

    def to_ask(self, waiting: Mapping[PeerId, Role], connected: Container[PeerId], now: float) -> list[PeerId]:
        """Whom to call: those who answered before, as many as there are places, and a few others of roles that lack
        some; first who is ``connected`` with us already, so that it called us, then by chance, all alike.

        ``waiting`` is whoever announces itself; all else is forgotten about the rest.
        """
        self._came = {peer: since for peer, since in self._came.items() if peer in waiting}
        self._silent = {peer: until for peer, until in self._silent.items() if peer in waiting and until > now}
        known = self.first(waiting)
        open_ = {role for role, places in self._places.items() if sum(waiting[p] == role for p in known) < places}
        new = [p for p, role in waiting.items() if role in open_ and p not in self._came and p not in self._silent]
        self._rng.shuffle(new)
        new.sort(key=lambda peer: peer not in connected)
        return known + new[:NEWCOMERS]

    def first(self, waiting: Mapping[PeerId, Role]) -> list[PeerId]:
        """Those who answered, in the order in which they came, no more of each role than there are places."""
        left, found = dict(self._places), []
        for peer in sorted(self._came, key=lambda peer: self._came[peer]):
            role = waiting.get(peer)
            if role is not None and left.get(role, 0) > 0:
                left[role] -= 1
                found.append(peer)
        return found

    def answered(self, peer: PeerId, now: float) -> None:
        """It is there."""
        self._came.setdefault(peer, now)

    def silent(self, peer: PeerId, now: float) -> None:
        """It is not; and when it comes back, others were there before it."""
        self._came.pop(peer, None)
        self._silent[peer] = now + LEFT_ALONE_S

"""Which attempt at a part's averaging is made, in one term of a step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarm.errors import Superseded
from swarm.ids import PartName, PeerId, stage_of
from swarm.optimization.records import Contribution
from swarm.optimization.roster import Roster

ATTEMPTS_PER_TERM = 1 << 10
"""A later term's numbers are greater than all of an earlier one's."""


MOST_TIES, TIED_S = 3, 30.0
"""From so many ties in a term on the next attempt waits for so long: of two replicas one that lies, or whose memory
fails, may do so each time."""


class Attempts:
    """Numbers that no other attempt of the step has, each part's own."""

    def __init__(self, term: int, roster: Roster) -> None:
        self._term, self._roster = term, roster
        self._made: Counter[PartName] = Counter()
        self._under_way: dict[PartName, object] = {}
        self._ties = 0

    def numbers(self, committed: Sequence[Contribution], live: Sequence[PeerId]) -> dict[str, int]:
        """Each part's attempt: a new number when its last round was void, or who takes part in it or what they must
        hold has changed. Raises Superseded when the term has no more: the next number belongs to another's."""
        numbers = {}
        for part in self._roster.parts:
            stage = stage_of(part)
            group = tuple(peer for peer in self._roster.replicas(part) if peer in live)
            holds = tuple((c.microbatch, None if stage is None else c.route[stage]) for c in committed)
            if self._under_way.get(part) != (group, holds):
                if self._made[part] == ATTEMPTS_PER_TERM - 1:
                    raise Superseded(f"{self._made[part]} attempts at averaging {part} came to nothing in one term")
                self._under_way[part] = (group, holds)
                self._made[part] += 1
            numbers[str(part)] = self._term * ATTEMPTS_PER_TERM + self._made[part]
        return numbers

    def void(self, part: PartName) -> None:
        """The round under way gave nothing."""
        self._under_way.pop(part, None)

    def tied(self, part: PartName) -> float:
        """It gave one result to as many replicas as another: all must average anew, else each would answer again what
        it has answered. Returns how many seconds later: others may be back, or somebody looks at the machines."""
        self.void(part)
        self._ties += 1
        return TIED_S if self._ties >= MOST_TIES else 0.0

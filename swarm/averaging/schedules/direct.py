"""Every member reduces a part for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Direct:
    """All send their sums of a part straight to its reducer, which answers with the result: the tree is a star.

    With K members, all reducing equal parts of n bytes: 2 hops, 2(K-1)/K·n bytes sent by each, who speaks to all
    K-1 others. No schedule sends fewer bytes, or over fewer hops but ``butterfly`` with two members.
    Source: the all-to-all reduce-scatter and all-gather of Träff and Hunold, "Decomposing MPI collectives", 2020, that
    hivemind calls butterfly all-reduce.
    """

    name: Literal["direct"] = "direct"

    def core(self, able: int) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(able))

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """All of the core."""
        return tuple(range(core))

    def parent(self, rank: int, root: int, core: int) -> int:
        """The root."""
        return root

    def levels(self, core: int) -> int:
        """None."""
        return 0

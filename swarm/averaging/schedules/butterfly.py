"""Recursive doubling: all compute all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm.averaging.schedules.limits import folded


@dataclass(frozen=True, slots=True)
class Butterfly:
    """At each of log₂K levels two members, across one bit of the rank, send each other what they hold of the whole
    vector and add it up: after the last one everybody holds the sum, and nobody has computed it for another.

    Both add the same two numbers, and the sum of two numbers does not depend on their order, so all get the same bits.
    With K = 2^m members and n bytes: m hops, m·n bytes sent by each in m messages. Of other numbers the next lower
    power of two makes the core, as in ``halving``. For tiny vectors over fast links: half the hops of ``tree``, and no
    member's link is the bottleneck.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, §4.5,
    recursive doubling; a butterfly network is its graph. (What hivemind calls butterfly is ``direct``.)
    """

    name: Literal["butterfly"] = "butterfly"

    def core(self, able: int) -> tuple[int, ...]:
        """A power of two."""
        return folded(able)

    def roots(self, core: int, turn: int) -> tuple[int, ...]:
        """One part, the whole vector."""
        return (0,)

    def parent(self, rank: int, root: int, core: int) -> int:
        """None within the core, which trades level by level. Leaves are dealt out evenly."""
        return rank % core

    def levels(self, core: int) -> int:
        """log₂ of the core."""
        return core.bit_length() - 1

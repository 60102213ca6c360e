"""Who leads a step, term after term. Pure.

A step's peers take turns in an order that everybody computes from the roster: term 0 belongs to the first, term 1 to
the second, and after the last the first is next again. Nobody is elected: who finds all before it gone takes its turn,
and what keeps two leaders from deciding two things is the majority that accepts a record (``acceptor``).
"""

from __future__ import annotations

from collections.abc import Container

from swarm.ids import PeerId
from swarm.optimization.roster import Roster


def owner(roster: Roster, step: int, term: int) -> PeerId:
    """Whose term this is. Raises ZeroDivisionError for an empty roster."""
    order = roster.succession(step)
    return order[term % len(order)]


def own_term(roster: Roster, step: int, me: PeerId, after: int) -> int:
    """Our first term above ``after``."""
    order = roster.succession(step)
    mine = order.index(me)
    return after + 1 + (mine - after - 1) % len(order)


def due_term(roster: Roster, step: int, me: PeerId, known: int, gone: Container[PeerId]) -> int | None:
    """The term in which we lead now, None while it is another's turn.

    ``known`` is the highest term heard of: it stands while its owner is there, else the next one's whose owner is.
    """
    order = roster.succession(step)
    if me not in order:
        return None
    for term in range(known, known + len(order)):
        peer = order[term % len(order)]
        if peer == me:
            return term
        if peer not in gone:
            return None
    return None

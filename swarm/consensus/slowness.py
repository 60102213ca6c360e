"""Members that hold up step after step: when the run goes on without one, and for how long. Pure.

How long an answer took only who asked knows, and a leader is not believed about others. But another leads each step,
and each record says for whom its leader had to wait. So the records themselves show whom several leaders found late:
that member is left out of a step as if it were lost, and every member accepts that, for it sees the same records. One
leader alone shows nothing, however often it leads. Three steps that waited for nobody take the oldest word back.

Who was left out may join again after a while, each time after twice as long. Nobody calls it a liar.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import Field

from swarm.ids import PeerId
from swarm.schema import Count, Message, PeerIdField

PATIENT = 3
"""So many steps are closed with a member that holds them up."""
MAX_SAID = 8
"""Of so many words the newest are kept: who leads several of these steps gives one of them each time."""
CALM = 3
"""So many steps in time take the oldest word back."""
FIRST_LEAVE, MOST_DOUBLINGS = 8, 7
"""For so many steps a member is left out, and how often that is doubled."""
FORGET = 4
"""So many times as long as a member was left out its leave is remembered after it."""


class Suspension(Message):
    """How often records say that a member was left out, of the run or of feeding it, and the first step with which it
    may take part again."""

    times: Count = 0
    until: Count = 0


class Barred(Suspension):
    """What records say of a peer that was proven wrong (:mod:`swarm.consensus.faults`). ``contradicted`` is in how many
    steps it called a hop wrong, or right, that most found otherwise, since it was barred last."""

    contradicted: Annotated[Count, Field(exclude_if=operator.not_)] = 0


class Slow(Suspension):
    """What records say of a member that holds steps up: the leaders that had to wait for it lately, the oldest first,
    and how many steps were in time since."""

    said_by: Annotated[tuple[PeerIdField, ...], Field(max_length=MAX_SAID)] = ()
    calm: Count = 0


Known = Mapping[str, Slow]
"""By member; who is not in it holds nobody up."""


def dismissed(known: Known, peers: Collection[str]) -> dict[PeerId, str]:
    """Return which of a step's members the step may be closed without, and why: those for whom PATIENT steps waited, as
    two leaders say, or three where seven members and more are there."""
    leaders = min(PATIENT, max(2, (len(peers) - 1) // 2))
    return {
        PeerId(peer): f"it held up {len(one.said_by)} of the last steps, as {len(set(one.said_by))} leaders say"
        for peer, one in known.items()
        if peer in peers and len(one.said_by) >= PATIENT and len(set(one.said_by)) >= leaders
    }


def rests_until(known: Mapping[str, Suspension], peer: str) -> int:
    """Return the first step with which a peer may join again; 0 for one that was not left out."""
    return known[peer].until if peer in known else 0


def struck(one: Slow | None, leader: str) -> Slow:
    """Return what is known of a member for which one more leader had to wait."""
    one = one or Slow()
    return one.model_copy(update={"said_by": (*one.said_by, leader)[-MAX_SAID:], "calm": 0})


def following(
    known: Known, step: int, peers: Collection[str], absent: Collection[str], by: tuple[str, Collection[str]]
) -> dict[str, Slow]:
    """Return what the record of a step says.

    Args:
        known: What the record before it says.
        step: The step.
        peers: Its members.
        absent: Those without which it was closed.
        by: Its leader, and those for whom that one had to wait. It says nothing of itself.
    """
    out, (leader, late) = dismissed(known, peers), by
    said: dict[str, Slow] = {}
    for peer in sorted({*known, *late}):
        one = known.get(peer, Slow())
        if peer in absent:
            left = peer in out
            one = _left(one, step) if left else one.model_copy(update={"said_by": (), "calm": 0})
        elif peer in late and peer != leader:
            one = struck(one, leader)
        elif peer in peers and peer != leader:
            over, calm = divmod(one.calm + 1, CALM)
            one = one.model_copy(update={"said_by": one.said_by[over:], "calm": calm})
        elif peer not in peers:
            one = one.model_copy(update={"said_by": (), "calm": 0})
        if one.said_by or (one.times and step < one.until + FORGET * _leave(one.times)):
            said[peer] = one
    return said


def doubled(first: int, times: int, most: int) -> int:
    """Return for how many steps one is left out for the ``times``-th time: ``first`` the first time, twice as many each
    time, doubled ``most`` times at most."""
    return first << min(times - 1, most)


def _left(one: Slow, step: int) -> Slow:
    return Slow(times=one.times + 1, until=step + 1 + _leave(one.times + 1))


def _leave(times: int) -> int:
    return doubled(FIRST_LEAVE, times, MOST_DOUBLINGS)

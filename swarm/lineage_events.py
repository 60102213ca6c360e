"""Events of a swarm that is cut in two: see :mod:`swarm.events`."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.event import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumLost(Event):
    """So few of the voters are there, as this member sees it, that the open step cannot be decided: they wait, until
    ``alone_at`` (seconds since the epoch), when they go on provisionally; None: for as long as it takes."""

    step: int
    there: int
    voters: int
    alone_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumBack(Event):
    """A majority of the voters is there again, after so many seconds."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageBegan(Event):
    """No majority came back: those that are there have closed a step by themselves, and go on. Whether it counts is
    known when the others are back."""

    step: int
    there: int
    voters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageConfirmed(Event):
    """A majority has accepted what was closed without it from a step on: it counts."""

    step: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageGivenUp(Event):
    """What was closed without a majority from a step on does not count: weights and cursors go back."""

    step: int
    microbatches: int
    reason: str

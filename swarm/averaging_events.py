"""Events of a part's averaging. See :mod:`swarm.events`."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.event import Event
from swarm.ids import PartName, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTaken(Event):
    """What this replica holds was copied for an attempt at its part's averaging: what it adds from now on is not in
    it."""

    step: int
    part: PartName
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVoid(Event):
    """A group's all-reduce failed here and gave nothing: all of the step's rounds are repeated as another attempt.
    ``culprit`` is the member on which it broke, None when that is not known."""

    step: int
    part: PartName
    round: int
    attempt: int
    members: int
    culprit: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation(Event):
    """How many replicas of this peer's part were ``live`` when a step closed, took part in its averaging, and have
    something in the result; and ``why`` not, of each other, and of those that were lost. ``whole`` is False where a
    live replica was left out, or there was nobody to average with."""

    step: int
    part: PartName
    live: int
    participating: int
    averaged: int
    why: dict[PeerId, str]
    whole: bool

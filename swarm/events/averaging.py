"""Events of a part's averaging: rounds, mixing, and whose work is in the result."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.events.base import Event
from swarm.ids import PartName, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone(Event):
    """A group's all-reduce ended here; ``round`` counts those that a step's averaging takes. The group had formed,
    every member being in, ``formed_s`` after this one began it. ``schedule`` is the way that sums travelled, ``reason``
    why that one."""

    step: int
    part: PartName
    members: int
    participating: int
    bytes_sent: int
    seconds: float
    round: int = 0
    formed_s: float = 0.0
    schedule: str = "direct"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Event):
    """A replica that trains apart mixed its weights, after a leg, with those of a group of ``members``, itself counted.
    ``averaged`` versions went into the mean, the oldest of them ``oldest`` legs behind; each ``left_out`` has a
    reason. ``own`` says what became of its own version: added, too old, or alone; with push-sum what became of half its
    mass: pushed, pushed again, or kept, since the one it is for has not answered for an earlier half yet."""

    step: int
    part: PartName
    leg: int
    members: int
    averaged: int
    oldest: int
    own: str
    left_out: dict[PeerId, str]
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTaken(Event):
    """What this replica holds was copied for an attempt at its part's averaging: what it adds from now on is not in
    it."""

    step: int
    part: PartName
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesDropped(Event):
    """Of the ``choices`` of experts by the tokens that this replica computed in a step so many were ``without_room``:
    those tokens passed the layer unchanged. Written with each step by replicas whose experts have limited room."""

    step: int
    part: PartName
    without_room: int
    choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualHandedOver(Event):
    """This replica left with a step, and gave another what averaging had rounded off here, to be added to its own."""

    step: int
    part: PartName
    to: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualLost(Event):
    """What averaging had rounded off at a replica will be added to nothing: so much of its gradients is lost."""

    step: int
    part: PartName
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SumLeftOut(Event):
    """The mean of a part lacks so many target tokens of ``peer``'s sum, more than half, which was far from the others'
    sums, as those say ``by`` whom they were left out: more than half of the part's replicas; and so it was in one of
    the seven steps before. Less than that may be chance, or one that lies; records have it."""

    step: int
    part: PartName
    peer: PeerId
    tokens: int
    by: tuple[PeerId, ...]


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

"""Push-sum that loses nothing on the way: parcels of mass, acknowledged, and owned by one peer at a time. Pure.

A node holds mass: a *sum* (a vector) and a *weight*; its value is sum ÷ weight. In each round it sends half of both to
one other (:class:`~swarm.averaging.gossip.pushing.PushSum` says to whom) and keeps half: a column of the mixing
matrix sums to one, so Σ sums and Σ weights over all nodes and parcels never change, and every value tends to
Σ sums ÷ Σ weights whatever the delays.

A message that is lost would take mass with it, one that is repeated would make some. So a parcel takes three messages:

    sender                          receiver
      parcel   ────────────────────▶  put aside           the sender's still, which sends it until it is answered
      yielded  ◀────  taken  ───────                      from here on the receiver's
               ────  yield  ───────▶  added

It is the sender's until the receiver's *taken* has come, and the receiver's from then on; the receiver adds it only
when it knows that, by *yield* or by a later parcel of the same sender. Each message may be lost, repeated and
overtaken: all are numbered and answered again. There is one parcel at a time for each pair, so the last number is all
that needs remembering. A node that gets no answer goes on with what it kept, and waits for nobody; it sends the parcel
once more when it is the receiver's turn again.

What a death costs: what the dead one held, and the parcels between it and others that were not added yet. Nothing else,
and nothing is ever counted twice. The mass of a dead one is not shared out anew: nodes do not agree on who is dead
before the step closes, and every step begins with new nodes, of those that its roster names.

Not promised: honesty. Weights are claims, and within the bounds of :meth:`PushSumNode.take` a peer can make mass of
nothing.
Source: push-sum, Kempe, Dobra and Gehrke, FOCS 2003; for parameters, stochastic gradient push, arXiv 1811.10792; mass
that survives losses, Hadjicostis, Vaidya and Domínguez-García, IEEE TAC 61(6), 2016, who keep running sums instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.errors import Violation
from swarm.ids import PeerId

ROUNDING = 1.0 + 1e-6
"""Σ weights may be more than all there is by so much: they are halved and added as floats."""


@dataclass(frozen=True, slots=True, eq=False)
class PushSumState:
    """``sum`` is a flat float vector (elements,) that nobody writes to again, ``weight`` is above 0."""

    sum: Tensor
    weight: float

    def __add__(self, other: PushSumState) -> PushSumState:
        """Both together."""
        return PushSumState(self.sum + other.sum, self.weight + other.weight)

    def half(self) -> PushSumState:
        """Exact but for the smallest subnormal numbers: it is a division by two."""
        return PushSumState(self.sum / 2, self.weight / 2)

    @property
    def value(self) -> Tensor:
        """Sum ÷ weight, (elements,)."""
        return self.sum / self.weight


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """``number`` counts this sender's parcels to this receiver from 1."""

    number: int
    mass: PushSumState


@dataclass(frozen=True, slots=True)
class ParcelTaken:
    """The receiver has put parcel ``number`` aside."""

    number: int


@dataclass(frozen=True, slots=True)
class ParcelTransferred:
    """The sender has given parcel ``number`` up: it is the receiver's."""

    number: int


Message = Parcel | ParcelTaken | ParcelTransferred


class PushSumNode:
    """One node's side of push-sum. Every method is one event; what is returned is to be sent to the peer it is about.

    Memory: the mass, and one vector for each parcel under way or put aside. One thread at a time.
    """

    def __init__(self, mass: PushSumState, *, most_weight: float) -> None:
        """``most_weight`` is Σ weights of all nodes: no parcel can have more."""
        self._held, self._most_weight = mass, most_weight
        self._sent: dict[PeerId, Parcel] = {}
        self._aside: dict[PeerId, Parcel] = {}
        self._last_sent: dict[PeerId, int] = {}
        self._last_added: dict[PeerId, int] = {}

    @property
    def held(self) -> PushSumState:
        """The mass in the value, without the mass in flight or put aside."""
        return self._held

    def change(self, difference: Tensor) -> None:
        """Add to the value, as a local optimizer step does: ``weight`` times that is added to the sum."""
        self._held = PushSumState(self._held.sum + difference * self._held.weight, self._held.weight)

    def push(self, target: PeerId) -> Parcel | None:
        """Half of what is held, to be sent to ``target``; None, all being kept, where that still owes an answer."""
        if target in self._sent:
            return None
        number = self._last_sent.get(target, 0) + 1
        self._held = self._held.half()
        self._last_sent[target] = number
        self._sent[target] = Parcel(number, self._held)
        return self._sent[target]

    def take(self, sender: PeerId, parcel: Parcel) -> ParcelTaken:
        """A parcel has come: the answer, which is the same when it comes again.

        Raises Violation, with nothing changed, for mass that no honest peer sends: of another shape or dtype, not
        finite, with a weight that is not above 0 or is above all there is, or with a number out of turn.
        """
        added, aside = self._last_added.get(sender, 0), self._aside.get(sender)
        if parcel.number <= added or (aside is not None and parcel.number == aside.number):
            return ParcelTaken(parcel.number)
        if parcel.number != added + (1 if aside is None else 2):
            raise Violation(f"parcel {parcel.number} out of turn", peer=sender)
        self._check(sender, parcel.mass)
        self._add(sender)
        self._aside[sender] = parcel
        return ParcelTaken(parcel.number)

    def taken(self, receiver: PeerId, answer: ParcelTaken) -> ParcelTransferred:
        """The receiver has the parcel: it is its own now. The answer is the same when this comes again. Raises
        Violation for a parcel that was never sent."""
        if not 0 < answer.number <= self._last_sent.get(receiver, 0):
            raise Violation(f"parcel {answer.number} was never sent", peer=receiver)
        sent = self._sent.get(receiver)
        if sent is not None and sent.number == answer.number:
            del self._sent[receiver]
        return ParcelTransferred(answer.number)

    def yielded(self, sender: PeerId, message: ParcelTransferred) -> None:
        """Take back the mass put aside as this node's own. Said again, or late, it changes nothing."""
        aside = self._aside.get(sender)
        if aside is not None and aside.number == message.number:
            self._add(sender)

    def unanswered_by(self, receiver: PeerId) -> Parcel:
        """Return the mass in flight to this peer. Raises KeyError if there is none."""
        return self._sent[receiver]

    def _add(self, sender: PeerId) -> None:
        parcel = self._aside.pop(sender, None)
        if parcel is not None:
            self._held += parcel.mass
            self._last_added[sender] = parcel.number

    def _check(self, sender: PeerId, mass: PushSumState) -> None:
        ours = self._held.sum
        if mass.sum.shape != ours.shape or mass.sum.dtype != ours.dtype:
            raise Violation(f"mass of {mass.sum.dtype} {tuple(mass.sum.shape)}", peer=sender)
        if not (math.isfinite(mass.weight) and 0 < mass.weight <= self._most_weight):
            raise Violation(f"mass of weight {mass.weight}", peer=sender)
        aside = [parcel.mass for parcel in self._aside.values()]
        weight = math.fsum([mass.weight, self._held.weight, *(one.weight for one in aside)])
        if weight > self._most_weight * ROUNDING:
            raise Violation(f"mass of weight {mass.weight}, which makes {weight} of {self._most_weight}", peer=sender)
        if not bool(torch.isfinite(sum((one.sum for one in aside), mass.sum + ours)).all()):
            raise Violation("mass that is not finite, or would not be", peer=sender)

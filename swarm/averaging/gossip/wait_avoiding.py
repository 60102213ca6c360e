"""Rounds that wait for nobody who is behind: a late member takes part with what it published last. Pure.

For parameters in groups that do not cover everybody, never for gradients: what counts here is not counted once.

A member publishes its parameters after each of its local steps; the number of that step is their *version*. The round
of a group mixes what its members have published by then:

1. Nobody waits for a member to come to its next version: each shows the newest that it has, at once. Who sleeps, or is
   behind a slow link, costs the others one deadline, once, and nothing afterwards, until it has answered again
   (:mod:`swarm.averaging.gossip.patience`).
2. Of each member its newest version counts, if it is at most ``most_stale`` rounds old; so nothing older is ever mixed.
3. Who finds its own parameters in the mixture takes the mixture. Who has newer ones adds them to it by their weight
   (with equal weights: sum of S and its own, ÷ S + 1). Who has slept longer than ``most_stale`` takes the mixture and
   loses its own, so that no older work comes back into the others by its next version.

What is conserved: Σ weight · parameters over a group whose members are all in time. Not what is late: it counts for the
others as it was published, p, and for its owner once more as it is now, v. With mixture m of weight W and the late
one's weight w, the group's Σ is afterwards W·m + w·w/(W + w)·(v − m) and was W·m + w·(v − p). Progress of a late member
is thus dampened, not lost: its next version has it.

Source: WAGMA-SGD, Li et al., arXiv 2005.00124, algorithm 2, which has equal weights, a fixed group size, and lets the
first to arrive start a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from swarm.averaging.allreduce.output import weighted_mean
from swarm.errors import BugError
from swarm.ids import PeerId

How = Literal["in it", "added", "too old"]


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A member's parameters after its local step ``version``: float32 (elements,) on the CPU, as it last told them.

    ``weight`` is a positive integer that all agree on (1: all alike), never what the member claims.
    """

    version: int
    vector: Tensor
    weight: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The result of a group's round: weighted ``mean`` float32 (elements,), Σ ``weight``, and the version of each
    member in it."""

    round: int
    mean: Tensor
    weight: int
    versions: Mapping[PeerId, int]


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The parameters with which one member goes on, as ``version``: its own were ``in it`` already, were ``added``, or
    were ``too old`` and are dropped."""

    version: int
    vector: Tensor
    how: How


@dataclass(frozen=True, slots=True)
class WaitAvoiding:
    """The rules, with their bound τ: no parameters older than ``most_stale`` ≥ 1 rounds are mixed."""

    most_stale: int

    def mix(
        self, members: Sequence[PeerId], published: Mapping[PeerId, Published], round: int
    ) -> tuple[Mixture | None, str]:
        """The mixture of what is fresh enough, and why it is what it is; None where nothing is.

        Added in the order of ``members`` in float64 and rounded once: the same bits wherever it is computed from the
        same versions. A version from the future counts for nothing. Cost: S passes, 8 bytes an element for each
        member. Raises BugError for vectors or weights that do not fit, Violation naming who sent a value that is
        not finite.
        """
        fresh = {peer: published[peer] for peer in members if self._counts(published.get(peer), round)}
        if not fresh:
            return None, f"round {round}: nobody published for it or the {self.most_stale} before it"
        sizes = {one.vector.shape for one in fresh.values()}
        if len(sizes) != 1 or any(one.vector.dtype != torch.float32 or one.weight < 1 for one in fresh.values()):
            raise BugError(f"round {round}: members publish float32 vectors of one size, with weights of at least 1")
        total = sum(one.weight for one in fresh.values())
        sums = {peer: (one.vector.double() * one.weight).numpy() for peer, one in fresh.items()}
        mean = torch.from_numpy(weighted_mean(sums, list(fresh), total))
        late = [peer for peer, one in fresh.items() if one.version < round]
        absent = [peer for peer in members if peer not in fresh]
        versions = MappingProxyType({peer: one.version for peer, one in fresh.items()})
        return Mixture(round, mean, total, versions), _reason(round, late, absent)

    def settle(self, mixture: Mixture, me: PeerId, own: Published) -> Settled:
        """Return the parameters with which ``me`` goes on, given what it holds now, ``own``, whether it was in time or
        comes later.

        A member that missed several rounds settles in the newest that one of its groups had. Raises BugError for a
        mixture older than ``own``, which would undo steps.
        """
        age = mixture.round - own.version
        if age < 0:
            raise BugError(f"version {own.version} cannot settle in round {mixture.round}")
        if mixture.versions.get(me) == own.version:
            return Settled(mixture.round, mixture.mean, "in it")
        if age > self.most_stale:
            return Settled(mixture.round, mixture.mean, "too old")
        total = mixture.mean.double() * mixture.weight + own.vector.double() * own.weight
        return Settled(mixture.round, (total / (mixture.weight + own.weight)).float(), "added")

    def _counts(self, one: Published | None, round: int) -> bool:
        return one is not None and 0 <= round - one.version <= self.most_stale


def _reason(round: int, late: Sequence[PeerId], absent: Sequence[PeerId]) -> str:
    told = [f"round {round}"]
    if late:
        told.append(f"{', '.join(late)} with an older version")
    if absent:
        told.append(f"without {', '.join(absent)}: no version that counts")
    return told[0] + (f": {'; '.join(told[1:])}" if told[1:] else ": all in time")

"""Who contributed what to the open step. Exact: quota is leased and microbatches are counted, nothing is estimated.

Pure: no clock, no network. One ledger lives per step, on its leader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from swarm.errors import Refused, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.optimization.records import Contribution


def fixed_quota(step: int, trainers: Sequence[PeerId], target: int) -> dict[PeerId, int]:
    """Who feeds how much of a reproducible step: equal shares, the remainder going round from step to step."""
    share, remainder = divmod(target, len(trainers))
    extra = {trainers[(step + index) % len(trainers)] for index in range(remainder)}
    return {trainer: share + (trainer in extra) for trainer in trainers}


def free_quota(trainers: Sequence[PeerId], target: int, max_share: float) -> dict[PeerId, int]:
    """The most each trainer may feed: ``max_share`` of the step, but never less than an equal share."""
    most = max(math.floor(max_share * target), math.ceil(target / len(trainers)))
    return dict.fromkeys(trainers, min(most, target))


class Ledger:
    """Leases and completions of one step.

    Invariants: leased ≤ target; completed by a trainer ≤ leased to it; a microbatch counts once however often it
    is reported.
    """

    def __init__(self, step: int, target: int, quota: Mapping[PeerId, int]) -> None:
        self.step, self.target = step, target
        self._quota = dict(quota)
        self._leased: Counter[PeerId] = Counter()
        self._completed: Counter[PeerId] = Counter()
        self._contributions: dict[MicrobatchId, Contribution] = {}

    @property
    def full(self) -> bool:
        """Whether the batch is complete."""
        return len(self._contributions) >= self.target

    def lease(self, step: int, trainer: PeerId, total: int) -> tuple[int, str]:
        """Raise what is leased to a trainer towards ``total`` microbatches; returns (leased in all, reason).

        Asking for a total makes a repeated request harmless.
        """
        self._check(step, trainer)
        held = self._leased[trainer]
        left = self.target - self._leased.total()
        granted = max(0, min(total - held, left, self._quota[trainer] - held))
        self._leased[trainer] = held + granted
        if granted or total <= held:
            return held + granted, f"{left - granted} of {self.target} left"
        return held, "the step is fully leased" if left == 0 else f"your share of {self._quota[trainer]} is used up"

    def complete(self, step: int, trainer: PeerId, contribution: Contribution) -> bool:
        """Count a finished microbatch; False when it was counted before. Raises Refused for what was never leased."""
        self._check(step, trainer)
        if contribution.microbatch.trainer != trainer:
            raise Refused("a trainer reports its own microbatches only")
        known = self._contributions.get(contribution.microbatch)
        if known is not None:
            if known != contribution:
                raise Refused("this microbatch was reported before, differently")
            return False
        done = self._completed[trainer]
        if done >= self._leased[trainer]:
            raise Refused(f"{done} microbatches are counted and no more were leased to {trainer}")
        self._contributions[contribution.microbatch] = contribution
        self._completed[trainer] += 1
        return True

    def committed(self) -> tuple[Contribution, ...]:
        """The completed microbatches in the order of their ids: the same wherever it is computed."""
        return tuple(self._contributions[microbatch] for microbatch in sorted(self._contributions))

    def _check(self, step: int, trainer: PeerId) -> None:
        if step != self.step:
            raise WrongStep(f"step {step} is not the open step {self.step}")
        if trainer not in self._quota:
            raise Refused(f"{trainer} is not a trainer of this run")


def weights(committed: Sequence[Contribution], replicas: Sequence[PeerId], stage: int | None) -> dict[PeerId, int]:
    """Integer token weight of each replica of a part: the target tokens of what the ledger assigns to it.

    ``stage`` None means the ends, whose replica is the microbatch's trainer.
    """
    totals = dict.fromkeys(replicas, 0)
    for contribution in committed:
        holder = contribution.microbatch.trainer if stage is None else PeerId(contribution.route[stage])
        totals[holder] += contribution.tokens
    return totals


def assigned(committed: Sequence[Contribution], peer: PeerId, stage: int | None) -> frozenset[MicrobatchId]:
    """The microbatches whose gradient for a part this replica must hold."""
    return frozenset(
        contribution.microbatch
        for contribution in committed
        if (contribution.microbatch.trainer if stage is None else contribution.route[stage]) == peer
    )

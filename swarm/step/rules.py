"""What the manifest says about a step, and whether what somebody claims about one can be true. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarm.columns import stranger
from swarm.consensus.admissions import AdmissionPolicy
from swarm.consensus.changes import RosterRules
from swarm.consensus.ledger import first_lease, fixed_quota, free_quota
from swarm.consensus.records import CloseRecord, Contribution
from swarm.consensus.roster import HowToJoin, Roster, join_words
from swarm.errors import Refused, Violation
from swarm.ids import PartName, PeerId, RunId
from swarm.optim.clipping import Clipping, clip_parts
from swarm.optim.schedules import OptimizerConfig, learning_rate
from swarm.step.boundary_codecs import FIXED, CodecRules
from swarm.step.lateness import ALL, LateRules
from swarm.step.moves import STILL, MoveRules

MAX_LOSS = 1e9
"""Nats a token, where the vocabulary is not known: the sum of a step's must be a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """``target`` microbatches make a step; ``max_tokens`` is the most target tokens that one can have, and a record has
    room for ``max_members``.
    ``quorum_grace_s`` is how long a majority is waited for before those who are there go on provisionally; 0: for ever.
    ``wait_for_lost_s`` is how long a part that nobody holds is waited for, and a peer that is left alone waits for the
    others, before they end; ``rewind`` whether the run then goes back to a checkpoint.
    ``inner_steps``: optimizer steps in one of the run's, each with a rate of its own; ``clip_norm`` is for the mean
    that closes it.
    ``part_bytes`` are those of each part's sum in averaging; ``one_reduces``: there one may reduce for many.
    ``early`` microbatches of a step at most may be computed with the parameters of the record before the one that it
    follows. ``served``: one replica of a part reduces for the others, which others must be able to call.
    ``codecs`` says how the codecs of boundaries are found.
    ``moves`` says who holds another part after a step, ``lateness`` how many replicas a close needs.
    ``frozen`` are parts of which nothing is trained, with the numbers that stand for their state, all zero: everybody
    can make one.
    ``begins_after``: the step of another run's checkpoint that the run goes on with, and what its first record says of
    the record before.
    ``max_loss`` is the most nats a token that a microbatch can have.
    ``tries_trainers``: who pulls against all other trainers has no quota (:mod:`swarm.consensus.trials`).
    ``guards``: sums that are far from the others' are left out of means; ``influence``: a microbatch may be so many
    times as long as is usual, 0: as long as it is.
    ``admission`` says who may join; ``delink_at`` is as in :class:`~swarm.consensus.changes.RosterRules`.
    ``choices``: so many ways there are through the variants of stages.
    ``how_to_join`` is what people are told who must find somebody: words of this peer's, no rule of the run.
    """

    run: RunId
    steps: int
    target: int
    max_share: float
    max_tokens: int
    max_members: int
    reproducible: bool
    optimizer: OptimizerConfig
    quorum_grace_s: float = 0.0
    wait_for_lost_s: float = math.inf
    rewind: Literal["auto", "ask", "never"] = "auto"
    inner_steps: int = 1
    clip_norm: float = math.inf
    part_bytes: Mapping[PartName, int] = field(default_factory=dict)
    one_reduces: bool = False
    served: bool = False
    codecs: CodecRules = FIXED
    early: int = 0
    moves: MoveRules = STILL
    lateness: LateRules = ALL
    frozen: Mapping[PartName, int] = field(default_factory=dict)
    begins_after: tuple[int, str] | None = None
    max_loss: float = MAX_LOSS
    guards: bool = False
    influence: float = 0.0
    tries_trainers: bool = False
    admission: AdmissionPolicy = AdmissionPolicy()
    choices: int = 1
    how_to_join: HowToJoin = join_words
    delink_at: int = 0

    def quota(self, step: int, trainers: Sequence[PeerId], fed: Sequence[PeerId] | None = None) -> Mapping[PeerId, int]:
        """The most each of these trainers may feed of a step: nothing those that are not ``fed``, where that is said
        (:meth:`Roster.fed`)."""
        if not trainers:
            return {}
        fed = trainers if fed is None else fed
        if self.reproducible:
            return fixed_quota(step, fed, self.target)
        return dict.fromkeys(trainers, 0) | free_quota(fed, self.target, self.max_share)

    def first_lease(self, trainers: Sequence[PeerId]) -> int:
        """Return how many microbatches each of these trainers may start when a step opens, without asking its
        leader."""
        return first_lease(len(trainers), self.target)

    @property
    def roster(self) -> RosterRules:
        """The limits of the roster."""
        return RosterRules(
            self.run,
            self.max_members,
            served=self.served,
            dated=self.early > 0 or self.moves.on,
            how=self.how_to_join,
            admission=self.admission,
            delink_at=self.delink_at,
        )

    def over(self, record: CloseRecord) -> bool:
        """Return whether the run is over with this record."""
        return record.ended or record.step >= self.steps

    def lr(self, step: int) -> float:
        """The learning rate at the end of a step: everybody computes it, nobody needs to be believed."""
        return learning_rate(self.optimizer, step * self.inner_steps, self.steps * self.inner_steps)

    def clipped(self, sq_norms: Mapping[str, float]) -> Clipping:
        """Return what is done to means of these squared norms: everybody computes it, too."""
        return clip_parts({PartName(part): square for part, square in sq_norms.items()}, self.clip_norm)

    def check_contribution(self, roster: Roster, contribution: Contribution, *, settled: bool = True) -> None:
        """Raises Violation, or Refused for peers that are not in the roster, where no honest peer would say this. Early
        work that is not ``settled`` may have been done by replicas that have left or moved since: others are assigned
        it."""
        trainer = contribution.microbatch.trainer
        if trainer not in roster.trainers:
            raise Refused(f"{trainer} is not a trainer of the roster")
        if contribution.early and not self.early:
            raise Violation("early work in a run that feeds no step ahead")
        self.check_loss(contribution)
        if contribution.choice >= self.choices:
            raise Violation(f"choice {contribution.choice} of variants, of which there are {self.choices}")
        there = roster.columns(choice=contribution.choice)
        if len(contribution.route) != len(there):
            raise Violation(f"a route of {len(contribution.route)} replicas through {len(there)} stages")
        found = None if contribution.early and not settled else stranger(contribution.route, there)
        if found is not None:
            said = f" for choice {contribution.choice} of its variants" if found[1] in roster.variants else ""
            raise Refused(f"{found[1]} is not a replica of stage {found[0]}{said}")
        if roster.owners and contribution.choice != roster[trainer].choice:
            raise Violation(
                f"a microbatch of choice {contribution.choice}, of a trainer of choice {roster[trainer].choice}"
            )
        roster.borders.check(trainer, contribution.route)

    def check_loss(self, contribution: Contribution) -> None:
        """Raises Violation for tokens or a loss that no microbatch has, and that cannot be summed."""
        if not 0 < contribution.tokens <= self.max_tokens:
            raise Violation(f"{contribution.tokens} target tokens in a microbatch of {self.max_tokens}")
        if not 0 <= contribution.loss_sum <= self.max_loss * contribution.tokens:
            said = f"a loss sum of {contribution.loss_sum} over {contribution.tokens} tokens"
            raise Violation(f"{said}, of at most {self.max_loss:.4g} each", peer=contribution.microbatch.trainer)

    def check_committed(self, roster: Roster, committed: Sequence[Contribution]) -> None:
        """As :meth:`check_contribution`, for a step's whole set: complete, ordered, each microbatch once."""
        ids = [contribution.microbatch for contribution in committed]
        if len(ids) != self.target or ids != sorted(set(ids)):
            raise Violation(f"{len(ids)} microbatches, {len(set(ids))} of them different, in a step of {self.target}")
        if (early := sum(contribution.early for contribution in committed)) > self.early:
            raise Violation(f"{early} early microbatches in a step that may have {self.early}")
        for contribution in committed:
            self.check_contribution(roster, contribution)

    def check_scalars(self, step: int, lr: float, clip: float) -> None:
        """Raises Violation for a learning rate that is not the schedule's, or a factor that does not clip."""
        if lr != self.lr(step) or not 0.0 < clip <= 1.0:
            raise Violation(f"learning rate {lr}, clip factor {clip} in step {step}, whose rate is {self.lr(step)}")

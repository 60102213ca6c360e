"""What a replica is, and what it takes: decided before a payload is read, and once more when it is here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from swarm.clock import Clock
from swarm.columns import passes, standing_at, stranger
from swarm.device import Device
from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.events import EventSink
from swarm.ids import PartName, PeerId, RunId, StepWork
from swarm.network.protocols import Endpoint
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.compute import StageCompute
from swarm.pipeline.messages import (
    Adopt,
    Audit,
    Backward,
    Evaluate,
    Forward,
    JourneyMessage,
    Recall,
    Resend,
    RoutedMessage,
    Targets,
)
from swarm.pipeline.retention import RETENTION_BYTES
from swarm.pipeline.seals import Seals, told_digest
from swarm.pipeline.stage.microbatch_state import MicrobatchState
from swarm.pipeline.stage.table import MicrobatchTable
from swarm.security.borders import OPEN, Borders

logger = logging.getLogger(__name__)
MAX_EVALUATED = 2
"""Rows of trainers that are evaluated at a time: they take the device from what is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """One replica's ``part``, its place, which is that ``stage`` of a route through so many, and its limits.
    ``send_timeout_s`` bounds one hand-over, ``max_under_way`` the graphs and payloads held of the open step, of the
    next one half as many; four times as many may send (hosted) targets ahead, ``max_fed`` bounds the microbatches of
    one trainer in a step, and the hops that are computed again for it. ``retention_bytes`` is the budget for what is
    retained of computed microbatches until their step closes, ``deferred_bytes`` that for gradients of weights that are
    computed when there is nothing else to do: 0 computes them with the input's. ``seed`` is that of dropout; ``ahead``
    says that the step after the open one may be fed early, ``mixture`` that the model is one of experts. ``hop`` is
    that of its work (:class:`~swarm.ids.StepWork`)."""

    run: RunId
    part: PartName
    stage: int
    stages: int
    specs: BoundarySpecs
    seed: int = 0
    max_queue: int = 32
    max_under_way: int = 64
    max_fed: int = 1 << 16
    send_timeout_s: float = 30.0
    retention_bytes: int = RETENTION_BYTES
    ahead: bool = False
    deferred_bytes: int = 0
    mixture: bool = False
    hop: int = 0
    keeps_graphs: bool = True

    @property
    def max_ahead(self) -> int:
        """Return how many targets may wait for their microbatch."""
        return 4 * self.max_under_way

    @property
    def first(self) -> bool:
        """Return whether this is the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Return whether this is the last stage."""
        return self.stage == self.stages - 1

    @property
    def computes_loss(self) -> bool:
        """Return whether forward and backward are one piece of work here."""
        return self.last and self.specs.hosted

    @property
    def defers(self) -> bool:
        """Return whether gradients of weights are computed later. A last stage that computes the loss tells that with
        its receipt, for which its trainer waits."""
        return self.deferred_bytes > 0 and not self.computes_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a replica works with. ``seals`` signs with this peer's key what it sends, ``sign`` its receipts."""

    endpoint: Endpoint
    device: Device
    compute: StageCompute
    sign: Callable[[bytes], bytes]
    seals: Seals
    events: EventSink
    clock: Clock


@dataclass(frozen=True, slots=True)
class Participants:
    """Who takes part in a step: whose microbatches are taken, who may stand where on a route, and which of them on one
    route; of the ``unfed`` trainers none counts. ``variants`` says of a stage's replicas which hold the same."""

    trainers: frozenset[PeerId]
    stages: tuple[frozenset[PeerId], ...]
    borders: Borders = OPEN
    unfed: frozenset[PeerId] = frozenset()
    variants: Mapping[PeerId, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trainers: Iterable[PeerId],
        stages: Iterable[Iterable[PeerId]],
        borders: Borders = OPEN,
        unfed: Iterable[PeerId] = (),
        variants: Mapping[PeerId, tuple[int, int]] = MappingProxyType({}),
    ) -> Participants:
        """Return those of a roster's slices."""
        return cls(frozenset(trainers), tuple(map(frozenset, stages)), borders, frozenset(unfed), variants)

    def same(self, stage: int, peer: PeerId, other: PeerId) -> bool:
        """Return whether a peer holds the stage, and the variant of it that another one does."""
        return peer in self.stages[stage] and self.variants.get(peer) == self.variants.get(other)

    def shared(self, peer: PeerId, trainer: PeerId) -> bool:
        """Return whether a replica may get microbatches that count of others than this trainer."""
        return any(self.borders.near(peer, other) for other in self.trainers - self.unfed - {trainer})


class AdmissionRules:
    """What one replica takes in the open step, whose ``participants`` these are."""

    def __init__(
        self,
        settings: StageSettings,
        context: StageContext,
        table: MicrobatchTable,
        participants: Participants,
    ) -> None:
        self._settings, self._context, self._table = settings, context, table
        self.participants = participants
        self._evaluated = 0

    def alike(self, stage: int, peer: PeerId) -> list[PeerId]:
        """Return who holds what a replica of a stage holds in the open step."""
        now = self.participants
        return sorted(one for one in now.stages[stage] if now.same(stage, one, peer))

    # --- rules of all --------------------------------------------------------------------------------------------

    def journey(self, body: RoutedMessage) -> None:
        """A message of a microbatch's way. Raises WrongStep, Busy for what may be known later, or Refused: also for a
        way that its trainer did not choose. Else any replica could have us go one with an attempt above all that the
        trainer makes, so that nobody takes the microbatch."""
        self._place(body, body.route)
        known, route = self._table.of(body), tuple(map(PeerId, body.route))
        told = known is not None and (known.key, known.route, known.chosen) == (body.key, route, body.chosen)
        if not (told or self._context.seals.chosen(body.key, route, body.chosen)):
            raise Refused("its trainer did not choose this way")
        if known is not None:
            known.check(body, route)
        elif self._table.given_up(body):
            raise Refused("it was begun anew since")

    def _place(self, body: JourneyMessage | Recall, route: tuple[str, ...]) -> None:
        if not passes(route, self._settings.stages, self._settings.stage, self._context.endpoint.peer):
            raise Refused("the route does not lead through this replica")
        self._opened(body, route)

    def _opened(self, body: JourneyMessage | Recall, route: tuple[str, ...]) -> None:
        step, opened = body.step, self._table.step
        work = self._table.window.work_of(body)
        self._everybody(work, route)
        if not max(1, opened) <= step <= opened + 1:
            raise WrongStep(f"step {step} is not open here, step {opened} is")
        # Which record the next step will follow nobody knows yet.
        if step == opened and not work.early and body.after != self._table.window.after:
            raise WrongStep(f"step {step} follows another record here")
        if work.early and not self._context.compute.part.computes(work.version):
            raise Refused(f"the parameters after step {work.version} are not held here")

    def _everybody(self, work: StepWork, route: tuple[str, ...]) -> None:
        """Who takes part in the step after the open one is known when it opens: until then a stranger may be new, but
        for early work, which those of the open step do."""
        trainer, may_be_new = work.microbatch.trainer, work.version == self._table.step
        if trainer not in self.participants.trainers:
            reason = f"{trainer} is not a trainer whose microbatches pass here"
            raise Busy("not open yet") if may_be_new else Refused(reason)
        if (found := stranger(route, self.participants.stages)) is not None:
            reason = f"{found[1]} does not hold the stage at which the route names it"
            raise Busy("not open yet") if may_be_new else Refused(reason)
        self.participants.borders.check(self._context.endpoint.peer, (trainer, *route))

    def _upstream(self, trainer: PeerId, route: tuple[str, ...]) -> str:
        return standing_at(route, self._settings.stage - 1, trainer)

    def _downstream(self, trainer: PeerId, route: tuple[str, ...]) -> str:
        return standing_at(route, self._settings.stage + 1, trainer)

    def _room(self, work: StepWork, known: MicrobatchState | None) -> float:
        """Until when there is a place for it. Raises Busy when it has none and all are taken by what may still go on.
        A trainer beside which others may feed has half of them at most. What comes ahead of its step takes no place
        from the open one's."""
        now, most = self._context.clock.monotonic(), self._settings.max_under_way
        if known is None:
            self._check_fed(work)
        if known is None or not known.under_way(now):
            most = most if work.step == self._table.step else max(1, most // 2)
            there = [one for one in self._table if one.key.step == work.step and one.under_way(now)]
            me, trainer = self._context.endpoint.peer, work.microbatch.trainer
            own = [one for one in there if one.key.microbatch.trainer == trainer]
            crowded = len(own) >= max(1, most // 2) and self.participants.shared(me, trainer)
            if crowded and not self._give_way(own, now):
                raise Busy(f"{len(own)} microbatches of its trainer under way")
            if not crowded and len(there) >= most and not self._give_way(there, now):
                raise Busy(f"{len(there)} microbatches under way")
        return now + self._settings.send_timeout_s

    def _check_fed(self, work: StepWork) -> None:
        """Raises Refused where its trainer has fed more of the step than any may: all that does not count has to be
        computed once more when the step closes, to take it out again."""
        fed = self._table.fed_beside(work)
        if fed >= self._settings.max_fed:
            trainer, step = work.microbatch.trainer, work.step
            raise Refused(f"{fed} microbatches of {trainer} in step {step}, where it may not feed so many")

    def _give_way(self, there: Iterable[MicrobatchState], now: float) -> bool:
        """Forget the one of these microbatches which has waited for longest, if it is longer than any should: whose
        trainer is gone, or has gone on without us and could not say so. Nothing is lost: who still wants it brings the
        gradient, and the input is fetched. False when there is none."""
        before = now - self._table.stay.seconds()
        idle = [one for one in there if one.idle(before)]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.arrived)
        reason = "nothing came of it for too long"
        logger.info("microbatch %s makes room: %s", oldest.work, reason)
        self._table.drop(oldest, reason)
        return True

    def _only_trainer(self, caller: PeerId, body: JourneyMessage) -> None:
        if caller != body.microbatch.trainer:
            raise Refused("only its trainer reroutes a microbatch")

    # --- of each message -----------------------------------------------------------------------------------------

    def forward(self, caller: PeerId, body: Forward, payload_bytes: int) -> None:
        """An activation: from the stage before, of the right size, and there must be room. Keeps a place for it."""
        settings = self._settings
        self.journey(body)
        upstream = self._upstream(body.microbatch.trainer, body.route)
        if caller != upstream or body.hop != settings.stage:
            raise Refused(f"forward for stage {settings.stage} must come from {upstream}")
        tokens_come = settings.first and settings.specs.hosted
        specs = settings.specs
        expected = (
            (specs.token_bytes,)
            if tokens_come
            else specs.arriving_bytes(self._table.window.work_of(body).ready_in, "forward")
        )
        if payload_bytes not in expected:
            raise Violation(f"activation of {payload_bytes} bytes{_where(expected)}", peer=caller)
        known = self._table.of(body)
        if known is not None and known.here:
            return  # the trainer asks again, or a neighbour that was replaced by this attempt: it is known to us
        if known is not None and known.forward_attempt >= body.attempt:
            raise Refused("this microbatch is already on its way here")
        if self._table.queue.full(body.step):
            raise Busy("the queue is full")
        expires = self._room(self._table.window.work_of(body), known)
        state, _ = self._table.note(body)
        state.forward_attempt, state.expires = body.attempt, expires

    def targets(self, caller: PeerId, body: Targets, payload_bytes: int) -> None:
        """Hosted targets, from the trainer."""
        self.journey(body)
        if caller != body.microbatch.trainer or not self._settings.computes_loss:
            raise Refused("targets go from their trainer to the last stage of a run with hosted ends")
        expected = self._settings.specs.target_bytes
        if payload_bytes != expected:
            raise Violation(f"targets of {payload_bytes} bytes where {expected} are expected", peer=caller)
        known = self._table.of(body)
        ahead = sum(state.ahead for state in self._table)
        if known is None and ahead >= self._settings.max_ahead:
            raise Busy(f"{ahead} targets wait for their microbatch")

    def backward(self, caller: PeerId, body: Backward, payload_bytes: int) -> None:
        """A gradient, from the stage after. Of a microbatch that never came by it is taken, too, where there is room:
        the input can be fetched. Keeps a place for it."""
        settings = self._settings
        self.journey(body)
        downstream = self._downstream(body.microbatch.trainer, body.route)
        if caller != downstream or body.hop != settings.stage:
            raise Refused(f"backward for stage {settings.stage} must come from {downstream}")
        if settings.computes_loss:
            raise Refused("the loss is computed here: there is no gradient to bring")
        expected = settings.specs.arriving_bytes(self._table.window.work_of(body).ready_in, "backward")
        if payload_bytes not in expected:
            raise Violation(f"gradient of {payload_bytes} bytes{_where(expected)}")
        known = self._table.of(body)
        if known is not None and (known.accumulated or known.tensors.gradient is not None):
            return  # it is told again, and this payload is not kept
        expires = self._room(self._table.window.work_of(body), known)
        state, _ = self._table.note(body)
        state.expires = max(state.expires, expires)

    def resend(self, caller: PeerId, body: Resend) -> None:
        """The trainer wants the output to go elsewhere. Raises Refused where the input was not here."""
        self._only_trainer(caller, body)
        self.journey(body)
        if body.hop != self._settings.stage + 1 or self._settings.last:
            raise Refused(f"stage {self._settings.stage} hands on to the next stage only, not to {body.hop}")
        known = self._table.of(body)
        if known is None or (known.tensors.input is None and known.tensors.output is None):
            raise Refused("the output to send again is not held here")

    def adopt(self, caller: PeerId, body: Adopt) -> None:
        """The trainer wants this replica to take the hop over."""
        self._only_trainer(caller, body)
        self.journey(body)
        if body.hop != self._settings.stage:
            raise Refused(f"this is stage {self._settings.stage}, not {body.hop}")
        known = self._table.of(body)
        if known is None or not known.accumulated:
            self._room(self._table.window.work_of(body), known)

    def evaluate(self, caller: PeerId, body: Evaluate, payload_bytes: int) -> None:
        """Rows that a trainer of the open step wants to know the loss of; a few at a time. Keeps a place for them
        until :meth:`evaluated`."""
        self.open_to(caller, body)
        settings = self._settings
        specs, tokens_come = settings.specs, settings.first and settings.specs.hosted
        inputs = (specs.token_bytes,) if tokens_come else specs.arriving_bytes(body.step, "forward")
        behind = specs.target_bytes if settings.computes_loss else 0
        expected = tuple(size + behind for size in inputs)
        if payload_bytes not in expected:
            raise Violation(f"rows of {payload_bytes} bytes{_where(expected)}", peer=caller)
        if self._evaluated >= MAX_EVALUATED:
            raise Busy(f"{self._evaluated} evaluations are under way")
        self._evaluated += 1

    def evaluated(self, caller: PeerId, body: Evaluate) -> None:
        """An evaluation that was admitted is over."""
        self._evaluated -= 1

    def open_to(self, caller: PeerId, body: Evaluate) -> None:
        """Check whether this peer may have rows evaluated now. Raises Refused, WrongStep, or Busy where the step is
        next."""
        if caller not in self.participants.trainers or body.microbatch.trainer != caller:
            raise Refused("only a trainer has rows of its own evaluated")
        self.participants.borders.check(self._context.endpoint.peer, (caller,))
        if body.hop != self._settings.stage:
            raise Refused(f"this is stage {self._settings.stage}, not {body.hop}")
        if body.step == self._table.step + 1:
            raise Busy("not open yet")
        if body.step != self._table.step or body.after != self._table.window.after:
            raise WrongStep(f"step {body.step} is not open here, step {self._table.step} is")

    def recall(self, caller: PeerId, body: Recall) -> None:
        """A neighbour on the route wants its tensor again, or another of the stage to judge what went through it. Its
        parameters must be here: its step's be open, or it early work of the next."""
        self._place(body, body.route)
        opened, stage = self._table.step, self._settings.stage
        ready = body.step == opened or self._table.window.work_of(body).early
        if not ready or body.hop != stage:
            raise WrongStep(f"stage {stage} is in step {opened}, not {body.hop} in {body.step}")
        after = body.what in ("output", "received")
        neighbour = (self._downstream if after else self._upstream)(body.microbatch.trainer, body.route)
        if caller not in (neighbour, body.microbatch.trainer, *self.alike(stage, self._context.endpoint.peer)):
            raise Refused(f"{body.what} of stage {stage} goes to {neighbour} only")

    def audit(self, caller: PeerId, body: Audit) -> None:
        """A trainer of the open step wants to know whether another replica of this stage did what it signed for. Raises
        Violation for a receipt that is forged."""
        settings, route = self._settings, body.route
        if caller != body.microbatch.trainer:
            raise Refused("only its trainer has a hop computed again")
        accused = standing_at(route, body.hop, caller)
        if body.hop != settings.stage or not passes(route, settings.stages, body.hop, accused):
            raise Refused(f"this is stage {settings.stage} of {settings.stages}")
        if accused == self._context.endpoint.peer:
            raise Refused("nobody judges what it did itself")
        self._opened(body, route)
        work = self._table.window.work_of(body)
        if body.step != self._table.step or work.early:
            raise WrongStep(f"step {body.step} is not open here with the parameters that it was computed with")
        told = told_digest(body.content, body.seals)
        if not self._context.seals.receipted_by(accused, body.key, body.hop, told, body.tokens, body.receipt):
            raise Violation(f"the receipt is not of {accused}", peer=caller)


def _where(expected: tuple[int, ...]) -> str:
    return f" where {' or '.join(map(str, expected))} are expected"

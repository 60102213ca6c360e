"""What a replica takes: decided before a payload is read, and once more when it is here."""

from __future__ import annotations

from collections.abc import Callable

from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.pipeline.messages import Adopt, Backward, Forward, JourneyMessage, Recall, Resend, Targets
from swarm.pipeline.stage.context import Places, StageContext, StageSettings
from swarm.pipeline.stage.microbatch_state import Passage, Passages


class Admission:
    """One replica's rules for the open step. ``full`` says that the queue takes no more forwards of a step."""

    def __init__(
        self,
        settings: StageSettings,
        context: StageContext,
        passages: Passages,
        full: Callable[[int], bool],
        places: Places,
    ) -> None:
        self._settings, self._context, self._passages, self._full = settings, context, passages, full
        self.step, self._places, self._after = 0, places, ""

    def open_step(self, step: int, places: Places, after: str) -> None:
        """Rules of another step, which follows the record whose hash begins with ``after``."""
        self.step, self._places, self._after = step, places, after

    def replicas(self, stage: int) -> frozenset[PeerId]:
        """Who holds a stage in the open step."""
        return self._places.stages[stage]

    # --- rules of all --------------------------------------------------------------------------------------------

    def journey(self, body: JourneyMessage, route: tuple[str, ...]) -> None:
        """A message of a microbatch's way. Raises WrongStep, Busy for what may be known later, or Refused."""
        self._place(body, route)
        known = self._passages.find(body.step, body.microbatch)
        if known is not None:
            self._passages.check(known, body, tuple(map(PeerId, route)))

    def _place(self, body: JourneyMessage | Recall, route: tuple[str, ...]) -> None:
        step, stage = body.step, self._settings.stage
        if len(route) != self._settings.stages or route[stage] != self._context.endpoint.peer:
            raise Refused("the route does not lead through this replica")
        self._everybody(step, body.microbatch, route)
        if not max(1, self.step) <= step <= self.step + 1:
            raise WrongStep(f"step {step} is not open here, step {self.step} is")
        if step == self.step and body.after != self._after:  # which record the next will follow nobody knows yet
            raise WrongStep(f"step {step} follows another record here")

    def _everybody(self, step: int, microbatch: MicrobatchId, route: tuple[str, ...]) -> None:
        """Who takes part in the step after the open one is known when it opens: until then a stranger may be new."""
        trainer, may_be_new = microbatch.trainer, step == self.step + 1
        if trainer not in self._places.trainers:
            raise Busy("not open yet") if may_be_new else Refused(f"{trainer} is not a trainer of this run")
        stranger = next((p for p, known in zip(route, self._places.stages, strict=True) if p not in known), None)
        if stranger is not None:
            reason = f"{stranger} does not hold the stage at which the route names it"
            raise Busy("not open yet") if may_be_new else Refused(reason)

    def _upstream(self, microbatch: MicrobatchId, route: tuple[str, ...]) -> str:
        return microbatch.trainer if self._settings.first else route[self._settings.stage - 1]

    def _downstream(self, microbatch: MicrobatchId, route: tuple[str, ...]) -> str:
        return microbatch.trainer if self._settings.last else route[self._settings.stage + 1]

    def _room(self, step: int, known: Passage | None) -> float:
        """Until when there is a place for it. Raises Busy when it has none and all are taken by what may still go on.
        What comes ahead of its step takes no place from the open one's."""
        now, most = self._context.clock.monotonic(), self._settings.max_under_way
        if known is None or not known.under_way(now):
            under_way = self._passages.under_way(step, now)
            full = under_way >= (most if step == self.step else max(1, most // 2))
            if full and not self._passages.give_way(step, now):
                raise Busy(f"{under_way} microbatches under way")
        return now + self._settings.send_timeout_s

    def _only_trainer(self, caller: PeerId, body: JourneyMessage) -> None:
        if caller != body.microbatch.trainer:
            raise Refused("only its trainer reroutes a microbatch")

    # --- of each message -----------------------------------------------------------------------------------------

    def forward(self, caller: PeerId, body: Forward, payload_bytes: int) -> None:
        """An activation: from the stage before, of the right size, and there must be room. Keeps a place for it."""
        settings = self._settings
        self.journey(body, body.route)
        upstream = self._upstream(body.microbatch, body.route)
        if caller != upstream or body.hop != settings.stage:
            raise Refused(f"forward for stage {settings.stage} must come from {upstream}")
        tokens_come = settings.first and settings.specs.hosted
        expected = settings.specs.token_bytes if tokens_come else settings.specs.activation_bytes
        if payload_bytes != expected:
            raise Violation(f"activation of {payload_bytes} bytes where {expected} are expected", peer=caller)
        known = self._passages.find(body.step, body.microbatch)
        if known is not None and (known.begun or known.adopting or known.accumulated):
            return  # the trainer asks again, or a neighbour that was replaced by this attempt: it is known to us
        if known is not None and known.forward_attempt >= body.attempt:
            raise Refused("this microbatch is already on its way here")
        if self._full(body.step):
            raise Busy("the queue is full")
        expires = self._room(body.step, known)
        passage = self._passages.note(body, body.route)
        passage.forward_attempt, passage.expires = body.attempt, expires

    def targets(self, caller: PeerId, body: Targets, payload_bytes: int) -> None:
        """Hosted targets, from the trainer."""
        self.journey(body, body.route)
        if caller != body.microbatch.trainer or not self._settings.computes_loss:
            raise Refused("targets go from their trainer to the last stage of a run with hosted ends")
        expected = self._settings.specs.token_bytes
        if payload_bytes != expected:
            raise Violation(f"targets of {payload_bytes} bytes where {expected} are expected", peer=caller)
        known = self._passages.find(body.step, body.microbatch)
        ahead = sum(passage.ahead for passage in self._passages)
        if known is None and ahead >= self._settings.max_ahead:
            raise Busy(f"{ahead} targets wait for their microbatch")

    def backward(self, caller: PeerId, body: Backward, payload_bytes: int) -> None:
        """A gradient, from the stage after. Of a microbatch that never came by it is taken, too, where there is room:
        the input can be fetched. Keeps a place for it."""
        settings = self._settings
        self.journey(body, body.route)
        downstream = self._downstream(body.microbatch, body.route)
        if caller != downstream or body.hop != settings.stage:
            raise Refused(f"backward for stage {settings.stage} must come from {downstream}")
        if settings.computes_loss:
            raise Refused("the loss is computed here: there is no gradient to bring")
        if payload_bytes != settings.specs.activation_bytes:
            raise Violation(f"gradient of {payload_bytes} bytes where {settings.specs.activation_bytes} are expected")
        known = self._passages.find(body.step, body.microbatch)
        if known is not None and (known.accumulated or known.gradient is not None):
            return  # it is told again, and this payload is not kept
        expires = self._room(body.step, known)
        passage = self._passages.note(body, body.route)
        passage.expires = max(passage.expires, expires)

    def resend(self, caller: PeerId, body: Resend) -> None:
        """The trainer wants the output to go elsewhere. Raises Refused where the input was not here."""
        self._only_trainer(caller, body)
        self.journey(body, body.route)
        if body.hop != self._settings.stage + 1 or self._settings.last:
            raise Refused(f"stage {self._settings.stage} hands on to the next stage only, not to {body.hop}")
        passage = self._passages.find(body.step, body.microbatch)
        if passage is None or (passage.input is None and passage.output is None):
            raise Refused("the output to send again is not held here")

    def adopt(self, caller: PeerId, body: Adopt) -> None:
        """The trainer wants this replica to take the hop over."""
        self._only_trainer(caller, body)
        self.journey(body, body.route)
        if body.hop != self._settings.stage:
            raise Refused(f"this is stage {self._settings.stage}, not {body.hop}")
        known = self._passages.find(body.step, body.microbatch)
        if known is None or not known.accumulated:
            self._room(body.step, known)

    def recall(self, caller: PeerId, body: Recall) -> None:
        """A neighbour on the route wants its tensor again. Its step must be open: the parameters are the step's."""
        self._place(body, body.route)
        if body.step != self.step or body.hop != self._settings.stage:
            raise WrongStep(f"stage {self._settings.stage} is in step {self.step}, not {body.hop} in {body.step}")
        after = body.what == "output"
        neighbour = (self._downstream if after else self._upstream)(body.microbatch, body.route)
        if caller not in (neighbour, body.microbatch.trainer):
            raise Refused(f"{body.what} of stage {self._settings.stage} goes to {neighbour} only")

"""A stage replica's side of a journey: admit, queue, compute, pass on, and give again what others lost.

Admission (``admission.py``) is decided before a payload is read. Work (``work.py``) is done one piece at a time on the
device thread; handing results on happens beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from swarm.errors import Busy, Refused, WrongStep
from swarm.events import RetentionDropped
from swarm.ids import PeerId, stage_part
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.pipeline.messages import (
    ADOPT,
    ATTEND,
    BACKWARD,
    DROP,
    FORWARD,
    RECALL,
    RESEND,
    TARGETS,
    Adopt,
    Backward,
    Drop,
    Forward,
    ProbeRequest,
    Recall,
    Resend,
    Targets,
)
from swarm.pipeline.recall import Recalls
from swarm.pipeline.settle import Assigned, StageSettling, settle
from swarm.pipeline.stage.admission import Admission
from swarm.pipeline.stage.context import Places, StageContext, StageSettings
from swarm.pipeline.stage.handover import Handover
from swarm.pipeline.stage.microbatch_state import Passage, Passages
from swarm.pipeline.stage.takeover import Takeover
from swarm.pipeline.stage.worker import Worker
from swarm.schema import Empty

logger = logging.getLogger(__name__)
DONE = Empty()
TAKEN = Answer(DONE)


class StageServer:
    """The ``pipeline/1`` service of one replica. ``open_step`` moves it from step to step."""

    def __init__(self, settings: StageSettings, context: StageContext, places: Places) -> None:
        self._settings, self._context = settings, context
        self._sending: asyncio.TaskGroup | None = None
        self._of_journeys: set[asyncio.Task[None]] = set()
        self._passages = Passages(settings.retention_bytes, self._dropped)
        self._handover = Handover(settings, context)
        self._worker = Worker(settings, context, self._passages, self._handover, self._send)
        self._admission = Admission(settings, context, self._passages, self._worker.full, places)
        self._recalls = Recalls(settings, context, self._passages, self._spawn)
        self._takeover = Takeover(settings, self._passages, self._recalls, self._worker, self._handover)
        self._settling = StageSettling(settings, context, self._passages, self._recalls, self._admission.replicas)

    # --- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int, places: Places, after: str = "") -> None:
        """Accept and compute work of ``step``, which follows the record whose hash begins with ``after``; forget
        everything older, and what does not follow it."""
        self._admission.open_step(step, places, after)
        self._passages.open_step(step, after)
        self._worker.open_step(step)

    def rewound(self) -> None:
        """A lineage was given up: forget everything, for its steps come again, and others are meant. What is being sent
        of it is not sent further."""
        for sending in self._of_journeys:
            sending.cancel()
        self._passages.clear()
        self._worker.rewound()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._sending = group
            try:
                await self._worker.run()
            finally:
                self._sending = None  # a group that is closing takes nothing more

    async def settle(self, step: int, assigned: Assigned) -> None:
        """Have exactly the ``assigned`` microbatches in the open step; each comes with its route, which leads through
        us. See :func:`~swarm.pipeline.settle.settle`. Raises WrongStep when ``step`` is not open here."""
        if step != self._admission.step:
            raise WrongStep(f"step {step} is not open here, step {self._admission.step} is")
        for microbatch, route in assigned.items():
            if len(route) != self._settings.stages or route[self._settings.stage] != self._context.endpoint.peer:
                raise Refused(f"the route of {microbatch} does not lead through this replica")
        await settle(self._settling, step, assigned)

    # --- the service ---------------------------------------------------------------------------------------------

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        admission = self._admission
        return [
            FORWARD.handled_with_payload(self._on_forward, admit=admission.forward),
            TARGETS.handled_with_payload(self._on_targets, admit=admission.targets),
            BACKWARD.handled_with_payload(self._on_backward, admit=admission.backward),
            RESEND.handled(self._on_resend),
            ADOPT.handled(self._on_adopt),
            RECALL.handled_with_payload(self._on_recall),
            DROP.handled(self._on_drop),
            ATTEND.handled(self._on_attend),
        ]

    # The payload of an admitted message takes its time: what admission found may have changed meanwhile.

    async def _on_forward(self, caller: PeerId, body: Forward, incoming: Incoming) -> Answer[Empty]:
        self._admission.journey(body, body.route)
        passage = self._passages.find(body.step, body.microbatch)
        if passage is None:
            raise Refused("this forward is not awaited any more")
        if passage.begun or passage.adopting or passage.accumulated:
            return self._once_more(passage, body)
        if passage.forward_attempt != body.attempt:
            raise Refused("this forward is not awaited any more")
        passage.input, passage.begun = incoming.payload, True
        self._passages.retention.hold(passage)
        self._worker.want_forward(passage)
        return TAKEN

    def _once_more(self, passage: Passage, body: Forward) -> Answer[Empty]:
        """The microbatch is here already, by an earlier attempt. What was told and handed on before its trainer asked
        again may be lost."""
        newer = body.attempt > passage.key.attempt
        self._passages.note(body, body.route)
        if newer and passage.graph is not None and not passage.queued_back:
            self._send(self._handover.report_forward(passage, None))
            self._send(self._takeover.send_again(passage, self._settings.send_timeout_s))
        elif newer and passage.accumulated:
            self._send(self._takeover.tell_again(passage, self._settings.send_timeout_s))
        return TAKEN

    async def _on_targets(self, caller: PeerId, body: Targets, incoming: Incoming) -> Answer[Empty]:
        self._admission.journey(body, body.route)
        passage = self._passages.note(body, body.route)
        if passage.accumulated or passage.targets is not None:
            return TAKEN  # a trainer that comes back to a replica brings them again
        passage.targets = incoming.payload
        self._passages.retention.hold(passage)
        if passage.begun:
            self._worker.want_forward(passage)
        return TAKEN

    async def _on_backward(self, caller: PeerId, body: Backward, incoming: Incoming) -> Answer[Empty]:
        self._admission.journey(body, body.route)
        known = self._passages.find(body.step, body.microbatch)
        asked_anew = known is not None and body.attempt > known.key.attempt
        passage = self._passages.note(body, body.route)
        if passage.accumulated:
            if asked_anew and caller == body.microbatch.trainer:  # which has, or believes in, nothing of it
                self._send(self._takeover.tell_again(passage, self._settings.send_timeout_s))
            return TAKEN
        if passage.gradient is None:
            passage.gradient, passage.gradient_sender = incoming.payload, caller
            self._passages.retention.hold(passage)
        if passage.graph is not None or (passage.input is not None and not passage.begun):
            self._worker.want_back(passage)
        elif not passage.begun and not passage.adopting:
            self._send(self._takeover.adopt_unasked(passage, self._settings.send_timeout_s))
        return TAKEN  # else what is under way here finds the gradient when it has come so far

    async def _on_resend(self, caller: PeerId, body: Resend) -> Empty:
        self._admission.resend(caller, body)
        passage = self._passages.find(body.step, body.microbatch)
        if passage is None or body.attempt <= passage.key.attempt:
            raise Refused(f"attempt {body.attempt} was sent already")
        computing = passage.begun and passage.graph is None and passage.output is None and not passage.accumulated
        self._passages.note(body, body.route)
        if not computing:  # else it is handed on, along the new route, when it is done
            self._send(self._takeover.send_again(passage, self._settings.send_timeout_s))
        return DONE

    async def _on_adopt(self, caller: PeerId, body: Adopt) -> Empty:
        self._admission.adopt(caller, body)
        passage = self._passages.note(body, body.route)
        self._send(self._takeover.adopt(passage, body.within_s))
        return DONE

    async def _on_recall(self, caller: PeerId, body: Recall, incoming: Incoming) -> Answer[Empty]:
        self._admission.recall(caller, body)
        return await self._recalls.answer(caller, body, incoming)

    async def _on_drop(self, caller: PeerId, body: Drop) -> Empty:
        passage = self._passages.find(body.step, body.microbatch)
        if caller != body.microbatch.trainer:
            raise Refused("only its trainer drops a microbatch")
        if passage is None or passage.key.after != body.after or passage.key.attempt > body.attempt:
            return DONE  # it is not the one that is meant
        if passage.accumulated or passage.in_use:
            return DONE  # what is in the sum, or is just being added, is for the closing of the step to take out
        self._passages.drop(passage)
        return DONE

    async def _on_attend(self, caller: PeerId, body: ProbeRequest) -> Empty:
        await self._context.clock.sleep(body.seconds)
        return DONE

    # --- beside --------------------------------------------------------------------------------------------------

    def _send(self, work: Coroutine[Any, Any, None]) -> None:
        """For one journey, and nobody else waits for it: it ends with the lineage."""
        task = self._spawn(work)
        self._of_journeys.add(task)
        task.add_done_callback(self._of_journeys.discard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._sending is None:
            work.close()
            raise Busy("this replica does not work now")
        return self._sending.create_task(work)

    def _dropped(self, passage: Passage, size: int) -> None:
        key = passage.key
        reason = f"more than {self._settings.retention_bytes} bytes are retained in step {key.step}"
        part = stage_part(self._settings.stage)
        dropped = RetentionDropped(
            step=key.step, microbatch=key.microbatch, part=part, bytes_dropped=size, reason=reason
        )
        self._context.events.emit(dropped)

"""The service of a stage replica: what arrives, what is decided, what is done.

A message arrives and is admitted, before its payload is read and once more when it is here (``admission.py``); its
microbatch decides what follows and why (``microbatch_state.py``); :meth:`StageServer._do` has it done: by the worker,
one piece at a time on the device thread (``worker.py``), or beside it, where results are sent (``sender.py``) and what
others lost is given again or fetched (``recall.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from swarm.columns import passes
from swarm.errors import Busy, PeerError, Refused, WrongStep
from swarm.events import RetentionDropped
from swarm.ids import PeerId, StepWork
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.pipeline.activity import PipelineActivity
from swarm.pipeline.messages import (
    ADOPT,
    ATTEND,
    AUDIT,
    BACKWARD,
    DROP,
    EVALUATE,
    FORWARD,
    RECALL,
    RESEND,
    TARGETS,
    Adopt,
    Audit,
    Audited,
    Backward,
    Drop,
    Evaluate,
    Evaluated,
    Forward,
    ProbeRequest,
    Recall,
    Recalled,
    Resend,
    Targets,
)
from swarm.pipeline.recall import Errand, Missing, Recalls
from swarm.pipeline.retention import HeldOfMicrobatches
from swarm.pipeline.seals import Across, Sealed, hash_of
from swarm.pipeline.settle import Assigned, StageSettling, settle
from swarm.pipeline.stage.admission import AdmissionRules, Participants, StageContext, StageSettings
from swarm.pipeline.stage.auditing import Auditing
from swarm.pipeline.stage.memory import MemoryRelief
from swarm.pipeline.stage.microbatch_state import Action, MicrobatchState, Next, Phase
from swarm.pipeline.stage.sender import Sender
from swarm.pipeline.stage.table import MicrobatchTable
from swarm.pipeline.stage.worker import Worker
from swarm.schema import Empty

logger = logging.getLogger(__name__)
DONE = Empty()
TAKEN = Answer(DONE)


class StageServer:
    """The ``pipeline/1`` service of one replica. ``open_step`` moves it from step to step."""

    def __init__(self, settings: StageSettings, context: StageContext, participants: Participants) -> None:
        self._settings, self._context = settings, context
        self._sending: asyncio.TaskGroup | None = None
        self._of_journeys: set[asyncio.Task[None]] = set()
        self._table = MicrobatchTable(
            settings.retention_bytes, settings.max_queue, self._let_go, ahead=settings.ahead, hop=settings.hop
        )
        self._rules = AdmissionRules(settings, context, self._table, participants)
        memory = MemoryRelief(settings, context, self._table)
        self._recalls = Recalls(settings, context, self._table, memory, self._spawn)
        self._auditing = Auditing(settings, context, self._recalls)
        self._sender = Sender(settings, context, self._recalls)
        self._worker = Worker(settings, context, self._table, self._sender, memory, self._send)
        self._settling = StageSettling(settings, context, self._table, self._recalls, self._rules.alike)

    # --- what arrives --------------------------------------------------------------------------------------------

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        rules = self._rules
        return [
            FORWARD.handled_with_payload(self._on_forward, admit=rules.forward),
            TARGETS.handled_with_payload(self._on_targets, admit=rules.targets),
            BACKWARD.handled_with_payload(self._on_backward, admit=rules.backward),
            EVALUATE.handled_with_payload(self._on_evaluate, admit=rules.evaluate, over=rules.evaluated),
            RESEND.handled(self._on_resend),
            ADOPT.handled(self._on_adopt),
            RECALL.handled_with_payload(self._on_recall),
            AUDIT.handled_with_payload(self._on_audit),
            DROP.handled(self._on_drop),
            ATTEND.handled(self._on_attend),
        ]

    # The payload of an admitted message takes its time: what admission found may have changed meanwhile.

    async def _on_forward(self, caller: PeerId, body: Forward, incoming: Incoming) -> Answer[Empty]:
        across = Across(body.key, body.hop, "forward")
        sealed = await self._context.seals.opened(caller, across, incoming.payload, body.seal)
        self._rules.journey(body)
        state = self._table.of(body)
        if state is None:
            raise Refused("this forward is not awaited any more")
        if state.here:
            _, newer = self._table.note(body)
            self._do(state, state.after_forward_again(newer, hosted=self._settings.specs.hosted))
            return TAKEN
        state.take_input(body.attempt, incoming.payload, sealed)
        self._table.retention.hold(state)
        self._do(state, state.after_input(self._settings.computes_loss))
        return TAKEN

    async def _on_targets(self, caller: PeerId, body: Targets, incoming: Incoming) -> Answer[Empty]:
        sealed = Sealed(await hash_of(incoming.payload))
        self._rules.journey(body)
        state, _ = self._table.note(body)
        if state.take_targets(incoming.payload, sealed):
            self._table.retention.hold(state)
            self._do(state, state.after_input(self._settings.computes_loss))
        return TAKEN

    async def _on_backward(self, caller: PeerId, body: Backward, incoming: Incoming) -> Answer[Empty]:
        across = Across(body.key, body.hop, "backward")
        sealed = await self._context.seals.opened(caller, across, incoming.payload, body.seal)
        self._rules.journey(body)
        state, newer = self._table.note(body)
        if state.take_gradient(incoming.payload, caller, sealed):
            self._table.retention.hold(state)
        self._do(state, state.after_gradient(newer and caller == body.microbatch.trainer))
        return TAKEN

    async def _on_evaluate(self, caller: PeerId, body: Evaluate, incoming: Incoming) -> Answer[Evaluated]:
        self._rules.open_to(caller, body)
        context, first = self._context, self._settings.first
        work = StepWork(body.step, body.microbatch)
        if self._settings.computes_loss:
            judging = context.compute.evaluate_loss(incoming.payload, work, first=first)
            loss_sum, tokens = await context.device.run_phases(judging)
            return Answer(Evaluated(loss_sum=loss_sum, tokens=tokens))
        output = await context.device.run_phases(context.compute.evaluate(incoming.payload, work, first=first))
        return Answer(Evaluated(), output)

    async def _on_resend(self, caller: PeerId, body: Resend) -> Empty:
        self._rules.resend(caller, body)
        state = self._table.of(body)
        if state is None or body.attempt <= state.key.attempt:
            raise Refused(f"attempt {body.attempt} was sent already")
        self._table.note(body)
        self._do(state, state.after_resend())
        return DONE

    async def _on_adopt(self, caller: PeerId, body: Adopt) -> Empty:
        self._rules.adopt(caller, body)
        state, _ = self._table.note(body)
        self._send(self._adopt(state, body.within_s, pass_on=body.pass_on))
        return DONE

    async def _on_recall(self, caller: PeerId, body: Recall, incoming: Incoming) -> Answer[Recalled]:
        self._rules.recall(caller, body)
        return await self._recalls.answer(caller, body, incoming)

    async def _on_audit(self, caller: PeerId, body: Audit, incoming: Incoming) -> Answer[Audited]:
        self._rules.audit(caller, body)
        alone = not self._rules.participants.shared(self._context.endpoint.peer, caller)
        return Answer(await self._auditing.judge(body, incoming.deadline, alone=alone))

    async def _on_drop(self, caller: PeerId, body: Drop) -> Empty:
        state = self._table.of(body)
        if caller != body.microbatch.trainer:
            raise Refused("only its trainer drops a microbatch")
        if state is None or state.key.after != body.after or state.key.attempt > body.attempt:
            return DONE  # it is not the one that is meant
        if body.undo:
            return await self._undo(state)
        if state.counted or state.in_use:
            return DONE  # what is in the sum, or was, or is being added, is for the closing of the step to decide
        self._table.drop(state, "its trainer gave it to another replica")
        return DONE

    async def _undo(self, state: MicrobatchState) -> Empty:
        if state.in_use or state.phase is Phase.TURNED_BACK:
            raise Busy("it is just being added")
        if state.counted:
            self._table.keep(state)
        if state.accumulated:
            try:
                await self._settling.reverse(state.work)
            except BaseException:
                state.undone = False
                raise
        self._table.undo(state, "its trainer begins it anew")
        return DONE

    async def _on_attend(self, caller: PeerId, body: ProbeRequest) -> Empty:
        await self._context.clock.sleep(body.seconds)
        return DONE

    # --- what is done --------------------------------------------------------------------------------------------

    def _do(self, state: MicrobatchState, follows: Next) -> None:
        key = state.key
        logger.debug("step %d, microbatch %s: %s: %s", key.step, key.microbatch, follows.action.value, follows.reason)
        within_s = self._settings.send_timeout_s
        match follows.action:
            case Action.QUEUE_FORWARD:
                self._worker.queue("forward", state)
            case Action.QUEUE_BACKWARD:
                self._worker.queue("backward", state)
            case Action.FETCH:
                self._send(self._adopt_unasked(state, within_s))
            case Action.SEND_OUTPUT:
                self._send(self._sender.send_output_again(state))
            case Action.TELL_FORWARD:
                self._send(self._sender.report_forward(state, None))
                self._send(self._sender.send_output_again(state))
            case Action.TELL_BACKWARD | Action.HURRY:
                self._send(self._back_again(state, follows.action, within_s))
            case Action.NOTHING:
                pass

    async def _back_again(
        self, state: MicrobatchState, action: Action, within_s: float, *, pass_on: bool = True
    ) -> None:
        """Report a contribution that was added before, or have it added next; and if ``pass_on`` send the input's
        gradient again: one of them was lost, or what it was sent to."""
        if action is Action.TELL_BACKWARD:
            await self._sender.report_backward(state, None)
        else:
            self._worker.hurry(state)
        if pass_on:
            await self._sender.send_gradient_again(state, within_s)

    async def _adopt(self, state: MicrobatchState, within_s: float, *, pass_on: bool = True) -> None:
        """Take a hop over whose forward was somebody else's: fetch what is missing for at most ``within_s`` seconds,
        then queue the contribution. What was fetched before it failed is kept for the next attempt; one adoption of a
        microbatch goes on at a time. Of a contribution that was made before the input's gradient is computed anew and
        passed on only if ``pass_on``. What a neighbour cannot give the trainer is told of, and decides."""
        action = state.after_adopt().action
        if action in (Action.TELL_BACKWARD, Action.HURRY):
            await self._back_again(state, action, within_s, pass_on=pass_on)
        if action is not Action.FETCH:
            return
        state.adopting = True
        try:
            await self._fetch(state, within_s)
            if not state.dropped:
                self._worker.queue("backward", state)
        except Missing as missing:
            await self._sender.report_blocked(state.key, state.route, missing.hop, "backward", missing.error)
        finally:
            state.adopting = False

    async def _adopt_unasked(self, state: MicrobatchState, within_s: float) -> None:
        """The same where a gradient came and nothing else: the stage after says that there is such a microbatch. Where
        that cannot be had whole it is forgotten, and its trainer, told so, asks for it anew if it is one of his."""
        key = state.key
        await self._adopt(state, within_s)
        if state.key == key and not state.here and not state.dropped:
            self._table.drop(state, "what its backward takes cannot be had")

    async def _fetch(self, state: MicrobatchState, within_s: float) -> None:
        """Both neighbours at once. Where the route changed meanwhile, the rest is fetched along the new one."""
        while True:
            route, errand = state.route, Errand.of(state, within_s)
            back = self._recalls.targets if self._settings.computes_loss else self._recalls.output_gradient
            results = await asyncio.gather(self._recalls.input(errand), back(errand), return_exceptions=True)
            failed = next((result for result in results if isinstance(result, BaseException)), None)
            if failed is None:
                return
            if state.route == route or not isinstance(failed, PeerError):
                raise failed

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._sending = group
            try:
                await self._worker.run()
            finally:
                self._sending = None  # a group that is closing takes nothing more

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

    def _let_go(self, state: MicrobatchState, size: int) -> None:
        """Tell that what was retained of a microbatch was too much."""
        step, microbatch, *_ = state.work
        reason = f"more than {self._settings.retention_bytes} bytes are retained in step {step}"
        part = self._settings.part
        dropped = RetentionDropped(step=step, microbatch=microbatch, part=part, bytes_dropped=size, reason=reason)
        self._context.events.emit(dropped)

    def held(self) -> HeldOfMicrobatches:
        """Return what is held of microbatches now."""
        graphs = sum(state.tensors.graph is not None for state in self._table)
        return HeldOfMicrobatches(graphs, self._table.retention.bytes)

    def activity(self) -> PipelineActivity:
        """Return what is done now."""
        pace, phases = self._worker.pace, [state.phase for state in self._table]
        return PipelineActivity(
            queued=phases.count(Phase.QUEUED) + phases.count(Phase.QUEUED_BACK),
            under_way=len(phases) - phases.count(Phase.ACCUMULATED) - phases.count(Phase.TAKEN_OUT),
            microbatches=pace.microbatches,
            compute_s=pace.compute_s,
        )

    # --- steps ---------------------------------------------------------------------------------------------------

    def open_step(self, step: int, participants: Participants, after: str = "", before: str = "") -> None:
        """Accept and compute work of ``step``, which follows the record whose hash begins with ``after``, as that
        follows ``before``; forget everything older, and what does not follow it."""
        self._rules.participants = participants
        self._table.open_step(step, after, before)
        self._worker.wake()

    def rewound(self) -> None:
        """A lineage was given up: forget everything, for its steps come again, and others are meant. What is being sent
        of it is not sent further."""
        for sending in self._of_journeys:
            sending.cancel()
        self._table.clear("its lineage was given up")

    async def settle(self, step: int, assigned: Assigned) -> None:
        """Have exactly the ``assigned`` microbatches in the open step; each comes with its route, which leads through
        us. See :func:`~swarm.pipeline.settle.settle`. Raises WrongStep when ``step`` is not open here."""
        if step != self._table.step:
            raise WrongStep(f"step {step} is not open here, step {self._table.step} is")
        for work, route in assigned.items():
            if not passes(route, self._settings.stages, self._settings.stage, self._context.endpoint.peer):
                raise Refused(f"the route of {work} does not lead through this replica")
        await settle(self._settling, step, assigned)

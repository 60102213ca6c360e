"""One microbatch's way: out through one replica of every stage, loss, and back along the same replicas.

Read :meth:`Journey.travel` first. ``journey_state.py`` decides what to do and why; here it is done, over the network
and on the device, and what came of it goes back there, with the mail of the replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swarm.clock import Clock
from swarm.compression.dense import INT32
from swarm.device import Device
from swarm.errors import DeadlineMissed, PeerError, Refused, SwarmError, Unreachable, Violation
from swarm.events import EventSink, GradientsFarOut, HopAudited, HopDiffers, HopMoved, JourneyStarted
from swarm.ids import ATTEMPTS_OF_A_WAY, ENDS, JourneyKey, PeerId, StepWork
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Endpoint, Payload, Rpc
from swarm.pipeline.batch import Batch
from swarm.pipeline.boundary import BoundarySpecs, RowNotes, going_forward
from swarm.pipeline.compute import EndsCompute
from swarm.pipeline.messages import (
    ADOPT,
    BACKWARD,
    DROP,
    FORWARD,
    RESEND,
    TARGETS,
    Adopt,
    Backward,
    Blocked,
    Drop,
    Forward,
    HopReport,
    JourneyMessage,
    Resend,
    Targets,
)
from swarm.pipeline.retention import payload_bytes
from swarm.pipeline.seals import NOTHING, Across, Content, Sealed, Seals, Shown, differing, hash_of
from swarm.pipeline.trainer.audits import Audits, HopClaim, HopOutcome
from swarm.pipeline.trainer.flight import NOTHING_EARLY, EarlyRules
from swarm.pipeline.trainer.hops import (
    Directive,
    DropHop,
    JourneyPhase,
    MoveHop,
    PauseHop,
    Receipt,
    SendHop,
    SupplyTargets,
    SuspectReplica,
    Warn,
    WithdrawHop,
)
from swarm.pipeline.trainer.journey_state import JourneyState
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.schema import Empty
from swarm.security.statements import AuditStatement
from swarm.waiting import retry_while_busy

logger = logging.getLogger(__name__)
DROP_WITHIN_S = 5.0
MOST_DIFFERING = 3
"""A microbatch about which replicas differ so often is set aside. Before that it is begun anew each time, without one
more of them, or two, where others are there."""
RPCS: dict[str, tuple[Rpc[Any, Empty], type[JourneyMessage]]] = {
    "forward": (FORWARD, Forward),
    "resend": (RESEND, Resend),
    "backward": (BACKWARD, Backward),
    "adopt": (ADOPT, Adopt),
}
"""Verb of a call → how it is made, and with what."""


@dataclass(slots=True, kw_only=True)
class JourneyContext:
    """What all journeys of one trainer share. ``suspect`` asks the health watch to look at a peer; ``seed`` is the
    run's, ``specs`` what crosses its boundaries, ``target`` how many microbatches a step has, ``early`` how many of
    them may be fed early, ``most_loss`` the highest loss a token that a replica may report; ``audits`` has hops
    computed again by others, None nothing."""

    stages: int
    endpoint: Endpoint
    device: Device
    specs: BoundarySpecs
    ends: EndsCompute | None
    replicas: ReplicaChoice
    events: EventSink
    clock: Clock
    seals: Seals
    suspect: Callable[[PeerId, str], None]
    audits: Audits | None = None
    seed: int = 0
    target: int = 0
    early: EarlyRules = NOTHING_EARLY
    send_timeout_s: float = 30.0
    most_loss: float = math.inf


async def _to_nobody(claim: HopClaim, found: Sequence[AuditStatement]) -> None:
    """Nobody leads."""


@dataclass(frozen=True, slots=True)
class JourneyHooks:
    """What a trainer lends its journeys while it feeds: ``attend`` notices the death of peers, ``spawn`` does small
    things beside, ``warn`` has all its journeys look again, ``late`` hears whose turn has passed and when that began,
    ``accuse`` tells the step's leader what proves a replica wrong, and returns when that one knows."""

    attend: Callable[[Iterable[PeerId]], None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    warn: Callable[[], None] = lambda: None
    late: Callable[[PeerId, float], None] = lambda peer, since: None
    accuse: Callable[[HopClaim, Sequence[AuditStatement]], Coroutine[Any, Any, None]] = _to_nobody


# --- a microbatch, and what comes of it -------------------------------------------------------------------------------


class Poisoned(Exception):
    """The microbatch cannot be computed, whoever tries: it is to be set aside. Handled by the trainer."""


class Differs(Poisoned):
    """Its replicas do not agree about what went from one to the other, or about what comes of it; ``peer`` is the one
    that is not believed. Of what is not ``tallied`` each stage has one at most."""

    def __init__(self, peer: PeerId, why: str, *, tallied: bool = True) -> None:
        super().__init__(why)
        self.peer, self.tallied = peer, tallied


class OwnFailure(Poisoned):
    """It cannot be computed by its trainer's own part. One after the other: something is wrong with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJourney:
    """A finished journey, ready to be reported to the step's leader. ``queued_s`` are all hops' waits together,
    ``compute_s`` a stage's forward and backward."""

    key: JourneyKey
    early: bool
    choice: int
    route: tuple[PeerId, ...]
    tokens: int
    loss_sum: float
    receipts: tuple[Receipt, ...]
    seconds: float
    queued_s: float
    compute_s: dict[int, float]


Standing = Literal["counts", "left", "set aside", "forgone"]
"""``left``: the shard goes back to it, so that it is taken again before any other, in this step or in another.
``forgone``: it was taken back, and is begun anew if it is taken again. What is ``set aside`` never counts; the step's
leader must know of it as of what may."""
Outcome = FinishedJourney | Poisoned


@dataclass(slots=True, eq=False)
class IssuedMicrobatch:
    """One row. ``journey`` is there while it is under way, ``outcome`` when that is over, ``task`` while either goes on
    or what came of it is told. It is not ``leased`` while it was fed early and its leader has not granted it;
    ``untold`` says that its end waits for that. It is computed with the parameters of the record whose hash begins with
    ``after``. Implements :class:`~swarm.pipeline.retention.Retained`.

    ``output`` is the last stage's, ``gradient`` that of the first stage's input, both wire-encoded as they came;
    ``loss_gradient`` spares computing it from the output while the journey is under way. The batch itself is small, and
    read again from the shard where it is not known any more. ``added`` are the hashes of that output and gradient of
    which the private ends have added.
    """

    work: StepWork
    batch: Batch
    after: str = ""
    standing: Standing = "counts"
    leased: bool = True
    untold: bool = False
    journey: Journey | None = None
    outcome: Outcome | None = None
    task: asyncio.Task[None] | None = None
    route: tuple[PeerId, ...] = ()
    output: Payload | None = None
    gradient: Payload | None = None
    loss_gradient: Payload | None = None
    added: tuple[bytes, bytes] = (b"", b"")
    complete: bool = False

    @property
    def begun(self) -> bool:
        """Return whether it is under way, or its outcome is known."""
        return self.task is not None or self.outcome is not None

    @property
    def awaited(self) -> bool:
        """Return whether its gradient is still to come home: not of what waits for receipts alone, or is only being
        told to one who may have stalled."""
        returned = self.journey is not None and self.journey.returned_s is not None
        return self.task is not None and self.outcome is None and not returned

    @property
    def retained_bytes(self) -> int:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        return payload_bytes(self.output, self.gradient, self.loss_gradient)

    def clear(self) -> None:
        """Let go of everything large."""
        self.output = self.gradient = self.loss_gradient = None

    def stop(self) -> None:
        """What is done for it now ends; its outcome stays."""
        if self.task is not None:
            self.task.cancel()

    def withdraw(self) -> None:
        """Nobody wants it any more, nor what came of it."""
        self.outcome = None
        self.stop()


# --- one journey ------------------------------------------------------------------------------------------------------


class Journey:
    """A journey belongs to one (step, parameter version) for life; its trainer alone decides its route. ``returned_s``
    says how long it took until the gradient was home, and nothing but receipts missing; None before."""

    def __init__(self, context: JourneyContext, kept: IssuedMicrobatch, hooks: JourneyHooks) -> None:
        self._context, self._kept, self._hooks = context, kept, hooks
        version = kept.work.version if kept.work.early else None
        self._replicas = context.replicas.of(version, kept.batch.choice)
        self._without, self._differed = frozenset[PeerId](), 0
        self._doubtful: set[int] = set()  # stages of which nobody can say who is right
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._set_out(attempt=0)
        self._wake = asyncio.Event()
        self._bug: Exception | None = None
        self._started = 0.0
        self._queued_s = 0.0
        self._compute_s: dict[int, float] = {}

    def _set_out(self, attempt: int) -> None:
        """Nothing is known of the microbatch but its batch."""
        context, kept = self._context, self._kept
        self._state = JourneyState(
            self._replicas, context.stages, hosted=context.ends is None, attempt=attempt, without=self._without
        )
        self.returned_s: float | None = None
        self._first: Payload = b""  # what the first stage is sent
        self._targets: Payload = b""  # hosted ends: what the last one is sent
        self._output: Payload = b""
        self._sent = Content()  # our own tensors: the output and its gradient are what the stages get
        self._came = {"output": Sealed(), "gradient": Sealed()}
        self._graph: Any = None  # of the embedding
        self._head: Any = None  # what the head is to add
        self._home_from: PeerId | None = None  # who sent the gradient home
        self._counts = Receipt(b"")
        kept.clear()

    @property
    def key(self) -> JourneyKey:
        """The current attempt."""
        return JourneyKey(self._kept.work.step, self._kept.batch.id, self._state.way.attempt, self._kept.after)

    @property
    def route(self) -> tuple[PeerId, ...]:
        """One replica per stage, as it is now."""
        return self._state.way.route

    async def travel(self) -> FinishedJourney:
        """Go all the way, whoever fails on it; wait while a stage has nobody. Where replicas differ about what they
        sent each other nothing of that way counts, and another is gone without the one that is not believed.

        Raises Poisoned when it is the microbatch's own fault, WrongStep when the step was closed meanwhile. Cancelling
        abandons the microbatch: replicas forget it when the step closes.
        """
        while True:
            try:
                return await self._travel()
            except Differs as differs:
                self._differed += differs.tallied
                self._without |= {differs.peer}
                if self._differed >= MOST_DIFFERING or not await self._undone():
                    raise
                self._set_out(ATTEMPTS_OF_A_WAY * (self.key.way + 1))

    async def _travel(self) -> FinishedJourney:
        state = self._state
        try:
            self._do(state.begin(self._now()))
            await self._past(JourneyPhase.CHOOSING)
            await self._embed()
            while not (state.way.back or state.ended):
                await self._past(JourneyPhase.FORWARD)
                if state.phase is JourneyPhase.LOSS:
                    await self._loss()
            await self._past(JourneyPhase.BACKWARD)
            if state.phase in (JourneyPhase.ADDING, JourneyPhase.COMPLETE):
                self._compare()
                await self._audit()
            if state.phase is JourneyPhase.ADDING:
                await self._add()
        except Poisoned as poison:
            self._do(state.poisoned(str(poison)))
            raise
        finally:
            self._do(state.abandoned("nobody waits for it any more"))
        if state.phase is JourneyPhase.VOID:
            raise Poisoned(state.why)
        return self._finished()

    def _compare(self) -> None:
        """Compare what the neighbours on the route say of what went from one to the other, once all have added it. Of
        what they do not agree about nothing counts: who lies is named, and left out for a while. Where what was
        computed anew may have other bits nobody is. That counts, but where hops are judged: a judge sees what a replica
        says that it sent, and its neighbour had something else."""
        me, hops = self._context.endpoint.peer, self._state.way.shown()
        first = Content(output=self._sent.output, gradient=self._came["gradient"].hash)
        last = Content(input=self._came["output"].hash, sent=self._sent.sent)
        before = Shown(me, frozenset([me]), first, (b"", self._came["gradient"].signature))
        behind = Shown(me, frozenset([me]), last, (self._came["output"].signature, b""))
        found = differing(self._context.seals, self.key, [before, *hops, behind])
        if found is None or (found.among and self._context.audits is None):
            return
        step, microbatch, *_ = self._kept.work
        stage, peer, why, among = found
        if among:
            why = f"stage {stage}: one of {', '.join(sorted(among))} {why}, or has other bits"
            logger.info("step %d, microbatch %s is begun anew: %s", step, microbatch, why)
            self._without |= among
            raise Differs(peer, why)
        self._context.events.emit(HopDiffers(step=step, microbatch=microbatch, peer=peer, stage=stage, reason=why))
        self._context.replicas.wiring.fail(stage, peer, now=self._now(), reason=why, faulty=True)
        raise Differs(peer, f"stage {stage}: {peer} {why}")

    async def _audit(self) -> None:
        """Have what is drawn of the hops computed again by others of their stages, before anything of it counts.
        Where nobody can say who is right nothing more is asked about that stage: another's hop would be as doubtful.

        What proves a replica wrong the step's leader knows first, and the microbatch is reported after that: so no
        batch is complete without. The journey ends with the step, and what the leader was not told is lost with it."""
        audits = self._context.audits
        if audits is None:
            return
        hops = [(at, hop) for at, hop in enumerate(self._state.way.hops) if at not in self._doubtful]
        drawn = [HopClaim(self.key, self.route, at, hop.receipts[hop.replica])
                 for at, hop in hops if audits.draws(hop.replica)]  # fmt: skip
        found = await asyncio.gather(*map(audits.judge, drawn))
        for one in found:
            self._tell_of(one)
        await asyncio.gather(*(self._hooks.accuse(one.claim, one.proof) for one in found if one.proof))
        if out := next((one for one in found if not one.counts), None):
            stage, peer = out.claim.hop, out.claim.accused
            if self._replicas.present(stage) - self._without - {peer, *out.against}:
                self._without |= {*out.against}  # one that lies may judge, too, and would be given the hop
            raise Differs(peer, f"stage {stage}: {peer}: {out.reason}", tallied=out.outcome == "failed")

    def _tell_of(self, found: HopOutcome) -> None:
        """A hop was computed again."""
        step, microbatch, *_ = self._kept.work
        stage, peer = found.claim.hop, found.claim.accused
        self._context.events.emit(
            HopAudited(
                step=step,
                microbatch=microbatch,
                stage=stage,
                peer=peer,
                outcome=found.outcome,
                reason=found.reason,
                by=found.by,
            )
        )
        if found.outcome == "failed":
            wiring = self._context.replicas.wiring
            wiring.fail(stage, peer, now=self._now(), reason=found.reason, faulty=True)
        elif not found.counts:
            self._doubtful.add(stage)

    async def _undone(self) -> bool:
        """Have everybody who was ever given a hop take the microbatch out again, and forget it. False where one says
        that it does not. Nobody waits for one that is not believed where another is there, and who does not answer is
        left out: what these have in their sums for nothing they take out when the step closes."""
        asked, within_s = list[tuple[PeerId, int]](), self._context.send_timeout_s
        for at, hop in enumerate(self._state.way.hops):
            others = self._replicas.present(at) - self._without
            for peer in sorted(hop.named):
                if peer in self._without and others:
                    self._hooks.spawn(self._undo_quietly(peer, at, within_s))
                else:
                    asked.append((peer, at))
        results = await asyncio.gather(*(self._undo(*one, within_s) for one in asked), return_exceptions=True)
        for (peer, _), result in zip(asked, results, strict=True):
            if isinstance(result, (Unreachable, DeadlineMissed)):
                self._without |= {peer}
            elif isinstance(result, PeerError):
                return False
            elif isinstance(result, BaseException):
                raise result
        return True

    async def _undo_quietly(self, peer: PeerId, at: int, within_s: float) -> None:
        with contextlib.suppress(PeerError):
            await self._undo(peer, at, within_s)

    async def _undo(self, peer: PeerId, at: int, within_s: float) -> None:
        body = Drop(**self.key._asdict(), hop=at, undo=True)

        async def call() -> None:
            await self._context.endpoint.call(peer, DROP, body, timeout_s=within_s)

        await retry_while_busy(call, self._context.clock, within_s=within_s)

    async def _past(self, phase: JourneyPhase) -> None:
        """Wait until the journey is past a phase; what fails meanwhile is repaired."""
        while self._state.phase is phase:
            self._wake.clear()
            if self._bug is not None:
                raise self._bug
            now = self._now()
            self._do(self._state.look(now))
            if self._state.phase is phase:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._state.wait_s(now)):
                        await self._wake.wait()

    def _finished(self) -> FinishedJourney:
        self._kept.route = self.route
        receipts = [hop.receipts[hop.replica] for hop in self._state.way.hops]
        counts = receipts[-1] if self._context.ends is None else self._counts
        return FinishedJourney(
            key=self.key,
            early=self._kept.work.early,
            choice=self._kept.batch.choice,
            route=self.route,
            tokens=counts.tokens,
            loss_sum=counts.loss_sum,
            receipts=tuple(receipts),
            seconds=self._now() - self._started,
            queued_s=self._queued_s,
            compute_s=self._compute_s,
        )

    def _now(self) -> float:
        return self._context.clock.monotonic()

    # --- what is done ----------------------------------------------------------------------------------------------

    def _happened(self, directives: Iterable[Directive]) -> None:
        """Do what follows from it, and look again."""
        self._do(directives)
        if self.returned_s is None and self._state.way.returned:
            self.returned_s = self._now() - self._started
        self._wake.set()

    def _do(self, directives: Iterable[Directive]) -> None:
        for action, reason in directives:
            logger.debug("step %d, microbatch %s: %s: %s", self._kept.work.step, self._kept.batch.id, action, reason)
            match action:
                case SendHop() | PauseHop():
                    self._calls[action.at] = asyncio.create_task(self._attempt(action))
                case WithdrawHop():
                    self._calls.pop(action.at).cancel()
                case MoveHop():
                    self._moved(action, reason)
                case SuspectReplica():
                    self._context.suspect(action.peer, reason)
                case SupplyTargets():
                    self._hooks.spawn(self._supply(action.peer))
                case DropHop():
                    self._hooks.spawn(self._drop(action))
                case Warn():
                    self._hooks.warn()
                case JourneyPhase():
                    pass  # :meth:`travel` goes on with it

    def _moved(self, move: MoveHop, reason: str) -> None:
        self._hooks.attend([move.new])
        about = move._asdict()
        since = about.pop("since")
        if move.late:
            self._hooks.late(move.old, self._started if since is None else since)
        if move.new != move.old:
            step, microbatch, *_ = self._kept.work
            self._context.events.emit(HopMoved(step=step, microbatch=microbatch, reason=reason, **about))

    async def _embed(self) -> None:
        """Make what the first stage gets, and set out."""
        batch, ends, of = self._kept.batch, self._context.ends, self._kept.work
        self._started = self._now()
        self._context.events.emit(JourneyStarted(step=of.step, microbatch=batch.id, route=self.route))
        if ends is None:
            self._first = self._context.specs.joined(INT32.encode(batch.inputs, going_forward(of)), RowNotes.of(batch))
            self._targets = INT32.encode(batch.targets, going_forward(of))
            self._sent = self._sent._replace(sent=await hash_of(self._targets))
        else:
            seed = dropout_seed(self._context.seed, batch.id)
            try:
                self._first, self._graph = await self._on_device(ends.embed, batch.inputs, seed, of, RowNotes.of(batch))
            except Violation as error:  # not finite, and nothing has come yet from anybody
                raise OwnFailure(f"the trainer's own part: {error.reason}") from error
        self._sent = self._sent._replace(output=await hash_of(self._first))
        self._hooks.attend(self.route)
        self._do(self._state.embedded(self._now()))

    async def _loss(self) -> None:
        """Compute loss and gradient. An output of which no finite loss can be had is computed by another replica."""
        kept, ends, output = self._kept, self._context.ends, self._output
        self._output = b""
        assert ends is not None  # noqa: S101 - with hosted ends no output is taken
        try:
            found = await self._on_device(ends.loss, output, kept.batch.targets, self._kept.work)
        except Violation as error:
            self._do(self._state.output_unusable(error, self._now()))
            return
        loss_sum, tokens, kept.loss_gradient, self._head = found
        self._counts, kept.output = Receipt(b"", loss_sum=loss_sum, tokens=tokens), output
        self._sent = self._sent._replace(sent=await hash_of(kept.loss_gradient))
        self._do(self._state.loss_computed(self._now()))

    async def _add(self) -> None:
        """Add to the private ends' sums."""
        ends, gradient = self._context.ends, self._kept.gradient
        assert ends is not None  # noqa: S101 - hosted ends add nothing here
        assert gradient is not None  # noqa: S101 - the way is complete with it
        self._kept.added = self._came["output"].hash, self._came["gradient"].hash  # also where nobody waits any more
        try:
            await self._on_device(ends.finish, self._graph, gradient, self._head, self._kept.work)
        except Violation as error:  # not finite
            raise Poisoned(f"the trainer's own part: {error.reason}") from error
        of, sender = self._kept.work, self._home_from
        if sender is not None and (times := ends.bounds.far(of, sender)):
            self._context.events.emit(GradientsFarOut(step=of.step, part=ENDS, peer=sender, times=times))
        self._do(self._state.added())

    async def _on_device(self, work: Callable[..., Any], *about: Any) -> Any:
        try:
            return await self._context.device.run(work, *about)
        except SwarmError:
            raise
        except Exception as error:  # as for a replica: one microbatch
            raise OwnFailure(f"the trainer's own part: {type(error).__name__}: {error}") from error

    # --- what is sent ----------------------------------------------------------------------------------------------

    async def _attempt(self, action: SendHop | PauseHop) -> None:
        try:
            await self._attempted(action)
        except Exception as bug:  # noqa: BLE001 - raised where the journey is awaited
            self._bug = bug
            self._wake.set()

    async def _attempted(self, action: SendHop | PauseHop) -> None:
        failure: PeerError | None = None
        try:
            if isinstance(action, SendHop):
                await self._send(action)
            elif action.seconds:
                await self._context.clock.sleep(action.seconds)
        except PeerError as error:
            failure = error
        at, now, state = action.at, self._now(), self._state
        del self._calls[at]
        if isinstance(action, PauseHop):
            self._happened(state.paused(at, now))
        else:
            self._happened(state.sent(at, now) if failure is None else state.not_sent(at, failure, now))

    async def _send(self, send: SendHop) -> None:
        rpc, kind = RPCS[send.verb]
        key = self.key._replace(attempt=send.attempt)
        about: dict[str, Any] = {**key._asdict(), "route": send.route, "hop": send.at}
        about["chosen"] = self._context.seals.choose(key, send.route)
        if send.verb == "adopt":
            about |= {"within_s": send.within_s, "pass_on": send.pass_on}
        payload: Payload = b""
        if send.verb in ("forward", "backward"):
            out = send.verb == "forward"
            gradient = self._kept.loss_gradient or b""
            payload, hashed = (self._first, self._sent.output) if out else (gradient, self._sent.sent)
            about["seal"] = self._context.seals.seal(Across(self.key, send.at, send.verb), hashed)
        await self._context.endpoint.call(send.peer, rpc, kind(**about), timeout_s=send.within_s, payload=payload)

    async def _supply(self, last: PeerId) -> None:
        """Hosted ends: the last stage keeps the targets until the microbatch gets there. Busy is waited for."""
        within_s, key, route = self._context.send_timeout_s, self.key, self.route
        body = Targets(**key._asdict(), route=route, chosen=self._context.seals.choose(key, route))

        async def call() -> None:
            await self._context.endpoint.call(last, TARGETS, body, timeout_s=within_s, payload=self._targets)

        try:
            await retry_while_busy(call, self._context.clock, within_s=within_s)
        except PeerError as error:
            self._happened(self._state.not_supplied(last, error, self._now()))

    async def _drop(self, drop: DropHop) -> None:
        body = Drop(**self.key._asdict(), hop=drop.at)
        with contextlib.suppress(PeerError):
            await self._context.endpoint.notify(drop.peer, DROP, body, timeout_s=DROP_WITHIN_S)

    # --- mail ----------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Something was found out that concerns all journeys."""
        self._wake.set()

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone."""
        self._happened(self._state.lost(peer, reason, self._now()))

    def deliver_output(self, caller: PeerId, attempt: int, payload: Payload, sealed: Sealed) -> None:
        """The last stage's output arrived. Raises Refused for one that was never asked."""
        state, now = self._state, self._now()
        state.check_sender(caller, attempt, state.way.last, now)
        directives = state.output(caller, now)
        if directives:
            self._output, self._came["output"] = payload, sealed
            self._happened(directives)

    def deliver_gradient(self, caller: PeerId, attempt: int, payload: Payload, sealed: Sealed) -> None:
        """The first stage's input gradient arrived. Raises Refused from one that was never asked."""
        state = self._state
        state.check_sender(caller, attempt, 0, self._now())
        if state.phase is JourneyPhase.BACKWARD and not state.way.home:
            self._kept.gradient, self._home_from = payload, caller
            self._came["gradient"] = sealed
            self._happened(state.gradient())

    def deliver_report(self, caller: PeerId, report: HopReport) -> None:
        """A hop is done: feed wiring and pace, and keep its receipt. Raises Refused for a forged receipt or a loss that
        cannot be, and from one that was never asked."""
        state, now = self._state, self._now()
        state.check_sender(caller, report.attempt, report.hop, now)
        if report.direction == "backward" and not report.receipt:
            return self._happened(state.turned_back(report.hop, caller, now))
        receipt = self._receipt(caller, report) if report.direction == "backward" else None
        self._measure(caller, report, now)
        if receipt is None:
            self._happened(state.forwarded(report.hop, caller, now))
        else:
            self._happened(state.contributed(report.hop, caller, receipt, now))

    def _receipt(self, caller: PeerId, report: HopReport) -> Receipt:
        """With hosted ends the last stage says what the step counts: what cannot be so is refused here, where another
        replica can be asked. The leader would refuse it as well, and the batch never be complete."""
        counts = self._context.ends is None and report.hop == self._state.way.last
        content, told = Content.from_wire(report.content), (report.loss_sum, report.tokens) if counts else (0.0, 0)
        receipt = Receipt(report.receipt, content, report.seals, *told)
        signed = (receipt.digest, receipt.tokens, receipt.signature)
        if not self._context.seals.receipted_by(caller, self.key, report.hop, *signed):
            raise Refused("the receipt's signature does not verify")
        lacking = {name for name, hashed in content._asdict().items() if hashed == NOTHING}
        if self._context.ends is None:  # targets have no output, token ids no gradient
            lacking -= {"output"} if counts else set()
            lacking -= {"sent"} if report.hop == 0 else set()
        if lacking:
            raise Refused(f"a contribution that does not say what its {min(lacking)} is")
        counted = int((self._kept.batch.targets >= 0).sum()) if counts else 0
        if counts and (report.tokens != counted or not 0 <= report.loss_sum <= self._context.most_loss * counted):
            raise Refused(f"a loss of {report.loss_sum} over {report.tokens} tokens of {counted}")
        return receipt

    def _measure(self, caller: PeerId, report: HopReport, now: float) -> None:
        if report.again:
            return
        longest, began = now - self._started, self._state.way.asked_at(report.hop, caller)  # it may claim anything
        turn = None if began is None else (began, now)
        compute_s, wiring = min(report.compute_s, longest), self._context.replicas.wiring
        if caller == self._state.way.hops[report.hop].replica:
            wiring.in_time(report.hop, caller)
        compute_s = wiring.claimed(report.hop, caller, compute_s, report.direction, turn)
        self._queued_s += min(report.queued_s, longest)
        self._compute_s[report.hop] = self._compute_s.get(report.hop, 0.0) + compute_s

    def deliver_blocked(self, caller: PeerId, blocked: Blocked) -> None:
        """A replica could not compute the microbatch, or not pass it on. Raises Refused from one that was never asked
        about that hop or one beside it."""
        self._happened(self._state.blocked(caller, blocked, self._now()))

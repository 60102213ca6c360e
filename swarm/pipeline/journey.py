"""One microbatch's way: out through one replica of every stage, loss, and back along the same replicas.

Read :meth:`Journey.travel` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarm.clock import Clock
from swarm.compression.dense import INT32
from swarm.device import DeviceThread
from swarm.errors import Busy, DeadlineMissed, PeerError, Refused
from swarm.events import EventSink, HopMoved
from swarm.ids import JourneyKey, PeerId, RunId
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Endpoint, Payload
from swarm.pipeline.batch import Batch
from swarm.pipeline.compute import EndsCompute
from swarm.pipeline.messages import Backward, Blocked, Forward, HopReport, Resend, Targets
from swarm.pipeline.patience import Patience, insist
from swarm.pipeline.wiring import Wiring
from swarm.planning.deadlines import AdaptiveDeadline
from swarm.schema import Empty, Message
from swarm.security.receipts import receipt_bytes


class ReceiptCheck(Protocol):
    """Verifies a signature by a peer."""

    def __call__(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        """Whether ``signature`` over ``data`` is ``peer``'s."""


@dataclass(slots=True, kw_only=True)
class JourneyContext:
    """What all journeys of one trainer share. ``seed`` is the run's."""

    run: RunId
    stages: int
    endpoint: Endpoint
    device: DeviceThread
    ends: EndsCompute | None
    wiring: Wiring
    events: EventSink
    clock: Clock
    verify: ReceiptCheck
    deadline: AdaptiveDeadline
    suspect: Callable[[PeerId, str], None]
    seed: int = 0
    send_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJourney:
    """A finished journey, ready to be reported to the step's leader. ``queued_s`` are all hops' waits together,
    ``compute_s`` a stage's forward and backward."""

    key: JourneyKey
    route: tuple[PeerId, ...]
    tokens: int
    loss_sum: float
    receipts: tuple[bytes, ...]
    seconds: float
    queued_s: float
    compute_s: dict[int, float]


@dataclass(slots=True)
class _Mail:
    """What replicas sent about this journey."""

    output: asyncio.Future[Payload]
    gradient: asyncio.Future[Payload]
    receipts_complete: asyncio.Future[None]
    blocked: asyncio.Queue[Blocked] = field(default_factory=asyncio.Queue)
    forwarded: set[int] = field(default_factory=set)
    receipts: dict[int, bytes] = field(default_factory=dict)
    loss_sum: float = 0.0
    tokens: int = 0
    queued_s: float = 0.0
    compute_s: dict[int, float] = field(default_factory=dict)


class Journey:
    """A journey belongs to one (step, parameter version) for life; its trainer alone decides its route."""

    def __init__(self, context: JourneyContext, batch: Batch, step: int) -> None:
        loop = asyncio.get_running_loop()
        self._context, self._batch, self._step = context, batch, step
        self._attempt = 0
        self._patience: dict[int, Patience] = {}
        self._started = context.clock.monotonic()
        self.route = tuple(context.wiring.choose(stage)[0] for stage in range(context.stages))
        self._mail = _Mail(loop.create_future(), loop.create_future(), loop.create_future())

    @property
    def key(self) -> JourneyKey:
        """The current attempt."""
        return JourneyKey(self._step, self._batch.id, self._attempt)

    async def travel(self) -> FinishedJourney:
        """Go all the way. Raises PeerError when no replica could take a hop or a deadline was missed.

        Cancelling abandons the microbatch: replicas forget it when the step closes.
        """
        if self._context.ends is not None:
            loss_sum, tokens = await self._with_private_ends(self._context.ends)
        else:
            loss_sum, tokens = await self._with_hosted_ends()
        seconds = self._context.clock.monotonic() - self._started
        self._context.deadline.observe(seconds)
        receipts = tuple(self._mail.receipts[stage] for stage in range(self._context.stages))
        return FinishedJourney(
            key=self.key,
            route=self.route,
            tokens=tokens,
            loss_sum=loss_sum,
            receipts=receipts,
            seconds=seconds,
            queued_s=self._mail.queued_s,
            compute_s=self._mail.compute_s,
        )

    async def _with_private_ends(self, ends: EndsCompute) -> tuple[float, int]:
        context, batch = self._context, self._batch
        seed = dropout_seed(context.seed, batch.id)
        hidden, graph = await context.device.run(lambda: ends.embed(batch.inputs, seed))
        await self._send_first(hidden)
        output = await self._wait(self._mail.output)
        loss_sum, tokens, gradient, head = await context.device.run(lambda: ends.loss(output, batch.targets))
        await self._send_last(gradient)
        returned = await self._wait(self._mail.gradient)
        await self._wait(self._mail.receipts_complete)
        await context.device.run(lambda: ends.finish(graph, returned, head, batch.id))
        return loss_sum, tokens

    async def _with_hosted_ends(self) -> tuple[float, int]:
        await self._send_first(INT32.encode(self._batch.inputs))
        await self._wait(self._mail.receipts_complete)
        return self._mail.loss_sum, self._mail.tokens

    # --- sending -------------------------------------------------------------------------------------------------

    def _fields(self) -> dict[str, Any]:
        return {"step": self._step, "microbatch": self._batch.id, "attempt": self._attempt}

    async def _call(self, peer: PeerId, method: str, body: Message, payload: Payload = b"") -> None:
        await self._context.endpoint.call(
            peer, method, body, Empty, timeout_s=self._context.send_timeout_s, payload=payload
        )

    async def _insist(self, peer: PeerId, method: str, body: Message, payload: Payload) -> None:
        send_timeout_s = self._context.send_timeout_s
        await insist(lambda: self._call(peer, method, body, payload), self._context.clock, within_s=send_timeout_s)

    async def _send_first(self, payload: Payload) -> None:
        tried: set[PeerId] = set()
        async with _Deadline(self, self._context.deadline.seconds()):
            while True:
                body = Forward(**self._fields(), route=self.route, hop=0)
                try:
                    await self._call(self.route[0], "pipeline/1/forward", body, payload)
                    break
                except Busy as busy:
                    await self._reroute(0, busy, tried)
            if self._context.ends is None:
                await self._send_targets()

    async def _send_targets(self) -> None:
        """Hosted ends: the last stage keeps the targets until the microbatch gets there. Busy is waited for."""
        last = self._context.stages - 1
        body = Targets(**self._fields(), route=self.route)
        payload = INT32.encode(self._batch.targets)
        await self._insist(self.route[last], "pipeline/1/targets", body, payload)

    async def _send_last(self, gradient: Payload) -> None:
        last = self._context.stages - 1
        body = Backward(**self._fields(), route=self.route, hop=last)
        await self._insist(self.route[last], "pipeline/1/backward", body, gradient)

    # --- waiting and rerouting -----------------------------------------------------------------------------------

    async def _wait(self, future: asyncio.Future[Any]) -> Any:
        """Wait for mail, meanwhile moving hops that were blocked. Raises DeadlineMissed naming who is late."""
        tried: dict[int, set[PeerId]] = {}
        async with _Deadline(self, self._context.deadline.seconds()):
            while not future.done():
                blocked = asyncio.ensure_future(self._mail.blocked.get())
                try:
                    await asyncio.wait({future, blocked}, return_when=asyncio.FIRST_COMPLETED)
                    if blocked.done() and not future.done():
                        await self._unblock(blocked.result(), tried)
                finally:
                    blocked.cancel()
            return future.result()

    async def _unblock(self, blocked: Blocked, tried: dict[int, set[PeerId]]) -> None:
        error = PeerError.from_code(blocked.code, blocked.reason, blocked.peer)
        if blocked.attempt != self._attempt:
            return
        if blocked.code in ("unreachable", "deadline"):
            self._context.suspect(PeerId(blocked.peer), blocked.reason)
        elsewhere = blocked.code in ("busy", "unreachable", "deadline")
        if blocked.direction == "backward" or blocked.hop == 0 or not elsewhere:
            raise error
        await self._reroute(blocked.hop, error, tried.setdefault(blocked.hop, set()))
        resend = Resend(**self._fields(), route=self.route, hop=blocked.hop)
        await self._call(self.route[blocked.hop - 1], "pipeline/1/resend", resend)
        if self._context.ends is None and blocked.hop == self._context.stages - 1:
            await self._send_targets()

    async def _reroute(self, hop: int, error: PeerError, tried: set[PeerId]) -> None:
        """Choose another replica for a stage; when all were tried, wait (longer each time) and start over."""
        old = self.route[hop]
        tried.add(old)
        if tried >= set(self._context.wiring.replicas(hop)):
            tried.clear()
            patience = self._patience.setdefault(hop, Patience(self._context.wiring.typical_seconds(hop)))
            await self._context.clock.sleep(patience.pause_s())
        new, _ = self._context.wiring.choose(hop, exclude=tried)
        self.route = (*self.route[:hop], new, *self.route[hop + 1 :])
        self._attempt += 1
        self._mail.forwarded -= set(range(hop, self._context.stages))
        if new == old:
            return
        moved = HopMoved(
            step=self._step,
            microbatch=self._batch.id,
            stage=hop,
            old=old,
            new=new,
            reason=f"{error.code}: {error.reason}",
        )
        self._context.events.emit(moved)

    def late(self) -> str:
        """Who has not answered, for the error of a missed deadline: on the way out the stages that have not computed
        it yet, on the way back those without a receipt."""
        stages, mail = range(self._context.stages), self._mail
        waiting = [s for s in stages if s not in mail.forwarded and s not in mail.receipts]
        waiting = waiting or [s for s in stages if s not in mail.receipts]
        missing = ", ".join(f"stage {s} ({self.route[s]})" for s in waiting)
        return f"microbatch {self._batch.id} of step {self._step} waits for {missing or 'its gradient'}"

    # --- mail ----------------------------------------------------------------------------------------------------

    def deliver_output(self, caller: PeerId, attempt: int, payload: Payload) -> None:
        """The last stage's output arrived. Raises Refused when it is stale or from a stranger."""
        self._check_mail(caller, attempt, self.route[-1])
        if not self._mail.output.done():
            self._mail.output.set_result(payload)

    def deliver_gradient(self, caller: PeerId, attempt: int, payload: Payload) -> None:
        """The first stage's input gradient arrived."""
        self._check_mail(caller, attempt, self.route[0])
        if not self._mail.gradient.done():
            self._mail.gradient.set_result(payload)

    def deliver_report(self, caller: PeerId, report: HopReport) -> None:
        """A hop is done: feed wiring, and keep its receipt. Raises Refused for a forged receipt or a stale one.

        A forward stays done when a later hop is moved, so its report may be of an earlier attempt.
        """
        if report.hop >= self._context.stages or self.route[report.hop] != caller:
            raise Refused("not on the route of this microbatch")
        if report.attempt > self._attempt or (report.direction == "backward" and report.attempt != self._attempt):
            raise Refused(f"attempt {report.attempt}: attempt {self._attempt} is awaited")
        longest = self._context.clock.monotonic() - self._started  # a replica may claim anything
        queued_s, compute_s = min(report.queued_s, longest), min(report.compute_s, longest)
        self._context.wiring.observe(report.hop, caller, queued_s + compute_s)
        self._mail.queued_s += queued_s
        self._mail.compute_s[report.hop] = self._mail.compute_s.get(report.hop, 0.0) + compute_s
        if report.direction == "forward":
            self._mail.forwarded.add(report.hop)
            return
        expected = receipt_bytes(self._context.run, self._step, self._batch.id, report.hop)
        if not self._context.verify(caller, expected, report.receipt):
            raise Refused("the receipt's signature does not verify")
        self._mail.receipts[report.hop] = report.receipt
        if report.hop == self._context.stages - 1:
            self._mail.loss_sum, self._mail.tokens = report.loss_sum, report.tokens
        if len(self._mail.receipts) == self._context.stages and not self._mail.receipts_complete.done():
            self._mail.receipts_complete.set_result(None)

    def deliver_blocked(self, caller: PeerId, blocked: Blocked) -> None:
        """A replica could not compute the microbatch or pass it on. Raises Refused when it is stale, or about a hop
        that is not the sender's own or the next on its way."""
        sender = blocked.hop - 1 if blocked.direction == "forward" else blocked.hop + 1
        if caller not in (self.route[s] for s in (blocked.hop, sender) if 0 <= s < self._context.stages):
            raise Refused("not on the route of this microbatch")
        if blocked.attempt != self._attempt:
            raise Refused(f"attempt {blocked.attempt}: attempt {self._attempt} is awaited")
        self._mail.blocked.put_nowait(blocked)

    def _check_mail(self, caller: PeerId, attempt: int, expected: PeerId) -> None:
        if caller != expected or attempt != self._attempt:
            raise Refused(f"attempt {attempt} from {caller}: attempt {self._attempt} from {expected} is awaited")


class _Deadline:
    """``asyncio.timeout`` that ends in a DeadlineMissed naming the journey's missing hops."""

    def __init__(self, journey: Journey, seconds: float) -> None:
        self._journey, self._seconds = journey, seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *details: Any) -> None:
        try:
            await self._timeout.__aexit__(*details)
        except TimeoutError as error:
            raise DeadlineMissed(f"{self._journey.late()} for more than {self._seconds:.1f} s") from error

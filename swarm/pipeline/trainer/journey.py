"""One microbatch's way: out through one replica of every stage, loss, and back along the same replicas.

Read :meth:`Journey.travel` first. ``repair.py`` says what happens when a replica fails or is late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.compression.dense import INT32
from swarm.errors import Refused, SwarmError, Violation
from swarm.ids import JourneyKey, PeerId
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Payload
from swarm.pipeline.boundary import going_forward, with_starts
from swarm.pipeline.compute import EndsCompute
from swarm.pipeline.messages import Blocked, HopReport
from swarm.pipeline.trainer.blame import OwnFailure, Poisoned
from swarm.pipeline.trainer.context import JourneyContext
from swarm.pipeline.trainer.repair import JourneyHooks, Repair
from swarm.pipeline.trainer.route import Receipt
from swarm.pipeline.trainer.taken import IssuedMicrobatch
from swarm.security.signing import receipt_bytes

LOOK_EVERY_S = 1.0
"""How often a journey asks who is believed to be gone, when nothing else happens."""


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


class Journey:
    """A journey belongs to one (step, parameter version) for life; its trainer alone decides its route."""

    def __init__(
        self, context: JourneyContext, kept: IssuedMicrobatch, route: tuple[PeerId, ...], escort: JourneyHooks
    ) -> None:
        self._context, self._kept = context, kept
        self._step, self._batch, self._after = kept.step, kept.batch, kept.after
        self._started = context.clock.monotonic()
        self._wake = asyncio.Event()
        key = JourneyKey(kept.step, kept.batch.id, 0, kept.after)
        self._repair = Repair(context, key, route, escort, self._wake.set)
        self._way, self._cargo = self._repair.way, self._repair.cargo
        self._output: Payload | None = None
        self._queued_s = 0.0
        self._compute_s: dict[int, float] = {}

    @property
    def key(self) -> JourneyKey:
        """The current attempt."""
        return JourneyKey(self._step, self._batch.id, self._way.attempt, self._after)

    @property
    def route(self) -> tuple[PeerId, ...]:
        """One replica per stage, as it is now."""
        return self._way.route

    async def travel(self) -> FinishedJourney:
        """Go all the way, whoever fails on it; wait while a stage has nobody.

        Raises Poisoned when it is the microbatch's own fault, WrongStep when the step was closed meanwhile. Cancelling
        abandons the microbatch: replicas forget it when the step closes.
        """
        try:
            if self._context.ends is not None:
                loss_sum, tokens = await self._with_private_ends(self._context.ends)
            else:
                loss_sum, tokens = await self._with_hosted_ends()
        finally:
            self._repair.close()
        self._kept.route = self.route
        return FinishedJourney(
            key=self.key,
            route=self.route,
            tokens=tokens,
            loss_sum=loss_sum,
            receipts=tuple(hop.receipts[hop.replica].signature for hop in self._way.hops),
            seconds=self._context.clock.monotonic() - self._started,
            queued_s=self._queued_s,
            compute_s=self._compute_s,
        )

    async def _with_private_ends(self, ends: EndsCompute) -> tuple[float, int]:
        batch = self._batch
        seed, place = dropout_seed(self._context.seed, batch.id), (self._step, batch.id)
        embed = lambda: ends.embed(batch.inputs, seed, place, batch.positions)  # noqa: E731
        self._cargo.first, graph = await self._on_device(embed, OwnFailure)
        self._repair.set_out()
        loss_sum, tokens, gradient, head = await self._loss(ends)
        self._cargo.gradient = self._kept.loss_gradient = gradient
        self._repair.turn_back()
        await self._until(lambda: self._way.complete)
        self._repair.rest()
        returned = self._kept.gradient
        assert returned is not None  # noqa: S101 - home is set with it
        await self._on_device(lambda: ends.finish(graph, returned, head, place))
        return loss_sum, tokens

    async def _loss(self, ends: EndsCompute) -> tuple[float, int, memoryview, Any]:
        """Wait for the output. One of which no finite loss can be had is computed by another replica."""
        last = self._way.last
        while True:
            await self._until(lambda: self._output is not None)
            output, self._output = self._output, None
            assert output is not None  # noqa: S101 - awaited
            try:
                result: tuple[float, int, memoryview, Any] = await self._context.device.run(
                    ends.loss, output, self._batch.targets, (self._step, self._batch.id)
                )
            except Violation as error:
                self._repair.failed(last, error)
                continue
            except SwarmError:
                raise
            except Exception as error:  # as for a replica: one microbatch
                raise OwnFailure(f"the loss cannot be computed: {type(error).__name__}: {error}") from error
            self._kept.output = output
            self._repair.blame.answered(last, self._way.hops[last].replica)
            return result

    async def _with_hosted_ends(self) -> tuple[float, int]:
        context = going_forward((self._step, self._batch.id))
        self._cargo.first = with_starts(INT32.encode(self._batch.inputs, context), self._batch.positions)
        self._cargo.targets = INT32.encode(self._batch.targets, context)
        self._repair.set_out()
        await self._until(lambda: self._way.complete)
        hop = self._way.hops[-1]
        return hop.receipts[hop.replica].loss_sum, hop.receipts[hop.replica].tokens

    async def _on_device(self, work: Callable[[], Any], not_finite: type[Poisoned] = Poisoned) -> Any:
        """``not_finite``: whose doing it is when nothing finite comes of it, ours alone or also that of what came."""
        try:
            return await self._context.device.run(work)
        except Violation as error:
            raise not_finite(f"the trainer's own part: {error.reason}") from error
        except SwarmError:
            raise
        except Exception as error:  # as for a replica: one microbatch
            raise OwnFailure(f"the trainer's own part: {type(error).__name__}: {error}") from error

    async def _until(self, done: Callable[[], bool]) -> None:
        """Wait for mail, meanwhile repairing what breaks."""
        while not done():
            self._wake.clear()
            due_s = self._repair.look()
            if done():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S if due_s is None else min(due_s, LOOK_EVERY_S)):
                    await self._wake.wait()

    # --- mail ----------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Something was found out that concerns all journeys."""
        self._wake.set()

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone. Of what is complete its receipt counts: the step's closing makes up for what died."""
        if not self._way.complete:
            self._repair.lost(peer, reason)
            self._wake.set()

    def deliver_output(self, caller: PeerId, attempt: int, payload: Payload) -> None:
        """The last stage's output arrived; one is enough, whoever of those that were asked sends it. Raises Refused for
        one that was never asked."""
        last = self._way.last
        self._check_sender(caller, attempt, last)
        if self._way.back or self._output is not None:
            return
        self._observe(last, caller)
        if self._way.forwarded(last, caller):
            self._output = payload
            self._wake.set()

    def deliver_gradient(self, caller: PeerId, attempt: int, payload: Payload) -> None:
        """The first stage's input gradient arrived."""
        self._check_sender(caller, attempt, 0)
        if not self._way.back or self._way.home:
            return
        self._kept.gradient = payload
        self._way.home = True
        if self._way.done(0):
            self._way.hops[0].due = None
        self._wake.set()

    def deliver_report(self, caller: PeerId, report: HopReport) -> None:
        """A hop is done: feed wiring and pace, and keep its receipt. Raises Refused for a forged receipt or a loss that
        cannot be, and from one that was never asked."""
        self._check_sender(caller, report.attempt, report.hop)
        if report.direction == "backward":
            counts = self._context.ends is None and report.hop == self._way.last
            expected = receipt_bytes(self._context.run, self.key, report.hop, report.tokens if counts else 0)
            if not self._context.verify(caller, expected, report.receipt):
                raise Refused("the receipt's signature does not verify")
            self._check_loss(report)
        self._measure(caller, report)
        if report.direction == "forward":
            self._on_forwarded(caller, report.hop)
        else:
            receipt = Receipt(report.receipt, report.loss_sum, report.tokens)
            self._on_contributed(caller, report.hop, receipt)
        self._wake.set()

    def _check_loss(self, report: HopReport) -> None:
        """With hosted ends the last stage says what the step counts: what cannot be so is refused here, where another
        replica can be asked. The leader would refuse it as well, and the batch never be complete."""
        if self._context.ends is not None or report.hop != self._way.last:
            return
        counted = int((self._batch.targets >= 0).sum())
        if report.tokens != counted or report.loss_sum < 0:
            raise Refused(f"a loss of {report.loss_sum} over {report.tokens} tokens of {counted}")

    def _measure(self, caller: PeerId, report: HopReport) -> None:
        if report.again:
            return
        now = self._context.clock.monotonic()
        longest, began = now - self._started, self._way.asked_at(report.hop, caller)  # a replica may claim anything
        queued_s, compute_s = min(report.queued_s, longest), min(report.compute_s, longest)
        turn = None if began is None else (began, now)
        compute_s = self._context.wiring.claimed(report.hop, caller, compute_s, report.direction, turn)
        self._queued_s += queued_s
        self._compute_s[report.hop] = self._compute_s.get(report.hop, 0.0) + compute_s

    def _on_forwarded(self, caller: PeerId, at: int) -> None:
        if at == self._way.last:  # what counts is its output
            return
        self._observe(at, caller)
        if self._way.forwarded(at, caller):
            self._repair.blame.answered(at, caller)
            self._repair.awaits(at + 1, "forward")

    def _on_contributed(self, caller: PeerId, at: int, receipt: Receipt) -> None:
        if self._context.ends is not None and not self._way.back:
            raise Refused("there is no gradient yet of which this could be a contribution")
        hosted_turn = self._context.ends is None and at == self._way.last and not self._way.back
        self._observe(at, caller)
        if not self._way.contributed(at, caller, receipt):
            return
        self._repair.blame.answered(at, caller)
        if hosted_turn:
            self._repair.turn_back()
        before = at - 1
        if before >= 0 and self._way.back and self._way.hops[before].due is None:
            self._repair.awaits(before, "backward")

    def _observe(self, at: int, caller: PeerId) -> None:
        """How long the hop took, also where another was asked meanwhile: that was too short a time, then."""
        heard = self._way.heard_of(at, caller, self._context.clock.monotonic())
        if heard is not None:
            self._context.pace.observe(caller, *heard)

    def deliver_blocked(self, caller: PeerId, blocked: Blocked) -> None:
        """A replica could not compute the microbatch, or not pass it on. Raises Refused from one that was never asked
        about that hop or one beside it."""
        if blocked.hop > self._way.last or blocked.attempt > self._way.attempt:
            raise Refused("no such hop, or attempt, of this microbatch")
        near = (blocked.hop - 1, blocked.hop, blocked.hop + 1)
        if not any(self._way.ever_named(at, caller) for at in near):
            raise Refused("not on the route of this microbatch")
        self._context.silence.heard(caller, self._context.clock.monotonic())
        own = self._way.ever_named(blocked.hop, caller)
        if blocked.code in ("violation", "failed") and blocked.peer == caller and not own:
            raise Refused("a replica speaks for its own stage")
        self._repair.blocked(caller, blocked)

    def _check_sender(self, caller: PeerId, attempt: int, at: int) -> None:
        if not self._way.ever_named(at, caller):
            raise Refused(f"{caller} is not on the route of this microbatch")
        if attempt > self._way.attempt:
            raise Refused(f"attempt {attempt}: attempt {self._way.attempt} is awaited")
        self._context.silence.heard(caller, self._context.clock.monotonic())

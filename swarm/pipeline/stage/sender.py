"""What leaves a replica: results to its neighbours on the route, and reports to the trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from swarm.columns import standing_at
from swarm.errors import DeadlineMissed, PeerError, Refused
from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import Payload, RequestT, Rpc
from swarm.pipeline.messages import (
    BACKWARD,
    BLOCKED,
    FORWARD,
    GRADIENT,
    HOP,
    OUTPUT,
    Backward,
    Blocked,
    Direction,
    Forward,
    HopReport,
    InputGradient,
    Output,
)
from swarm.pipeline.recall import Errand, Missing, Recalls
from swarm.pipeline.seals import Across, hash_of, told_digest
from swarm.pipeline.stage.admission import StageContext, StageSettings
from swarm.pipeline.stage.microbatch_state import MicrobatchState
from swarm.schema import Empty
from swarm.security.signing import receipt_bytes
from swarm.waiting import LONGEST_TURN_S, MAX_DOUBLINGS, doubled, retry_while_busy

logger = logging.getLogger(__name__)
Report = Callable[[], Awaitable[None]]


class Sender:
    """Sends what leaves a replica, for the first time and again: tensors to its neighbours on the route, reports to the
    trainer. What is sent again is had anew of ``recalls`` where it is not held any more.

    Every method returns when the message was taken or cannot be delivered, and raises no PeerError: what a neighbour
    does not take, or cannot give, is reported to the trainer, which alone decides what to do."""

    def __init__(self, settings: StageSettings, context: StageContext, recalls: Recalls) -> None:
        self._settings, self._context, self._recalls = settings, context, recalls
        self._unheard: dict[PeerId, int] = {}
        self._late: dict[PeerId, int] = {}

    async def send_output(self, state: MicrobatchState, output: Payload) -> None:
        """The output, to the next stage or home. Under way, the microbatch may be sent along another route. What was
        added keeps the hash of what it was computed with."""
        hashed = await hash_of(output)
        if not state.accumulated:
            state.hashes.output = hashed
        key, route, chosen, hop = state.key, state.route, state.chosen, self._settings.stage + 1
        target, fields = standing_at(route, hop, key.microbatch.trainer), key._asdict()
        seal = self._context.seals.seal(Across(key, hop, "forward"), hashed)
        try:
            if self._settings.last:
                await self._home(key, OUTPUT, Output(**fields, seal=seal), output)
                state.tensors.output = None
            else:
                onward = Forward(**fields, route=route, chosen=chosen, hop=hop, seal=seal)
                await self._send(target, FORWARD, onward, output)
        except PeerError as error:
            await self.report_blocked(key, route, hop, "forward", error)

    async def hand_back(self, state: MicrobatchState, gradient: Payload | None, report: Report | None) -> None:
        """Hash the input's gradient, which a receipt waits for; then make the report, and send the gradient."""
        hashed = state.hashes.sent = await hash_of(gradient)
        assert state.hashing is not None  # noqa: S101 - so that no receipt goes before
        state.hashing.set()
        reports = [] if report is None else [report()]
        await asyncio.gather(*reports, self.send_gradient(state, gradient, hashed))

    async def send_gradient(self, state: MicrobatchState, gradient: Payload | None, hashed: bytes) -> None:
        """The input's gradient, with its hash, to the stage before or home; nothing where the input was token ids."""
        key, route, chosen, hop = state.key, state.route, state.chosen, self._settings.stage - 1
        target, fields = standing_at(route, hop, key.microbatch.trainer), key._asdict()
        if gradient is None:
            return
        seal = self._context.seals.seal(Across(key, hop, "backward"), hashed)
        if self._settings.first:
            await self._home(key, GRADIENT, InputGradient(**fields, seal=seal), gradient)
            return
        try:
            upstream = Backward(**fields, route=route, chosen=chosen, hop=hop, seal=seal)
            await self._hand_back(target, BACKWARD, upstream, gradient)
        except PeerError as error:
            await self.report_blocked(key, route, hop, "backward", error)

    async def send_output_again(self, state: MicrobatchState) -> None:
        """The output, along the microbatch's route; computed anew where it is not held any more."""
        try:
            output = await self._recalls.output(Errand.of(state, self._settings.send_timeout_s))
        except Missing as missing:
            await self.report_blocked(state.key, state.route, max(0, missing.hop), "forward", missing.error)
        except PeerError as error:
            await self.report_blocked(state.key, state.route, self._settings.stage, "forward", error)
        else:
            await self.send_output(state, output)

    async def send_gradient_again(self, state: MicrobatchState, within_s: float) -> None:
        """The input's gradient of what was handed on before: that was lost, or what it was sent to."""
        try:
            gradient = await self._recalls.input_gradient(Errand.of(state, within_s))
        except Missing as missing:
            await self.report_blocked(state.key, state.route, missing.hop, "backward", missing.error)
        except PeerError as error:
            await self.report_blocked(state.key, state.route, self._settings.stage, "backward", error)
        else:
            await self.send_gradient(state, gradient, await hash_of(gradient))

    async def _home(self, key: JourneyKey, rpc: Rpc[RequestT, Empty], body: RequestT, payload: Payload) -> None:
        """To the trainer, whom nobody needs to tell that it cannot be reached: its deadlines deal with it."""
        try:
            await self._hand_back(key.microbatch.trainer, rpc, body, payload)
        except Refused as refused:
            logger.debug("trainer %s no longer waits for this microbatch: %s", key.microbatch.trainer, refused)
        except PeerError as error:
            logger.info("trainer %s does not take %s: %s", key.microbatch.trainer, rpc.name, error)

    async def _hand_back(self, target: PeerId, rpc: Rpc[RequestT, Empty], body: RequestT, payload: Payload) -> None:
        """Only this peer can take it, so a busy one is asked again."""
        await retry_while_busy(
            lambda: self._send(target, rpc, body, payload),
            self._context.clock,
            within_s=self._settings.send_timeout_s,
        )

    async def _send(self, target: PeerId, rpc: Rpc[RequestT, Empty], body: RequestT, payload: Payload) -> None:
        """A neighbour that did not get one in time has twice as long for the next, until one takes less than a quarter
        of that: a full link carries none in half the time that it takes, however often it is sent."""
        times, began = self._late.get(target, 0), self._context.clock.monotonic()
        within_s = doubled(self._settings.send_timeout_s, times, LONGEST_TURN_S)
        try:
            await self._context.endpoint.call(target, rpc, body, timeout_s=within_s, payload=payload)
        except DeadlineMissed:
            self._late[target] = min(times + 1, MAX_DOUBLINGS)
            raise
        if times and self._context.clock.monotonic() - began < within_s / 4:
            self._late[target] = times - 1

    async def report_forward(self, state: MicrobatchState, took: tuple[float, float] | None) -> None:
        """A hop on the way out is done. ``took`` is (queued, computed) in seconds, None when this was told before."""
        await self._report(state, "forward", took)

    async def report_turned(self, state: MicrobatchState) -> None:
        """The gradient was handed on; the contribution's report, with receipt and time, follows."""
        await self._report(state, "backward", None)

    async def report_backward(self, state: MicrobatchState, took: tuple[float, float] | None) -> None:
        """A contribution was added: with the receipt, and where the loss is computed the loss."""
        if state.hashing is not None:
            await state.hashing.wait()
        loss_sum, tokens = state.loss
        content, came = state.hashes.content.to_wire(), state.hashes
        seals = (came.input.signature, came.gradient.signature)
        told = told_digest(content, seals)
        signed = receipt_bytes(self._settings.run, state.key, self._settings.stage, told, tokens)
        contributed = {"receipt": self._context.sign(signed), "loss_sum": loss_sum, "tokens": tokens}
        await self._report(state, "backward", took, content=content, seals=seals, **contributed)

    async def _report(
        self, state: MicrobatchState, direction: Direction, took: tuple[float, float] | None, **contributed: Any
    ) -> None:
        key = state.key
        queued, computed = took or (0.0, 0.0)
        report = HopReport(
            **key._asdict(),
            hop=self._settings.stage,
            direction=direction,
            queued_s=max(0.0, queued),
            compute_s=max(0.0, computed),
            again=took is None,
            **contributed,
        )
        try:
            await self._context.endpoint.notify(
                key.microbatch.trainer, HOP, report, timeout_s=self._settings.send_timeout_s
            )
        except PeerError as error:
            self._cannot_tell(key.microbatch.trainer, key.step, error)

    async def report_blocked(
        self, key: JourneyKey, route: tuple[PeerId, ...], hop: int, direction: Direction, error: PeerError
    ) -> None:
        """A hop can not be done. Says which attempt that was: another may be under way by now."""
        blocked = Blocked(
            **key._asdict(),
            hop=max(0, min(hop, self._settings.stages - 1)),
            direction=direction,
            peer=standing_at(route, hop, key.microbatch.trainer),
            code=error.code,
            reason=error.reason[:400],
        )
        trainer = key.microbatch.trainer
        try:
            await self._send(trainer, BLOCKED, blocked, b"")
        except Refused as refused:
            logger.debug("trainer %s no longer waits for this microbatch: %s", trainer, refused)
        except PeerError as error:  # its own deadline and the health watch deal with it
            self._cannot_tell(trainer, key.step, error)

    def _cannot_tell(self, trainer: PeerId, step: int, error: PeerError) -> None:
        """Said once a step of each trainer: one that is gone is told nothing of any of its microbatches."""
        if self._unheard.get(trainer, -1) < step:
            self._unheard[trainer] = step
            logger.info("cannot tell trainer %s: %s", trainer, error)

"""The loss of rows that nobody learns from, while a trainer trains: it asks one replica of each stage after the other.

Nothing of it enters a step: no graph is kept, no contribution added, no cursor moved, and wiring is not asked, whose
choices are a trainer's memory. So the weights are the same, bit for bit, with and without it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass

from swarm.compression.dense import INT32
from swarm.errors import PeerError, StateError
from swarm.events import HeldOutLoss
from swarm.ids import PeerId, StepWork
from swarm.network.protocols import Payload
from swarm.pipeline.batch import Batch, BatchSource
from swarm.pipeline.boundary import RowNotes, going_forward
from swarm.pipeline.messages import EVALUATE, Evaluate, Evaluated
from swarm.pipeline.trainer.journey import JourneyContext
from swarm.waiting import retry_while_busy

logger = logging.getLogger(__name__)
MOST_MICROBATCHES = 64
"""Of the rows, at a time: the first in their order, the same each time."""


@dataclass(slots=True, kw_only=True)
class HeldOutRows:
    """Rows that nobody learns from, and after how many steps each their loss is measured; the ``newest`` that was, with
    its step."""

    source: BatchSource
    every: int
    newest: tuple[int, float] | None = None


class HeldOut:
    """Measures the loss of a trainer's held-out rows with the parameters of each ``every``-th step, while the next one
    is learnt: what is measured when that closes is told with the number of microbatches that it is of."""

    def __init__(self, context: JourneyContext, rows: HeldOutRows) -> None:
        self._context, self._rows = context, rows
        self._due: tuple[int, str] | None = None
        self._wake = asyncio.Event()

    def open_step(self, step: int, after: str) -> None:
        """The step is open that follows the record whose hash begins with ``after``; what was measured of it or of
        later ones, before the run went back, counts no more."""
        if self._rows.newest is not None and self._rows.newest[0] >= step:
            self._rows.newest = None
        if (step - 1) % self._rows.every == 0:
            self._due = step, after
            self._wake.set()

    async def run(self) -> None:
        """Measure when it is due, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._due is not None:
                await self._measure(*self._due)

    async def _measure(self, step: int, after: str) -> None:
        source, total, tokens, done, why = self._rows.source, 0.0, 0, 0, ""
        source.seek((0, 0))
        most = min(source.microbatches_per_epoch, MOST_MICROBATCHES)
        try:
            for _ in range(most):
                loss_sum, counted = await self._loss(source.take(), step, after)
                total, tokens, done = total + loss_sum, tokens + counted, done + 1
        except (PeerError, StateError) as error:
            why = str(error)
        except Exception as error:  # what is only measured ends nobody who trains
            logger.exception("held-out rows after step %d", step - 1)
            why = f"{type(error).__name__}: {error}"
        loss = total / tokens if tokens and math.isfinite(total) else None
        if loss is not None:
            self._rows.newest = step - 1, loss
        self._context.events.emit(
            HeldOutLoss(step=step - 1, loss=loss, tokens=tokens, microbatches=done, most=most, reason=why)
        )

    async def _loss(self, batch: Batch, step: int, after: str) -> tuple[float, int]:
        context, work, rows = self._context, StepWork(step, batch.id), RowNotes.of(batch)
        ends, specs, last = context.ends, context.specs, context.stages - 1
        payload: Payload
        if ends is None:
            payload = specs.joined(INT32.encode(batch.inputs, going_forward(work)), rows)
        else:
            payload, _ = await context.device.run(ends.embed, batch.inputs, None, work, rows)
        answer = Evaluated()
        for hop in range(context.stages):
            if hop == last and ends is None:
                payload = b"".join((payload, INT32.encode(batch.targets, going_forward(work))))
            body = Evaluate(step=step, microbatch=batch.id, after=after, hop=hop)
            answer, payload = await self._ask(body, payload, batch.choice)
        if ends is None:
            return answer.loss_sum, answer.tokens
        loss_sum, counted, _, _ = await context.device.run(ends.loss, payload, batch.targets, work)
        return loss_sum, counted

    async def _ask(self, body: Evaluate, payload: Payload, choice: int) -> tuple[Evaluated, Payload]:
        context, peer = self._context, self._replica(body, choice)

        async def ask() -> tuple[Evaluated, Payload]:
            return await context.endpoint.call(
                peer,
                EVALUATE,
                body,
                timeout_s=context.send_timeout_s,
                payload=payload,
                max_reply_bytes=max(context.specs.arriving_bytes(body.step, "forward")),
            )

        return await retry_while_busy(ask, context.clock, within_s=context.send_timeout_s)

    def _replica(self, body: Evaluate, choice: int) -> PeerId:
        there = sorted(self._context.replicas.of(None, choice).present(body.hop))
        if not there:
            raise StateError(f"nobody holds stage {body.hop} now")
        return there[body.step % len(there)]

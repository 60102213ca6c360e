"""What leaves a replica: tensors to its neighbours on the route, reports to the trainer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from swarm.errors import PeerError, Refused
from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import Payload
from swarm.pipeline.messages import (
    Backward,
    Blocked,
    Direction,
    Forward,
    HopReport,
    InputGradient,
    JourneyMessage,
    Output,
)
from swarm.pipeline.passage import Passage
from swarm.pipeline.patience import insist
from swarm.schema import Empty
from swarm.security.receipts import receipt_bytes

if TYPE_CHECKING:
    from swarm.pipeline.server import StageContext, StageSettings

logger = logging.getLogger(__name__)


class Handover:
    """Every method returns when the message was taken or cannot be delivered, and raises no PeerError: what a neighbour
    does not take is reported to the trainer, which alone decides what to do."""

    def __init__(self, settings: StageSettings, context: StageContext) -> None:
        self._settings, self._context = settings, context

    async def pass_forward(self, passage: Passage, output: Payload) -> None:
        """The output, to the next stage or home. Under way, the passage may be sent along another route."""
        key, route, hop = passage.key, passage.route, self._settings.stage + 1
        fields: dict[str, Any] = {"step": key.step, "microbatch": key.microbatch, "attempt": key.attempt}
        try:
            if self._settings.last:
                await self._hand_back(key.microbatch.trainer, "trainer/1/output", Output(**fields), output)
                passage.output = None
            else:
                await self._send(route[hop], "pipeline/1/forward", Forward(**fields, route=route, hop=hop), output)
        except PeerError as error:
            await self.report_blocked(key, route, hop, "forward", error)

    async def pass_backward(self, passage: Passage, gradient: Payload | None) -> None:
        """The input's gradient, to the stage before or home; nothing where the input was token ids."""
        key, route, hop = passage.key, passage.route, self._settings.stage - 1
        fields: dict[str, Any] = {"step": key.step, "microbatch": key.microbatch, "attempt": key.attempt}
        try:
            if gradient is None:
                return
            if self._settings.first:
                trainer, body = key.microbatch.trainer, InputGradient(**fields)
                await self._hand_back(trainer, "trainer/1/gradient", body, gradient)
            else:
                upstream = Backward(**fields, route=route, hop=hop)
                await self._hand_back(route[hop], "pipeline/1/backward", upstream, gradient)
        except PeerError as error:
            await self.report_blocked(key, route, max(hop, 0), "backward", error)

    async def _hand_back(self, target: PeerId, method: str, body: JourneyMessage, payload: Payload) -> None:
        """Only this peer can take it, so a busy one is asked again."""
        await insist(
            lambda: self._send(target, method, body, payload),
            self._context.clock,
            within_s=self._settings.send_timeout_s,
        )

    async def _send(self, target: PeerId, method: str, body: JourneyMessage, payload: Payload = b"") -> None:
        await self._context.endpoint.call(
            target, method, body, Empty, timeout_s=self._settings.send_timeout_s, payload=payload
        )

    async def report(self, passage: Passage, direction: Direction, queued: float, computed: float, **loss: Any) -> None:
        """A hop is done. ``queued`` and ``computed`` in seconds; a backward's report carries the receipt."""
        key, stage = passage.key, self._settings.stage
        receipt = b""
        if direction == "backward":
            receipt = self._context.sign(receipt_bytes(self._settings.run, key.step, key.microbatch, stage))
        report = HopReport(
            step=key.step,
            microbatch=key.microbatch,
            attempt=key.attempt,
            hop=stage,
            direction=direction,
            queued_s=max(0.0, queued),
            compute_s=computed,
            receipt=receipt,
            **loss,
        )
        try:
            await self._context.endpoint.notify(
                key.microbatch.trainer, "trainer/1/hop", report, timeout_s=self._settings.send_timeout_s
            )
        except PeerError as error:
            logger.warning("cannot tell trainer %s: %s", key.microbatch.trainer, error)

    async def report_blocked(
        self, key: JourneyKey, route: tuple[PeerId, ...], hop: int, direction: Direction, error: PeerError
    ) -> None:
        """A hop can not be done. Says which attempt that was: another may be under way by now."""
        peer = route[hop] if hop < len(route) else key.microbatch.trainer
        blocked = Blocked(
            step=key.step,
            microbatch=key.microbatch,
            attempt=key.attempt,
            hop=min(hop, self._settings.stages - 1),
            direction=direction,
            peer=peer,
            code=error.code,
            reason=error.reason[:400],
        )
        await self._tell(key.microbatch.trainer, "trainer/1/blocked", blocked)

    async def _tell(self, trainer: PeerId, method: str, body: JourneyMessage) -> None:
        """Notify the trainer; if it cannot be told, its own deadline and the health watch deal with it."""
        try:
            await self._send(trainer, method, body)
        except Refused as refused:
            logger.debug("trainer %s no longer waits for this microbatch: %s", trainer, refused)
        except PeerError as error:
            logger.warning("cannot tell trainer %s: %s", trainer, error)

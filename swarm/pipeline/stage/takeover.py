"""Taking a hop over on the way back, and telling again what was done: :class:`Takeover` is a replica's side of it."""

from __future__ import annotations

import asyncio

from swarm.errors import PeerError
from swarm.pipeline.recall import Errand, Missing, Recalls
from swarm.pipeline.stage.context import StageSettings
from swarm.pipeline.stage.handover import Handover
from swarm.pipeline.stage.microbatch_state import Passage, Passages
from swarm.pipeline.stage.worker import Worker


class Takeover:
    """Prepares contributions whose forward was somebody else's. No method raises a PeerError: the trainer is told which
    neighbour cannot give what it should, and decides."""

    def __init__(
        self, settings: StageSettings, passages: Passages, recalls: Recalls, worker: Worker, handover: Handover
    ) -> None:
        self._settings, self._passages, self._recalls = settings, passages, recalls
        self._worker, self._handover = worker, handover

    async def adopt(self, passage: Passage, within_s: float) -> None:
        """Fetch what is missing for at most ``within_s`` seconds, then queue the contribution. What was fetched before
        it failed is kept for the next attempt; one adoption of a passage goes on at a time."""
        if passage.accumulated:
            await self.tell_again(passage, within_s)
            return
        if passage.adopting or passage.queued_back:
            return
        passage.adopting = True
        try:
            await self._fetch(passage, within_s)
            if self._passages.current(passage):
                self._worker.want_back(passage)
        except Missing as missing:
            await self._blocked(passage, missing)
        finally:
            passage.adopting = False

    async def adopt_unasked(self, passage: Passage, within_s: float) -> None:
        """The same where a gradient came and nothing else: the stage after says that there is such a microbatch. Where
        that cannot be had whole it is forgotten, and its trainer, told so, asks for it anew if it is one of his."""
        key = passage.key
        await self.adopt(passage, within_s)
        adopted = passage.begun or passage.accumulated or passage.adopting
        if passage.key == key and not adopted and self._passages.current(passage):
            self._passages.drop(passage)

    async def _fetch(self, passage: Passage, within_s: float) -> None:
        """Both neighbours at once. Where the route changed meanwhile, the rest is fetched along the new one."""
        while True:
            route, errand = passage.route, Errand.of(passage, within_s)
            back = self._recalls.targets if self._settings.computes_loss else self._recalls.output_gradient
            results = await asyncio.gather(self._recalls.input(errand), back(errand), return_exceptions=True)
            failed = next((result for result in results if isinstance(result, BaseException)), None)
            if failed is None:
                return
            if passage.route == route or not isinstance(failed, PeerError):
                raise failed

    async def tell_again(self, passage: Passage, within_s: float) -> None:
        """The report and the input's gradient of a contribution that was added before: one of them was lost, or what
        it was sent to."""
        await self._handover.report_backward(passage, None)
        try:
            gradient = await self._recalls.input_gradient(Errand.of(passage, within_s))
        except Missing as missing:
            await self._blocked(passage, missing)
        except PeerError as error:
            await self._handover.report_blocked(passage.key, passage.route, self._settings.stage, "backward", error)
        else:
            await self._handover.pass_backward(passage, gradient)

    async def send_again(self, passage: Passage, within_s: float) -> None:
        """The output, along the passage's route; computed anew where it is not held any more."""
        try:
            output = await self._recalls.output(Errand.of(passage, within_s))
        except Missing as missing:
            await self._handover.report_blocked(
                passage.key, passage.route, max(0, missing.hop), "forward", missing.error
            )
        except PeerError as error:
            await self._handover.report_blocked(passage.key, passage.route, self._settings.stage, "forward", error)
        else:
            await self._handover.pass_forward(passage, output)

    async def _blocked(self, passage: Passage, missing: Missing) -> None:
        await self._handover.report_blocked(passage.key, passage.route, missing.hop, "backward", missing.error)

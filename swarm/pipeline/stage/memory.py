"""Let go of what can be computed again, when a replica's device has no memory left for a piece of work."""

from __future__ import annotations

import logging
import traceback

from swarm.device import release_memory
from swarm.errors import Busy, PeerError
from swarm.events import GraphsDropped
from swarm.pipeline.stage.admission import StageContext, StageSettings
from swarm.pipeline.stage.table import MicrobatchTable

logger = logging.getLogger(__name__)

MOST_ALONE = 3
"""How often in a row work may find no memory while no graph is held, before it counts as work that does not fit: until
then another process may have had the memory for a moment."""


class MemoryRelief:
    """One replica's. Graphs spare computing a forward again before its backward, what backwards left to do spares both
    again; nothing else is lost with them."""

    def __init__(self, settings: StageSettings, context: StageContext, table: MicrobatchTable) -> None:
        self._settings, self._context, self._table = settings, context, table
        self._alone = 0

    def succeeded(self) -> None:
        """A piece of work found the memory that it takes."""
        self._alone = 0

    async def after(self, error: Exception, *, alone: bool = True) -> PeerError:
        """Drop the graphs of all microbatches that wait, what their backwards left to do, and what torch keeps of the
        device's memory. Return what to answer the one who wants the work: Busy, since there is room now, or a PeerError
        for work that found no room MOST_ALONE times although nothing else was held. ``alone``: no other work was under
        way.

        ``error`` is what :func:`~swarm.device.is_out_of_memory` is true of. The frames that it came through are
        cleared, for they hold the tensors of the work that failed.
        """
        device, why = self._context.device.torch_device, str(error).partition("\n")[0][:300]
        traceback.clear_frames(error.__traceback__)
        dropped = self._drop_graphs()
        await self._context.device.run(release_memory, device)
        part = self._settings.part
        event = GraphsDropped(step=self._table.step, part=part, device=str(device), graphs=dropped, reason=why)
        self._context.events.emit(event)
        logger.warning(
            "step %d: %s is out of memory; dropped %d graphs, which are computed again: %s",
            event.step,
            device,
            dropped,
            why,
        )
        self._alone = 0 if dropped or not alone else self._alone + 1
        if self._alone >= MOST_ALONE:
            return PeerError(f"{device} has no memory for it, though no other microbatch is held there: {why}")
        return Busy(f"{device} had no memory left, and {dropped} graphs were dropped")

    def _drop_graphs(self) -> int:
        """Drop them and return how many there were, those included of which a backward left something to do. Their
        microbatches stay in their phase: what is done without is computed from what is retained."""
        tensors = [state.tensors for state in self._table]
        holding = [held for held in tensors if held.graph is not None or held.rest is not None]
        for held in holding:
            held.graph = held.rest = None
        return len(holding)

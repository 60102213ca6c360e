"""When this peer writes its part to disk: at the genesis, every so many steps, and at the last one.

Only the first replica of a part writes it. On one machine all peers may share a directory; whoever writes the last
part of a step also declares the step complete.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from swarm.clock import Clock
from swarm.errors import StateError
from swarm.events import CheckpointWritten, EventSink
from swarm.ids import PartName
from swarm.optimization.records import CloseRecord
from swarm.state.checkpoint import CheckpointManifest, flaw, write_manifest, write_part
from swarm.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one peer's part beside the training. A full disk costs the checkpoint, never the run."""

    def __init__(self, root: Path, every: int | None, last_step: int, *, events: EventSink, clock: Clock) -> None:
        self._root, self._every, self._last_step = root, every, last_step
        self._events, self._clock = events, clock

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` is to be kept."""
        return step in (0, self._last_step) or (self._every is not None and step % self._every == 0)

    async def write(self, snapshot: Snapshot, record: CloseRecord) -> None:
        """Store the part off the event loop, and the step's manifest when every part is there."""
        started = self._clock.monotonic()
        try:
            path = await asyncio.to_thread(write_part, self._root, snapshot, {"run": record.run})
            await asyncio.to_thread(self._complete, record)
        except StateError as error:
            logger.error("checkpoint of step %d was not written: %s", record.step, error)
            return
        seconds = self._clock.monotonic() - started
        self._events.emit(CheckpointWritten(part=snapshot.part, step=snapshot.step, path=str(path), seconds=seconds))

    def _complete(self, record: CloseRecord) -> None:
        manifest = CheckpointManifest(
            run=record.run,
            step=record.step,
            parts={PartName(part): digest for part, digest in record.digests.items()},
            detail=record.model_dump(mode="json"),
        )
        try:
            write_manifest(self._root, manifest)
        except StateError:
            logger.debug("step %d still lacks a part: %s", record.step, flaw(self._root, record.step))

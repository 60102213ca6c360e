"""Hand out the checkpoints that a machine keeps on disk: the ``checkpoint/1`` service.

Its parts are described and handed out in the same chunks as a state in memory (``swarm.state.transfer``), records as
they lie there; the receiver verifies all of it. Only names that are ours are ever opened: a step's number and a part's
name, both decoded strictly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from swarm.errors import Refused, StateError, WrongStep
from swarm.ids import PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.schema import Count, DigestField, Empty, Message, PartField
from swarm.state.checkpoints.files import MAX_RECORD_BYTES, RECORD, held, step_directory, steps
from swarm.state.checkpoints.format import StoredParts
from swarm.state.sharing import MAX_WINDOW
from swarm.state.transfer import ChunkRequest, DescribeRequest, OpenAnswers

MAX_STEPS = 32
"""The newest steps that are told of: more are of no use to who wants the newest."""
MAX_READS = 8
MAX_CHUNKS, MAX_TOLD = 6 * MAX_WINDOW, 4
"""What one caller may have on its way at once: chunks, twice what who pulls three parts asks for; records, lists and
hashes."""
ALL_CHUNKS, ALL_TOLD = 256, 16
"""And from how many in all on each caller has a few only. Who reads nothing so holds 50 MB here at most, and
however many identities do, 512 MB of chunks: then who is honest is Busy, too."""

T = TypeVar("T")


class ListRequest(Message):
    """Asks for the list of steps."""


class OfferedStep(Message):
    """A step: its parts by digest as its record says, and those that are there."""

    step: Count
    parts: Annotated[dict[PartField, DigestField], Field(max_length=1024)]
    there: Annotated[tuple[PartField, ...], Field(max_length=1024)]


class Offered(Message):
    """The newest steps, oldest first."""

    steps: Annotated[tuple[OfferedStep, ...], Field(max_length=MAX_STEPS)]


class RecordRequest(Message):
    """Give me the record of a step: the payload of the answer."""

    step: Count


LIST = Rpc("checkpoint/1/list", ListRequest, Offered)
RECORD_OF = Rpc("checkpoint/1/record", RecordRequest, Empty)
DESCRIBE_FILE = Rpc("checkpoint/1/describe", DescribeRequest, Empty)
CHUNK_OF_FILE = Rpc("checkpoint/1/chunk", ChunkRequest, Empty)


class DiskReads:
    """Reads of files for others, at most MAX_READS at once; others wait. ``what`` begins a refusal."""

    def __init__(self, what: str) -> None:
        self._what, self._disk = what, asyncio.Semaphore(MAX_READS)

    async def run(self, work: Callable[[], T]) -> T:
        """In a thread. Raises Refused for what is damaged, WrongStep for what is not there (any more)."""
        try:
            async with self._disk:
                return await asyncio.to_thread(work)
        except FileNotFoundError as error:
            raise WrongStep(f"{self._what} not here (any more)") from error
        except (StateError, OSError) as error:
            raise Refused(f"{self._what} not to be read: {type(error).__name__}") from error


class CheckpointService:
    """Serves the checkpoints below a root. At most MAX_READS requests touch the disk at once, others wait for it. One
    caller has at most MAX_CHUNKS and MAX_TOLD answers on their way, and a few when all have ALL_CHUNKS and ALL_TOLD: a
    further one is Busy."""

    def __init__(self, root: Path) -> None:
        self._root, self._parts = root, StoredParts(root)
        self._disk = DiskReads("that checkpoint is")
        self._chunks, self._told = OpenAnswers(MAX_CHUNKS, ALL_CHUNKS), OpenAnswers(MAX_TOLD, ALL_TOLD)

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        chunks, told = self._chunks, self._told
        return (
            LIST.handled(self._list, admit=told.admit, over=told.over),
            RECORD_OF.handled_with_payload(self._record, admit=told.admit, over=told.over),
            DESCRIBE_FILE.handled_with_payload(self._describe, admit=told.admit, over=told.over),
            CHUNK_OF_FILE.handled_with_payload(self._chunk, admit=chunks.admit, over=chunks.over),
        )

    async def _list(self, caller: PeerId, body: ListRequest) -> Offered:
        return Offered(steps=await self._disk.run(self._offered))

    async def _record(self, caller: PeerId, body: RecordRequest, incoming: Incoming) -> Answer[Empty]:
        path = step_directory(self._root, body.step) / RECORD
        return Answer(Empty(), await self._disk.run(lambda: _whole(path)))

    async def _describe(self, caller: PeerId, body: DescribeRequest, incoming: Incoming) -> Answer[Empty]:
        return Answer(Empty(), await self._disk.run(lambda: self._parts.hashes(body)))

    async def _chunk(self, caller: PeerId, body: ChunkRequest, incoming: Incoming) -> Answer[Empty]:
        return Answer(Empty(), await self._disk.run(lambda: self._parts.chunk(body)))

    def _offered(self) -> tuple[OfferedStep, ...]:
        found = (held(self._root, step) for step in steps(self._root)[-MAX_STEPS:])
        return tuple(
            OfferedStep(step=one.step, parts=dict(one.record.parts), there=tuple(map(str, one.parts)))
            for one in found
            if one.record is not None and one.parts
        )


def _whole(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise StateError("larger than any record")
    return data

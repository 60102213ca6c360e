"""What a machine keeps on disk, for whoever wants to hold all of it: the ``checkpoint/1`` service.

Records and files are handed out as they lie there; the receiver verifies them. Only names that are ours are ever
opened: a step's number and a part's name, both decoded strictly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from swarm.errors import Refused, StateError, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.schema import Count, DigestField, Empty, Message, PartField
from swarm.state.checkpoints.files import MAX_RECORD_BYTES, RECORD, held, part_path, read_header, step_directory, steps
from swarm.state.donation import OpenAnswers

PIECE_BYTES = 4 << 20
MAX_STEPS = 32
"""The newest steps that are told of: more are of no use to who wants the newest."""
MAX_READS = 8
MAX_PIECES, MAX_TOLD = 24, 4
"""What one caller may have on its way at once: pieces, twice what who pulls three parts asks for; records and lists."""
ALL_PIECES, ALL_TOLD = 64, 16
"""And from how many in all on each caller has a few only. Who reads nothing so holds 100 MB here at most, and
however many identities do, 512 MB of pieces: then who is honest is Busy, too."""

T = TypeVar("T")


class ListRequest(Message):
    """Which steps have you?"""


class OfferedStep(Message):
    """A step: its parts by digest as its record says, and the bytes of those files that are there."""

    step: Count
    parts: Annotated[dict[PartField, DigestField], Field(max_length=1024)]
    there: Annotated[dict[PartField, Count], Field(max_length=1024)]


class Offered(Message):
    """The newest steps, oldest first."""

    steps: Annotated[tuple[OfferedStep, ...], Field(max_length=MAX_STEPS)]


class RecordRequest(Message):
    """Give me the record of a step: the payload of the answer."""

    step: Count


class ReadRequest(Message):
    """``length`` bytes from ``offset`` of the file of a part, which must be the one of this digest."""

    step: Count
    part: PartField
    digest: DigestField
    offset: Count
    length: Annotated[int, Field(ge=1, le=PIECE_BYTES)]


LIST = Rpc("checkpoint/1/list", ListRequest, Offered)
RECORD_OF = Rpc("checkpoint/1/record", RecordRequest, Empty)
READ = Rpc("checkpoint/1/read", ReadRequest, Empty)


class CheckpointShelf:
    """Serves the checkpoints below a root. At most MAX_READS requests touch the disk at once, others wait for it. One
    caller has at most MAX_PIECES and MAX_TOLD answers on their way, and a few when all have ALL_PIECES and ALL_TOLD: a
    further one is Busy."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = asyncio.Semaphore(MAX_READS)
        self._pieces, self._told = OpenAnswers(MAX_PIECES, ALL_PIECES), OpenAnswers(MAX_TOLD, ALL_TOLD)

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        pieces, told = self._pieces, self._told
        return (
            LIST.handled(self._list, admit=told.admit, over=told.over),
            RECORD_OF.handled_with_payload(self._record, admit=told.admit, over=told.over),
            READ.handled_with_payload(self._read, admit=pieces.admit, over=pieces.over),
        )

    async def _list(self, caller: PeerId, body: ListRequest) -> Offered:
        return Offered(steps=await self._on_disk(self._offered))

    async def _record(self, caller: PeerId, body: RecordRequest, incoming: Incoming) -> Answer[Empty]:
        path = step_directory(self._root, body.step) / RECORD
        return Answer(Empty(), await self._on_disk(lambda: _whole(path)))

    async def _read(self, caller: PeerId, body: ReadRequest, incoming: Incoming) -> Answer[Empty]:
        return Answer(Empty(), await self._on_disk(lambda: self._piece(body)))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """In a thread. Raises Refused for what is damaged, WrongStep for what is not there (any more)."""
        try:
            async with self._disk:
                return await asyncio.to_thread(work)
        except FileNotFoundError as error:
            raise WrongStep("that checkpoint is not here (any more)") from error
        except (StateError, OSError) as error:
            raise Refused(f"that checkpoint cannot be read: {type(error).__name__}") from error

    def _offered(self) -> tuple[OfferedStep, ...]:
        found = (held(self._root, step) for step in steps(self._root)[-MAX_STEPS:])
        return tuple(
            OfferedStep(
                step=one.step, parts=dict(one.record.parts), there={str(part): size for part, size in one.parts.items()}
            )
            for one in found
            if one.record is not None and one.parts
        )

    def _piece(self, body: ReadRequest) -> bytes:
        path = part_path(self._root, body.step, PartName(body.part))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = read_header(path)
            if header.metadata.get("digest") != body.digest:
                raise FileNotFoundError(path)  # another history's, or written anew
            if body.offset + body.length > header.size:
                raise StateError(f"{body.length} bytes at {body.offset} of {header.size}")
            return os.pread(descriptor, body.length, body.offset)
        finally:
            os.close(descriptor)


def _whole(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise StateError("larger than any record")
    return data

"""Who hands out checkpoints: a running peer, or a directory of this machine. Neither is believed."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm.errors import Refused, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Endpoint
from swarm.schema import Empty
from swarm.state.checkpoint_files import MAX_RECORD_BYTES, RECORD, held, part_path, step_directory, steps
from swarm.state.checkpoint_plan import Offer
from swarm.state.checkpoint_shelf import LIST, READ, RECORD_OF, ListRequest, Offered, ReadRequest, RecordRequest


class Donor(Protocol):
    """Who hands out checkpoints; believed in nothing. Every method may raise PeerError."""

    @property
    def name(self) -> str:
        """Who that is, for people."""

    async def offers(self) -> list[Offer[Donor]]:
        """What it has."""

    async def record(self, step: int) -> bytes:
        """The bytes of a step's record."""

    async def read(self, wanted: WantedFile, offset: int, length: int) -> bytes | memoryview:
        """A piece of a file: exactly ``length`` bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """A part of a step, by digest."""

    step: int
    part: PartName
    digest: str


class PeerDonor:
    """A running peer. ``timeout_s`` bounds each call."""

    def __init__(self, endpoint: Endpoint, peer: PeerId, *, timeout_s: float) -> None:
        self._endpoint, self._peer, self._timeout_s = endpoint, peer, timeout_s

    @property
    def name(self) -> str:
        """See :class:`Donor`."""
        return str(self._peer)

    async def offers(self) -> list[Offer[Donor]]:
        """See :class:`Donor`."""
        answer, _ = await self._endpoint.call(self._peer, LIST, ListRequest(), Offered, timeout_s=self._timeout_s)
        return [_offer(self, one.step, one.parts, one.there) for one in answer.steps]

    async def record(self, step: int) -> bytes:
        """See :class:`Donor`."""
        _, payload = await self._endpoint.call(
            self._peer, RECORD_OF, RecordRequest(step=step), Empty,
            timeout_s=self._timeout_s, max_reply_bytes=MAX_RECORD_BYTES,
        )  # fmt: skip
        return bytes(payload)

    async def read(self, wanted: WantedFile, offset: int, length: int) -> memoryview:
        """See :class:`Donor`."""
        body = ReadRequest(step=wanted.step, part=wanted.part, digest=wanted.digest, offset=offset, length=length)
        _, payload = await self._endpoint.call(
            self._peer, READ, body, Empty, timeout_s=self._timeout_s, max_reply_bytes=length
        )
        if len(payload) != length:
            raise Violation(f"{len(payload)} bytes instead of {length}", peer=self._peer)
        return payload


class DirectoryDonor:
    """Checkpoints of another directory of this machine: another home's, or a copied one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def name(self) -> str:
        """See :class:`Donor`."""
        return str(self._root)

    async def offers(self) -> list[Offer[Donor]]:
        """See :class:`Donor`."""
        found = await asyncio.to_thread(lambda: [held(self._root, step) for step in steps(self._root)])
        return [_offer(self, one.step, one.record.parts, one.parts) for one in found if one.record is not None]

    async def record(self, step: int) -> bytes:
        """See :class:`Donor`."""
        try:
            return await asyncio.to_thread((step_directory(self._root, step) / RECORD).read_bytes)
        except OSError as error:
            raise Refused(f"{self._root}: {error.strerror}") from error

    async def read(self, wanted: WantedFile, offset: int, length: int) -> bytes:
        """See :class:`Donor`."""

        def work() -> bytes:
            with part_path(self._root, wanted.step, wanted.part).open("rb") as file:
                return os.pread(file.fileno(), length, offset)

        try:
            data = await asyncio.to_thread(work)
        except OSError as error:
            raise Refused(f"{self._root}: {error.strerror}") from error
        if len(data) != length:
            raise WrongStep(f"{self._root}: the file of {wanted.part} is shorter than it was")
        return data


def _offer(donor: Donor, step: int, digests: object, there: object) -> Offer[Donor]:
    assert isinstance(digests, dict)  # noqa: S101 - decoded strictly
    assert isinstance(there, dict)  # noqa: S101
    return Offer(donor, step, {PartName(p): d for p, d in digests.items()}, {PartName(p): n for p, n in there.items()})

"""The versions of a part that replicas which train apart show each other: the ``versions/1`` service.

Nobody waits for anybody: anyone who is asked shows the newest version it has, at once, whatever it does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, AnyMethod, Endpoint, Incoming, Rpc
from swarm.schema import Count, Message, PartField


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A replica's own parameters at the end of a leg of an open step: float32 (elements,) on CPU, never written to
    again. Leg 0 is where all of them began."""

    step: int
    leg: int
    params: Tensor


class HeldVersion(Protocol):
    """A part of which there are versions."""

    @property
    def version(self) -> Version:
        """The newest."""


class TakeRequest(Message):
    """ "Show me your newest version of this part in this step, unless it is older than that of leg ``least``." """

    part: PartField
    step: Count
    least: Count


class VersionTaken(Message):
    """It is that of leg ``leg``. The payload is float32, little-endian."""

    leg: Count


TAKE = Rpc("versions/1/take", TakeRequest, VersionTaken)


class VersionService:
    """Shows the version of the part that is ``held`` to the replicas that share it in the open step."""

    def __init__(self, held: Callable[[], tuple[PartName, HeldVersion, Collection[PeerId]] | None]) -> None:
        self._held = held

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [TAKE.handled_with_payload(self._on_take)]

    async def _on_take(self, caller: PeerId, body: TakeRequest, incoming: Incoming) -> Answer[VersionTaken]:
        held = self._held()
        if held is None or held[0] != body.part:
            raise Refused(f"{body.part} is not held here")
        name, part, replicas = held
        if caller not in replicas:
            raise Refused(f"only replicas of {name} are shown its versions")
        version = part.version
        if version.step != body.step:
            raise WrongStep(f"step {version.step} is open here, not {body.step}")
        if version.leg < body.least:
            raise Busy(f"its newest version is of leg {version.leg}")
        return Answer(VersionTaken(leg=version.leg), version.params.numpy().data.cast("B"))


async def take(endpoint: Endpoint, peer: PeerId, request: TakeRequest, elements: int, timeout_s: float) -> Version:
    """Another replica's newest version, on CPU. Raises its PeerError, and Violation for one of the wrong size or
    age. Whether it is finite is not looked at here. Cost: 4 bytes an element, and as many in memory."""
    taken, payload = await endpoint.call(peer, TAKE, request, timeout_s=timeout_s, max_reply_bytes=4 * elements)
    if len(payload) != 4 * elements:
        raise Violation(f"a version of {len(payload)} bytes instead of {4 * elements}", peer=peer)
    if taken.leg < request.least:
        raise Violation(f"a version of leg {taken.leg}, which is older than what was asked for", peer=peer)
    return Version(request.step, taken.leg, torch.frombuffer(payload, dtype=torch.float32))

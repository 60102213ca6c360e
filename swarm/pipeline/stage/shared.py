"""The service of a replica of what several stages share: it may stand in the column of each, of one microbatch in
several, and has a server for each, with a table and a queue of its own. All compute with one part, and add to its one
sum; which of them a question is for its hop says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Method
from swarm.pipeline.activity import PipelineActivity
from swarm.pipeline.retention import HeldOfMicrobatches
from swarm.pipeline.settle import Assigned
from swarm.pipeline.stage.admission import Participants
from swarm.pipeline.stage.server import StageServer


class SharedServer:
    """As :class:`~swarm.pipeline.stage.server.StageServer`, with one of these for each hop, in their order."""

    def __init__(self, servers: Sequence[StageServer]) -> None:
        self._servers = tuple(servers)

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [_by_hop(each) for each in zip(*(server.methods() for server in self._servers), strict=True)]

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(server.run())

    def held(self) -> HeldOfMicrobatches:
        """Return what is held of microbatches now."""
        held = [server.held() for server in self._servers]
        return HeldOfMicrobatches(*(sum(each) for each in zip(*held, strict=True)))

    def activity(self) -> PipelineActivity:
        """Return what is done now; a microbatch at a hop counts for one."""
        doing = [server.activity() for server in self._servers]
        done = sum(one.microbatches for one in doing)
        return PipelineActivity(
            queued=sum(one.queued for one in doing),
            under_way=sum(one.under_way for one in doing),
            microbatches=done,
            compute_s=sum(one.compute_s * one.microbatches for one in doing) / max(1, done),
        )

    def open_step(self, step: int, participants: Participants, after: str = "", before: str = "") -> None:
        """See :meth:`~swarm.pipeline.stage.server.StageServer.open_step`."""
        for server in self._servers:
            server.open_step(step, participants, after, before)

    def rewound(self) -> None:
        """See :meth:`~swarm.pipeline.stage.server.StageServer.rewound`."""
        for server in self._servers:
            server.rewound()

    async def settle(self, step: int, assigned: Assigned) -> None:
        """See :meth:`~swarm.pipeline.stage.server.StageServer.settle`."""
        settling = (
            server.settle(step, {work: route for work, route in assigned.items() if work.hop == hop})
            for hop, server in enumerate(self._servers)
        )
        for error in await asyncio.gather(*settling, return_exceptions=True):  # each may need what another gives
            if error is not None:
                raise error


def _by_hop(methods: Sequence[AnyMethod]) -> AnyMethod:
    """Return one method that is each of these, by the hop of what is asked; the first where that names none."""
    first = methods[0]

    def of(body: Any) -> AnyMethod:
        hop = getattr(body, "hop", 0)
        if hop >= len(methods):
            raise Refused(f"hop {hop} of {len(methods)}")
        return methods[hop]

    async def handle(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        return await of(body).handle(caller, body, incoming)

    def admit(caller: PeerId, body: Any, payload_bytes: int) -> None:
        if (check := of(body).admit) is not None:
            check(caller, body, payload_bytes)

    def over(caller: PeerId, body: Any) -> None:
        if (end := of(body).over) is not None:
            end(caller, body)

    return Method(
        rpc=first.rpc,
        handle=handle,
        admit=None if first.admit is None else admit,
        over=None if first.over is None else over,
    )

"""Keeps one peer's record in the directory true while it lives, and says there that it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Literal

from swarm.errors import PeerError
from swarm.membership.run import RunContext
from swarm.membership.settings import MemberSettings
from swarm.network.discovery.records import PeerRecord

RECORD_TTL_S = 60.0
RECORD_RENEWAL_S = 20.0
WAITING_RENEWAL_S = 5.0
"""Before the run has started others look for us often."""
GONE_TTL_S = 10.0
FAREWELL_S = 1.0


def only_calls(settings: MemberSettings, addresses: Sequence[str]) -> bool:
    """Whether others should not have to call this peer: its owner says so, or they can only through a relay."""
    return settings.dial_out_only or any("/p2p-circuit" in address for address in addresses)


class Announcer:
    """Announces, until cancelled."""

    def __init__(self, run: RunContext) -> None:
        self._settings, self._endpoint, self._directory = run.settings, run.around.endpoint, run.directory
        self._situation, self._clock = run.situation, run.around.clock
        self._incarnation = int(self._clock.wall() * 1000)

    def record(self) -> PeerRecord:
        """What is true now."""
        settings, situation = self._settings, self._situation
        waiting: dict[str, Literal["ready", "draining"]] = {"ready": "ready", "draining": "draining"}
        return PeerRecord(
            role=settings.role,
            name=settings.name,
            stage=settings.stage,
            part=situation.part,
            addresses=self._endpoint.addresses[:8],
            incarnation=self._incarnation,
            status=waiting.get(situation.phase, "waiting"),
            step=situation.step,
            region=settings.region,
            outgoing=only_calls(settings, self._endpoint.addresses),
            beside=settings.beside,
        )

    async def run(self) -> None:
        """Until cancelled. A directory that cannot be reached now is tried again in time."""
        while True:
            pause = RECORD_RENEWAL_S if self._situation.phase == "ready" else WAITING_RENEWAL_S
            try:
                await self._directory.announce(self.record(), ttl_s=RECORD_TTL_S)
            except PeerError:
                pause = 1.0
            await self._clock.sleep(pause)

    async def gone(self) -> None:
        """Tell the directory that we have left. A courtesy: takes at most FAREWELL_S and never fails."""
        record = self.record().model_copy(update={"status": "gone"})
        with contextlib.suppress(PeerError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._directory.announce(record, ttl_s=GONE_TTL_S)

"""Keeps one peer's record in the directory true while it lives, and says there that it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Literal

from swarm.columns import held_columns
from swarm.errors import Ending, PeerError, RunEnded
from swarm.membership.memory import unfit_parts
from swarm.membership.part_memory import MORE_MEMORY
from swarm.membership.run import RunContext
from swarm.membership.settings import MemberSettings
from swarm.network.discovery.records import PeerRecord, bits_of
from swarm.waiting import first_done

RECORD_TTL_S = 60.0
RECORD_RENEWAL_S = 20.0
WAITING_RENEWAL_S = 5.0
"""Before the run has started others look for us often."""
GONE_TTL_S = 10.0
LEAVE_S = 1.0


def only_calls(settings: MemberSettings, addresses: Sequence[str]) -> bool:
    """Return whether others should not have to call this peer: its owner says so, or they can only through a relay."""
    return settings.dial_out_only or any("/p2p-circuit" in address for address in addresses)


class Announcer:
    """Announces, until cancelled."""

    def __init__(self, run: RunContext) -> None:
        self._settings, self._endpoint, self._directory = run.settings, run.around.endpoint, run.directory
        self._situation, self._clock = run.situation, run.around.clock
        self._incarnation = int(self._clock.wall() * 1000)
        self._placed = asyncio.Event()
        self._unfit: tuple[int, ...] = ()
        self._around = run.around
        run.situation.placed = self._placed.set

    def record(self) -> PeerRecord:
        """Return what is true now."""
        settings, situation = self._settings, self._situation
        waiting: dict[str, Literal["ready", "draining"]] = {"ready": "ready", "draining": "draining"}
        return PeerRecord(
            role=settings.role,
            name=settings.name,
            stage=settings.wish.stage,
            part=situation.part,
            addresses=self._endpoint.addresses[:8],
            incarnation=self._incarnation,
            status=waiting.get(situation.phase, "waiting"),
            step=situation.step,
            region=settings.region,
            outgoing=only_calls(settings, self._endpoint.addresses),
            beside=settings.beside,
            machine=settings.machine,
            unfit=bits_of(self._unfit) if situation.phase not in waiting else "",
            choice=settings.wish.choice,
            credential=self._around.credential,
        )

    async def run(self) -> None:
        """Until cancelled, at once when this peer has chosen its part. A directory that cannot be reached now is tried
        again in time. Raises RunEnded for a stage host whose memory holds no stage."""
        await self._measure()
        while True:
            self._placed.clear()
            pause = RECORD_RENEWAL_S if self._situation.phase == "ready" else WAITING_RENEWAL_S
            try:
                await self._directory.announce(self.record(), ttl_s=RECORD_TTL_S)
            except PeerError:
                pause = 1.0
            await first_done(self._clock.sleep(pause), self._placed.wait())

    async def _measure(self) -> None:
        """Find out, before anybody counts on us, which stages our memory does not hold."""
        settings = self._settings
        if settings.role != "stage":
            return
        parts = self._around.manifest.parts
        unfit = await asyncio.to_thread(unfit_parts, self._around, parts, settings)
        self._unfit = held_columns(unfit)
        if len(unfit) >= max(1, len(settings.wish.among(parts))):
            none = "" if settings.wish else "no stage fits: "
            raise RunEnded(none + next(iter(unfit.values())), Ending.MISUSED, remedy=MORE_MEMORY)

    async def gone(self) -> None:
        """Tell the directory that we have left. A courtesy: takes at most LEAVE_S and never fails."""
        record = self.record().model_copy(update={"status": "gone"})
        with contextlib.suppress(PeerError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._directory.announce(record, ttl_s=GONE_TTL_S)

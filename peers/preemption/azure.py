"""How Azure says that it takes a machine back.

Source: Azure documentation, "Scheduled Events for Linux VMs" and "Azure Instance Metadata Service".
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from pydantic import Field

from peers.preemption.http import ANSWER_S, Answer, Foreign, MetadataServer
from peers.preemption.source import Notice, SourceFailed, seconds_until
from swarm.clock import Clock


class AzureSource:
    """Azure: scheduled events of type Preempt or Terminate that name this machine. They are not acknowledged: that
    would start them at once. Events of the whole scale set arrive here, so the machine's name is asked for first.
    """

    name = "Azure"
    pause_s = 1.0
    FIRST_S = 150.0
    """The first request switches the service on, which may take two minutes."""
    LATER_S = 10.0

    def __init__(self, server: MetadataServer, clock: Clock) -> None:
        self._server, self._clock = server, clock
        self._machine = ""
        self._on = False

    async def is_here(self) -> bool:
        """See :class:`~peers.preemption.clouds.CloudSource`: a description of this machine."""
        try:
            await self._learn_name()
        except SourceFailed:
            return False
        return True

    async def ask(self) -> Notice | None:
        """See :class:`~peers.preemption.source.NoticeSource`. Takes up to FIRST_S seconds the first time. A notice
        that has started has no time left that anybody knows of."""
        if not self._machine:
            await self._learn_name()
        answer = await self._get("/metadata/scheduledevents?api-version=2020-07-01", self._patience)
        scheduled = answer.successful().decoded(_ScheduledEvents)
        self._on = True
        mine = [event for event in scheduled.events if event.takes(self._machine)]
        if not mine:
            return None
        now = answer.now(self._clock.wall())
        left = [seconds_until(event.not_before, now, parsedate_to_datetime) for event in mine]
        return Notice(left_s=min((seconds for seconds in left if seconds is not None), default=None))

    @property
    def _patience(self) -> float:
        return self.LATER_S if self._on else self.FIRST_S

    async def _learn_name(self) -> None:
        answer = await self._get("/metadata/instance/compute?api-version=2021-02-01&format=json", ANSWER_S)
        self._machine = answer.successful().decoded(_Machine).name

    async def _get(self, path: str, timeout_s: float) -> Answer:
        return await self._server.ask(path, {"Metadata": "true"}, timeout_s=timeout_s)


class _Machine(Foreign):
    name: str = Field(min_length=1, max_length=256)
    vm_id: str = Field(alias="vmId", min_length=1)


class _ScheduledEvent(Foreign):
    type: str | None = Field(alias="EventType", default=None)
    status: str | None = Field(alias="EventStatus", default=None)
    resources: tuple[str, ...] | None = Field(alias="Resources", default=None)
    not_before: str | None = Field(alias="NotBefore", default=None)

    def takes(self, machine: str) -> bool:
        """Whether it takes ``machine`` away; Azure's names are the same in any case."""
        names = {name.casefold() for name in self.resources or ()}
        ahead = self.status in ("Scheduled", "Started")
        return self.type in ("Preempt", "Terminate") and ahead and machine.casefold() in names


class _ScheduledEvents(Foreign):
    events: tuple[_ScheduledEvent, ...] = Field(alias="Events")

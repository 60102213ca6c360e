"""Ask a cloud whether it takes this machine back: AWS, Google and Azure, each through its metadata server.

Sources. AWS: EC2 user guide, "Spot Instance interruption notices" and "Use the Instance Metadata Service" (version 2).
Google: Compute Engine documentation, "Preemptible VM instances" and "Query VM metadata" (waiting for changes). Azure:
documentation, "Scheduled Events for Linux VMs" and "Azure Instance Metadata Service".
"""

from __future__ import annotations

import re
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Literal, Protocol
from urllib.parse import quote

from pydantic import Field

from peers.preemption.http import ANSWER_S, Foreign, HttpResponse, MetadataServer
from peers.preemption.notice_options import Cloud, MetadataUrl
from peers.preemption.notice_source import Notice, NoticeSource, SourceFailed, seconds_until
from swarm.clock import Clock

_AWS_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")


class CloudSource(NoticeSource, Protocol):
    """A cloud's metadata server."""

    async def is_here(self) -> bool:
        """Return whether this machine runs in that cloud: by an answer that only its server gives, never by a
        connection alone (addresses like theirs are served elsewhere too). At most ANSWER_S seconds; never raises."""


def cloud_source(cloud: Cloud, url: MetadataUrl, clock: Clock) -> CloudSource:
    """The source of one cloud at ``url``."""
    server = MetadataServer(url)
    match cloud:
        case "aws":
            return AwsSource(server, clock)
        case "gcp":
            return GcpSource(server)
        case "azure":
            return AzureSource(server, clock)


class AwsSource:
    """EC2: IMDSv2 with a session token, spot/instance-action, at the pace AWS advises. 404 means no notice; a
    rebalance recommendation is no notice and not asked for. Two minutes are usual, none before a hibernation.

    In a container the answers come through one hop more: the instance's ``HttpPutResponseHopLimit`` must be 2.
    """

    name = "AWS"
    pause_s = 5.0
    TOKEN_S = 21_600
    """The lifetime that is asked for; the answer says what was granted."""
    EARLY_S = 60.0
    """A token is renewed so many seconds before its end."""

    def __init__(self, server: MetadataServer, clock: Clock) -> None:
        self._server, self._clock = server, clock
        self._token, self._expires = "", float("-inf")

    async def is_here(self) -> bool:
        """See :class:`~peers.preemption.clouds.CloudSource`: a session token, with its lifetime in a header."""
        try:
            await self._renew()
        except SourceFailed:
            return False
        return True

    async def ask(self) -> Notice | None:
        """See :class:`~peers.preemption.notice_source.NoticeSource`. At most four requests."""
        if self._clock.monotonic() >= self._expires:
            await self._renew()
        answer = await self._get_action()
        if answer.status == 401:
            # The server forgets tokens, whatever lifetime it granted, when the machine was stopped and started.
            await self._renew()
            answer = await self._get_action()
        if answer.status == 404:
            return None
        action = answer.successful().decoded(_AwsAction)
        return Notice(left_s=seconds_until(action.time, answer.now(self._clock.wall()), datetime.fromisoformat))

    async def _get_action(self) -> HttpResponse:
        path, headers = "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        return await self._server.ask(path, headers, timeout_s=ANSWER_S)

    async def _renew(self) -> None:
        ttl = "X-aws-ec2-metadata-token-ttl-seconds"
        asked = self._clock.monotonic()
        answer = await self._server.ask("/latest/api/token", {ttl: str(self.TOKEN_S)}, timeout_s=ANSWER_S, method="PUT")
        token, granted = answer.successful().body.decode("ascii", "replace").strip(), answer.header(ttl)
        if not _AWS_TOKEN.fullmatch(token) or not re.fullmatch(r"[0-9]{1,6}", granted):
            raise SourceFailed("its session token is not one of AWS")
        self._token, self._expires = token, asked + max(0.0, int(granted) - self.EARLY_S)


class _AwsAction(Foreign):
    action: Literal["terminate", "stop", "hibernate"]
    time: str | None = None


class GcpSource:
    """Compute Engine: instance/preempted, by a request that the server keeps until the value changes."""

    name = "GCP"
    pause_s = 1.0
    LEFT_S = 30.0
    """What Google gives a machine from the notice to its end; it is not told when the notice was."""
    HELD_S = 10
    """How long the server may keep a request; short, so that one that hangs is noticed well within LEFT_S."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._etag = "0"

    async def is_here(self) -> bool:
        """See :class:`~peers.preemption.clouds.CloudSource`: the header that tells Google's server from others."""
        try:
            return (await self._get("/computeMetadata/v1/instance/id", ANSWER_S)).successful().body.strip().isdigit()
        except SourceFailed:
            return False

    async def ask(self) -> Notice | None:
        """See :class:`~peers.preemption.notice_source.NoticeSource`. Takes HELD_S seconds while nothing changes."""
        held = f"wait_for_change=true&timeout_sec={self.HELD_S}&last_etag={quote(self._etag, safe='')}"
        path = f"/computeMetadata/v1/instance/preempted?{held}"
        answer = (await self._get(path, self.HELD_S + ANSWER_S)).successful()
        # Without an etag the server would answer at the next change only, and miss one between two requests.
        self._etag = answer.header("ETag")[:64] or "0"
        match answer.body.strip().upper():
            case b"TRUE":
                return Notice(left_s=self.LEFT_S)
            case b"FALSE":
                return None
            case _:
                raise SourceFailed("instance/preempted is neither TRUE nor FALSE")

    async def _get(self, path: str, timeout_s: float) -> HttpResponse:
        answer = await self._server.ask(path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if answer.header("Metadata-Flavor") != "Google":
            raise SourceFailed("it does not say that it is Google's metadata server")
        return answer


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
        """See :class:`~peers.preemption.notice_source.NoticeSource`. Takes up to FIRST_S seconds the first time. A
        notice that has started has no time left that anybody knows of."""
        if not self._machine:
            await self._learn_name()
        answer = await self._get("/metadata/scheduledevents?api-version=2020-07-01", self._patience)
        scheduled = answer.successful().decoded(_AzureEvents)
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
        self._machine = answer.successful().decoded(_AzureMachine).name

    async def _get(self, path: str, timeout_s: float) -> HttpResponse:
        return await self._server.ask(path, {"Metadata": "true"}, timeout_s=timeout_s)


class _AzureMachine(Foreign):
    name: str = Field(min_length=1, max_length=256)
    vm_id: str = Field(alias="vmId", min_length=1)


class _AzureEvent(Foreign):
    type: str | None = Field(alias="EventType", default=None)
    status: str | None = Field(alias="EventStatus", default=None)
    resources: tuple[str, ...] | None = Field(alias="Resources", default=None)
    not_before: str | None = Field(alias="NotBefore", default=None)

    def takes(self, machine: str) -> bool:
        """Return whether it takes ``machine`` away; Azure's names are the same in any case."""
        names = {name.casefold() for name in self.resources or ()}
        ahead = self.status in ("Scheduled", "Started")
        return self.type in ("Preempt", "Terminate") and ahead and machine.casefold() in names


class _AzureEvents(Foreign):
    events: tuple[_AzureEvent, ...] = Field(alias="Events")

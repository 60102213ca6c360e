"""How AWS says that it takes a machine back.

Source: EC2 user guide, "Spot Instance interruption notices" and "Use the Instance Metadata Service" (version 2).
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

from peers.preemption.http import ANSWER_S, Answer, Foreign, MetadataServer
from peers.preemption.source import Notice, SourceFailed, seconds_until
from swarm.clock import Clock

_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")


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
        """See :class:`~peers.preemption.source.NoticeSource`. At most four requests."""
        if self._clock.monotonic() >= self._expires:
            await self._renew()
        answer = await self._get_action()
        if answer.status == 401:
            # The server forgets tokens, whatever lifetime it granted, when the machine was stopped and started.
            await self._renew()
            answer = await self._get_action()
        if answer.status == 404:
            return None
        action = answer.successful().decoded(_InstanceAction)
        return Notice(left_s=seconds_until(action.time, answer.now(self._clock.wall()), datetime.fromisoformat))

    async def _get_action(self) -> Answer:
        path, headers = "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        return await self._server.ask(path, headers, timeout_s=ANSWER_S)

    async def _renew(self) -> None:
        ttl = "X-aws-ec2-metadata-token-ttl-seconds"
        asked = self._clock.monotonic()
        answer = await self._server.ask("/latest/api/token", {ttl: str(self.TOKEN_S)}, timeout_s=ANSWER_S, method="PUT")
        token, granted = answer.successful().body.decode("ascii", "replace").strip(), answer.header(ttl)
        if not _TOKEN.fullmatch(token) or not re.fullmatch(r"[0-9]{1,6}", granted):
            raise SourceFailed("its session token is none of AWS's")
        self._token, self._expires = token, asked + max(0.0, int(granted) - self.EARLY_S)


class _InstanceAction(Foreign):
    action: Literal["terminate", "stop", "hibernate"]
    time: str | None = None

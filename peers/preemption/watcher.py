"""Watch for the notice that this machine is taken back, and leave in time."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Protocol

from peers.preemption.clouds import CloudSource, cloud_source
from peers.preemption.local import CommandSource, FileSource
from peers.preemption.notice_options import METADATA_URL, PreemptionChoice, read_choice, read_url
from peers.preemption.notice_source import Notice, NoticeSource, SourceFailed
from swarm.clock import Clock
from swarm.events import EventSink, PreemptionNotice, PreemptionWatch
from swarm.waiting import doubled

logger = logging.getLogger(__name__)

MARGIN_S = 2.0
"""So long before the machine goes, the peer stops waiting for the step's close: enough to tell the others and end."""
MAX_PAUSE_S = 10.0
"""A source that fails is asked at least so often: the shortest notices leave 30 s."""
FAILURES_TOLD = 3
"""One answer that is missing means nothing where there were some before; so many in a row are told."""
SEARCHES = 2
"""A metadata server may start later than this peer."""
SEARCH_PAUSE_S = 1.0


class Leave(Protocol):
    """Acts on a notice; see :meth:`peers.orders.Orders.by_notice`."""

    def __call__(self, reason: str, within_s: float | None) -> None: ...


class PreemptionWatcher:
    """Asks a source until it gives notice, once; then its work is done: a second notice changes nothing.

    Nothing that a source does ends the peer: failures are told as :class:`~swarm.events.PreemptionWatch`, and asked
    again after pauses that double up to MAX_PAUSE_S.
    """

    def __init__(self, clock: Clock, events: EventSink, leave: Leave) -> None:
        self._clock, self._events, self._leave = clock, events, leave

    async def run(self, preemption: str, url: str | None) -> None:
        """Watch what the two settings say, as :class:`peers.options.model.PeerOptions` has them.

        Returns when the notice has come and ``leave`` was called, or at once when there is nothing to watch. Raises
        nothing. Cancelled, it closes what it has open, within milliseconds.
        """
        try:
            source = await self._choose(read_choice(preemption), url or METADATA_URL)
            if source is not None:
                await self.watch(source)
        except Exception as error:  # a mistake of ours here must not cost the run a peer
            logger.exception("watching for a preemption notice failed")
            self._events.emit(PreemptionWatch(source="", problem=f"{type(error).__name__}: {error}"))

    async def watch(self, source: NoticeSource) -> None:
        """Ask ``source`` until it gives notice, and act on that."""
        self._events.emit(PreemptionWatch(source=source.name, problem=""))
        notice = await self._notice_of(source)
        self._events.emit(PreemptionNotice(source=source.name, deadline_s=notice.left_s))
        within = None if notice.left_s is None else max(0.0, notice.left_s - MARGIN_S)
        self._leave(reason_of(source.name, notice, self._clock.wall()), within)

    async def _choose(self, choice: PreemptionChoice, url: str) -> NoticeSource | None:
        if choice.file is not None:
            return FileSource(choice.file, self._clock)
        if choice.command:
            return CommandSource(choice.command, self._clock)
        clouds = [cloud_source(cloud, read_url(url), self._clock) for cloud in choice.clouds]
        return await self._search(clouds) if len(clouds) > 1 else next(iter(clouds), None)

    async def _search(self, clouds: list[CloudSource]) -> CloudSource | None:
        """The cloud that this machine runs in; some seconds when there is none."""
        for search in range(SEARCHES):
            if search:
                await self._clock.sleep(SEARCH_PAUSE_S)
            here = await asyncio.gather(*(cloud.is_here() for cloud in clouds))
            for cloud, is_here in zip(clouds, here, strict=True):
                if is_here:
                    return cloud
        names = ", ".join(cloud.name for cloud in clouds)
        self._events.emit(PreemptionWatch(source="", problem=f"none of {names} answers here"))
        return None

    async def _notice_of(self, source: NoticeSource) -> Notice:
        failures, told_after = 0, 1
        while True:
            try:
                notice = await source.ask()
            except SourceFailed as error:
                failures += 1
                if failures == told_after:
                    self._events.emit(PreemptionWatch(source=source.name, problem=str(error)))
            else:
                if notice is not None:
                    return notice
                if failures >= told_after:
                    self._events.emit(PreemptionWatch(source=source.name, problem=""))
                failures, told_after = 0, FAILURES_TOLD
            await self._clock.sleep(pause_after(failures, source.pause_s))


def pause_after(failures: int, pause_s: float) -> float:
    """Seconds until the next question, after so many failures in a row; ``pause_s`` after none."""
    return doubled(pause_s, min(failures, 10), max(pause_s, MAX_PAUSE_S))


def reason_of(source: str, notice: Notice, now: float) -> str:
    """Return why the peer leaves, in words: ``AWS: this machine is taken back at 12:30:05 UTC``. ``now`` is this
    machine's time, in seconds since the Unix epoch."""
    if notice.left_s is None:
        return f"{source}: this machine is taken back"
    try:
        at = datetime.fromtimestamp(now + notice.left_s, UTC).strftime("%H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{source}: this machine is taken back some day"
    return f"{source}: this machine is taken back at {at}"

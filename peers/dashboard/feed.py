"""Keeps a run's state up to date and sends each viewer what is new to it: :class:`StateFeed`.

The state is made once a second, however many look; what changed is encoded once, and each viewer gets the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from peers.dashboard.overview import Overview
from peers.dashboard.sources import RunSource
from swarm.clock import Clock
from swarm.errors import PeerError, SwarmError

logger = logging.getLogger(__name__)

EVERY_S = 1.0
SCRAPED_S = 60.0
"""So long after the last question about the state somebody still watches."""
MAX_VIEWERS = 256
MAX_BEHIND = 16
"""Messages that may wait for a viewer; one that takes no more is dropped."""
STILL_HERE_S = 15.0
_LOGS = ("churn", "moves", "events")


class TooManyViewers(Exception):
    """Handled by the server, which says so with status 503."""


class Viewer:
    """One reader of the stream. ``dropped`` when it fell too far behind."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue(MAX_BEHIND)
        self.dropped = asyncio.Event()

    def give(self, message: bytes) -> None:
        """Have it sent, or give the viewer up."""
        try:
            self.waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.dropped.set()


class StateFeed:
    """The state of one run, and those who look at it. What is made of a state is made once, however many ask."""

    def __init__(self, source: RunSource, overview: Overview, clock: Clock) -> None:
        self._source, self._overview, self._clock = source, overview, clock
        self._viewers: set[Viewer] = set()
        self._state: dict[str, Any] = overview.document(clock.wall())
        self._made: dict[str, bytes] = {}
        self._asked_at = clock.monotonic()

    @property
    def viewers(self) -> int:
        """Return how many look now."""
        return len(self._viewers)

    def state(self) -> Mapping[str, Any]:
        """Return the newest state, for who asks once; it is kept fresh for a while from here on."""
        if not self._watched():  # nobody has looked for a while: what was seen then is not shown as present
            self._take(self._overview.document(self._clock.wall()))
        self._asked_at = self._clock.monotonic()
        return self._state

    def made(self, kind: str, make: Callable[[Mapping[str, Any]], bytes]) -> bytes:
        """Return what ``make`` makes of the newest state; once for each state and ``kind``."""
        state = self.state()
        if kind not in self._made:
            self._made[kind] = make(state)
        return self._made[kind]

    async def run(self) -> None:
        """Keep it up to date until cancelled."""
        while True:
            await self.update()
            await self._clock.sleep(EVERY_S)

    async def update(self) -> None:
        """Look once, and tell the viewers. Failures are logged: what peers and files say must not end who looks."""
        watched = self._watched()
        try:
            await self._source.poll(self._overview, watched=watched)
            if not watched:
                self._overview.look({})
                return
            state = await asyncio.to_thread(self._overview.document, self._clock.wall())
            message = encoded("patch", patch(self._state, state)) if self._viewers else b""
        except PeerError as error:
            logger.warning("the run cannot be seen now: %s", error)
            return
        except SwarmError:  # there is nothing to look at any more
            raise
        except Exception:
            logger.exception("the run cannot be seen now")
            return
        self._take(state)
        for viewer in self._viewers:
            viewer.give(message)

    def _watched(self) -> bool:
        return bool(self._viewers) or self._clock.monotonic() - self._asked_at < SCRAPED_S

    def _take(self, state: dict[str, Any]) -> None:
        self._state, self._made = state, {}

    def enter(self) -> Viewer:
        """A viewer comes: it gets the whole state first. Raises TooManyViewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewers
        viewer = Viewer()
        viewer.give(self.made("first", lambda state: encoded("state", state)))
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """It has gone."""
        self._viewers.discard(viewer)

    async def messages(self, viewer: Viewer) -> AsyncIterator[bytes]:
        """What a viewer is sent, until it is dropped."""
        dropped = asyncio.create_task(viewer.dropped.wait())
        try:
            while not viewer.dropped.is_set():
                getting = asyncio.create_task(viewer.waiting.get())
                await asyncio.wait({getting, dropped}, timeout=STILL_HERE_S, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                if viewer.dropped.is_set():
                    return
                yield getting.result() if getting.done() and not getting.cancelled() else b": still here\n\n"
        finally:
            dropped.cancel()

    def close(self) -> None:
        """Drop all viewers."""
        for viewer in self._viewers:
            viewer.dropped.set()


def patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a state is new: whole values under ``set``; of peers those that changed, None for who is gone; of
    steps the rows that are new, or all where some were taken back or thinned out; of logs the new entries. Pure."""
    keyed = {"peers", "steps", *_LOGS}
    found: dict[str, Any] = {
        "set": {key: value for key, value in after.items() if key not in keyed and value != before[key]}
    }
    peers = {peer: one for peer, one in after["peers"].items() if before["peers"].get(peer) != one}
    peers |= dict.fromkeys(before["peers"].keys() - after["peers"].keys())
    if peers:
        found["peers"] = peers
    old, new = {row[0]: row for row in before["steps"]}, {row[0]: row for row in after["steps"]}
    if not old.keys() <= new.keys():
        found["all_steps"] = after["steps"]
    elif rows := [row for step, row in new.items() if old.get(step) != row]:
        found["steps"] = rows
    for name in _LOGS:
        known = max((entry["n"] for entry in before[name]), default=0)
        if entries := [entry for entry in after[name] if entry["n"] > known]:
            found[name] = entries
    return found


def encoded(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return one message of an event stream. JSON without line ends, so that it is one line."""
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'), allow_nan=False)}\n\n".encode()

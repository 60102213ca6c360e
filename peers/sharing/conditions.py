"""Look at the conditions under which a peer pauses, and decide: on its battery, at some hours, when a command says so.

A check that fails, or takes too long, pauses nothing and resumes nothing: what the last one said stands, and at first,
and after FORGET failures in a row, that the condition does not hold. A peer that shares its machine for weeks is not
stopped for good by a script that broke; each such failure is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from peers.preemption.local import CommandSource
from peers.preemption.notice_source import SourceFailed
from peers.sharing.limit_options import PauseChoice, read_pause
from swarm.clock import Clock
from swarm.waiting import doubled

LOOK_S = 5.0
"""Between two looks; what holds at two in a row counts."""
FORGET = 5
"""After so many failures in a row a condition is taken not to hold."""
STAY_S, MAX_QUIET_S = 600.0, 3600.0
"""A peer that paused again sooner than this stays away longer, MAX_QUIET_S at most."""


# --- decisions without I/O -------------------------------------------------------------------------------------------


class Steadily:
    """Tells when something has been so for ``for_s`` seconds without a break."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._since: float | None = None

    def seen(self, so: bool, now: float) -> bool:
        """Note a look at a time of one monotonic clock; returns whether it has been so for long enough."""
        if not so:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._for_s


def quiet_s(first_s: float, short_stays: int) -> float:
    """Return how long no condition must have held before the peer comes back: ``first_s`` seconds, doubled for each
    time in a row that it had to leave again within STAY_S."""
    return doubled(first_s, short_stays, max(first_s, MAX_QUIET_S))


def within(hours: tuple[int, int], minute: int) -> bool:
    """Return whether a minute of the day is between two, the second not included; over midnight where the first is
    later. Of the clock on the wall: an hour that summer time skips or repeats is so, too."""
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def minute_of_day(wall_s: float) -> int:
    """Return the minutes since midnight on this machine's clock, at seconds since the Unix epoch."""
    local = datetime.fromtimestamp(wall_s, UTC).astimezone()
    return local.hour * 60 + local.minute


# --- looking ---------------------------------------------------------------------------------------------------------


class CheckFailed(Exception):
    """A condition could not be looked at, and why."""


def on_battery() -> bool:
    """Return whether this machine runs on its battery. Raises CheckFailed where it has none, or does not say."""
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (OSError, AttributeError, ValueError) as error:
        raise CheckFailed(f"the battery cannot be read: {error}") from None
    if battery is None or battery.power_plugged is None:
        raise CheckFailed("this machine has no battery, or does not say whether it is plugged in")
    return not battery.power_plugged


@dataclass(slots=True)
class _Known:
    """What the looks at one condition have said."""

    holds: bool = False
    failures: int = 0
    problem: str = ""


class PauseConditions:
    """The conditions of one peer, looked at together; the first that holds is the reason."""

    def __init__(self, texts: Sequence[str], clock: Clock, battery: Callable[[], bool] = on_battery) -> None:
        """``texts`` as ``--pause-when`` takes them; ``battery`` tells whether the machine is on it, in a thread."""
        self._clock, self._battery = clock, battery
        self._choices = [read_pause(text) for text in dict.fromkeys(texts)]
        self._commands = {one.text: CommandSource(one.command, clock) for one in self._choices if one.command}
        self._known = {one.text: _Known() for one in self._choices}
        self.news: dict[str, str] = {}
        """What went wrong, or right again ("" then), at the last look and not before: problem by condition."""

    async def look(self) -> str:
        """Return the condition that holds now, "" for none. A command takes ten seconds at most, and is killed with its
        children then, or when this is cancelled. Raises nothing."""
        self.news = {}
        await asyncio.gather(*(self._check(one) for one in self._choices))
        return next((one.text for one in self._choices if self._known[one.text].holds), "")

    async def _check(self, one: PauseChoice) -> None:
        known = self._known[one.text]
        try:
            known.holds, known.failures, problem = await self._holds(one), 0, ""
        except (CheckFailed, SourceFailed) as error:
            known.failures, problem = known.failures + 1, str(error)
            known.holds = known.holds and known.failures < FORGET
        if problem != known.problem:
            known.problem = self.news[one.text] = problem

    async def _holds(self, one: PauseChoice) -> bool:
        if one.hours is not None:
            return within(one.hours, minute_of_day(self._clock.wall()))
        if one.battery:
            return await asyncio.to_thread(self._battery)
        return await self._commands[one.text].ask() is not None

"""Source of notices that this machine is taken back: the protocol that clouds, files and commands implement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from swarm.errors import SwarmError

WORD_BYTES = 4096
"""More is read neither from a file nor from a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """This machine is taken back in ``left_s`` seconds, never negative; None: nobody says when."""

    left_s: float | None


class SourceFailed(SwarmError):
    """A source could not be asked, or what it said makes no sense. The watcher asks again, later and later."""


class NoticeSource(Protocol):
    """Something that can be asked again and again."""

    @property
    def name(self) -> str:
        """Its name, for people: ``AWS``, ``the file /run/going``."""

    @property
    def pause_s(self) -> float:
        """Seconds between an answer and the next question."""

    async def ask(self) -> Notice | None:
        """The notice, None while there is none. Raises SourceFailed; takes bounded time; may be cancelled."""


def seconds_left(until: datetime, now: float) -> float:
    """Seconds from ``now`` (since the Unix epoch) to ``until``, 0 when it is over. A time without zone is UTC."""
    aware = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, aware.timestamp() - now)


def seconds_until(text: str | None, now: float, read: Callable[[str], datetime]) -> float | None:
    """Seconds from ``now`` to a time in words, which ``read`` understands; None when it says no time: the notice that
    it belongs to stands."""
    try:
        return seconds_left(read(text or ""), now)
    except (ValueError, TypeError, OverflowError):
        return None


def spoken_notice(words: bytes, now: float) -> Notice:
    """The notice of a file's or a command's words: seconds (``30``), a time (``2026-01-31T12:30:05Z``), or nothing.

    A notice whose words are none of these is a notice all the same, without a time. Never raises.
    """
    text = words[:WORD_BYTES].decode("ascii", errors="replace").strip()
    try:
        return Notice(left_s=_bounded(float(text)))
    except ValueError:
        pass
    return Notice(left_s=seconds_until(text, now, datetime.fromisoformat))


def _bounded(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError("not a duration")
    return seconds

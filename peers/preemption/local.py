"""Ask platforms that have no metadata server: a file that appears, a command that succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import stat
from collections.abc import Sequence
from pathlib import Path

from peers.local.launcher import CANNOT_RUN, launched
from peers.preemption.notice_source import WORD_BYTES, Notice, SourceFailed, spoken_notice
from swarm.clock import Clock


class FileSource:
    """A file: that it is there is the notice, also when it was there before this peer. It may say when: see
    :func:`~peers.preemption.notice_source.spoken_notice`."""

    pause_s = 1.0
    WORDS_S = 0.2

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self.name = f"the file {path}"

    async def ask(self) -> Notice | None:
        """See :class:`~peers.preemption.notice_source.NoticeSource`. One stat in a thread while there is none; a file
        system that hangs holds up nothing but this, and the end of the process."""
        words = await asyncio.to_thread(self._look)
        if words == b"":
            # The one who makes it may not have come to the words yet.
            await self._clock.sleep(self.WORDS_S)
            words = await asyncio.to_thread(self._look) or b""
        return None if words is None else spoken_notice(words, self._clock.wall())

    def _look(self) -> bytes | None:
        """Return its text, None while it is not there. An unreadable file still counts as a notice."""
        try:
            mode = self._path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceFailed(f"it cannot be looked for: {(error.strerror or 'unknown').lower()}") from None
        if not stat.S_ISREG(mode):
            return b""  # reading from a pipe could last for ever
        try:
            with self._path.open("rb") as file:
                return file.read(WORD_BYTES)
        except OSError:
            return b""


class CommandSource:
    """A command, run again and again without a shell: exit code 0 is the notice, any other is none. What it prints may
    say when, as a file may."""

    pause_s = 5.0
    RUN_S = 10.0
    """It is killed, with its children, when it takes longer."""

    def __init__(self, command: Sequence[str], clock: Clock) -> None:
        self._command, self._clock = tuple(command), clock
        self.name = f"the command {shlex.join(self._command)}"

    async def ask(self) -> Notice | None:
        """See :class:`~peers.preemption.notice_source.NoticeSource`. Costs an interpreter's start, about 20 ms.
        Cancelled, it kills the command."""
        try:
            process = await asyncio.create_subprocess_exec(
                *launched(self._command),  # it must not outlive a peer that is killed
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # this machine has no room for a process now: it may have later
            raise SourceFailed(f"it cannot be started: {(error.strerror or str(error)).lower()}") from None
        try:
            async with asyncio.timeout(self.RUN_S):
                words, code = await _read(process), await process.wait()
        except TimeoutError:
            raise SourceFailed(f"it takes longer than {self.RUN_S:g} s") from None
        finally:
            # Its whole session: it may have children, also when it has ended itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code == CANNOT_RUN and words.startswith(b"\0"):
            raise SourceFailed(f"it cannot be run: {words[1:200].decode('utf-8', 'replace').lower()}")
        return spoken_notice(words, self._clock.wall()) if code == 0 else None


async def _read(process: asyncio.subprocess.Process) -> bytes:
    """Read all output, and keep only the beginning."""
    assert process.stdout is not None  # noqa: S101 - asked for
    words = b""
    while piece := await process.stdout.read(WORD_BYTES):
        words = (words + piece)[:WORD_BYTES]
    return words

"""Four members in processes of their own, one of which may end instead of answering and is then replaced."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import psutil

from tests.benchmarks._worker import Worker

Answers = dict[int, dict[str, Any]]

_START_S, _END_S = 180.0, 60.0


class Member(Worker):
    """A worker that may die of an order."""

    daemon: psutil.Process

    @classmethod
    async def begin(cls, module: str, *arguments: str) -> Member:
        """See :meth:`Worker.start`. The daemon is remembered by its start time, not only by its id."""
        member = cast(Member, await cls.start(module, *arguments, within_s=_START_S))
        member.daemon = psutil.Process(member.hello["daemon"])
        return member

    @property
    def peer(self) -> str:
        """Its identity."""
        return str(self.hello["peer"])

    async def give(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, or what it said before it killed itself (``fired``). Raises RuntimeError when it ended
        otherwise, TimeoutError when it does neither."""
        answer = await self.ask(order)
        if "fired" in answer:
            code = await self.ended(_END_S)
            if code != -signal.SIGKILL:
                raise RuntimeError(f"the victim {self.pid} ended with {code}, not of SIGKILL")
        return answer

    async def bury(self) -> None:
        """Leave nothing of it, its daemon included. Blocks for at most a few seconds."""
        await self.stop()
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.daemon.is_running():
                self.daemon.kill()


Starter = Callable[[int, Mapping[int, Member]], Awaitable[Member]]
"""Starts the member of a slot beside those that are there."""


class Team:
    """Slot → member. A slot keeps its rank and its numbers no matter who holds it."""

    def __init__(self, start: Starter, size: int) -> None:
        self._start, self._size = start, size
        self.members: dict[int, Member] = {}

    async def fill(self) -> None:
        """Start those missing."""
        for slot in range(self._size):
            if slot not in self.members:
                self.members[slot] = await self._start(slot, self.members)

    async def end(self) -> None:
        """Leave nothing behind."""
        await asyncio.gather(*(member.bury() for member in self.members.values()))

    async def tell(self, order: Mapping[str, Any]) -> None:
        """The same to everybody."""
        await asyncio.gather(*(member.ask(order) for member in self.members.values()))

    async def attempt(self, order: Mapping[str, Any], kill: Mapping[str, Any] | None) -> tuple[Answers, dict[str, Any]]:
        """The order to everybody, with the kill to its victim alone.

        Returns the survivors' answers and what the victim said when its fuse fired: the victim has left the team then.
        The latter is empty without a kill, and when the victim's round ended before the event: then it is a survivor.
        """
        victim = kill["slot"] if kill else -1
        slots = sorted(self.members)
        orders = [{**order, "kill": dict(kill) if kill and slot == victim else None} for slot in slots]
        jobs = (self.members[slot].give(each) for slot, each in zip(slots, orders, strict=True))
        answers: Answers = dict(zip(slots, await asyncio.gather(*jobs), strict=True))
        if "fired" not in answers.get(victim, {}):
            return answers, {}
        fired = answers.pop(victim)
        await self.members.pop(victim).bury()
        return answers, fired

    async def saved(self, scratch: Path) -> dict[int, Any]:
        """Slot → what it holds now, float32."""
        import numpy as np

        found = {}
        for slot, member in self.members.items():
            path = scratch / f"{slot}.f32"
            await member.ask({"save": str(path)})
            found[slot] = np.fromfile(path, dtype=np.float32)
            path.unlink()
        return found


@contextlib.asynccontextmanager
async def opened(start: Starter, size: int) -> AsyncIterator[Team]:
    """An empty team of ``size``; every process of it ends with the block."""
    team = Team(start, size)
    try:
        yield team
    finally:
        await team.end()

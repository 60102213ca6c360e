"""Sees to the newest state of a part that only this peer may hold, where it has to go before it may."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.consensus.copies import copy_holders
from swarm.consensus.records import CloseRecord
from swarm.events import StateLeftBehind
from swarm.ids import PartName, PeerId
from swarm.membership.holding import RoleManager
from swarm.membership.observer_service import Observers
from swarm.membership.run import RunContext
from swarm.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""How often it is looked whether a copy has the newest state: a step may close at any time, and then it has not."""
KEEP_S = 20.0
"""How long a peer writes what it has when the run cannot go on; those that are to be gone sooner are ended."""
NO_TIME = "there was no time to write it to this disk"
WRITING_SHARE = 0.5
"""Of the time, from its beginning: so long another one that has the state is relied on only once it is on this disk."""


@dataclass(frozen=True, slots=True)
class _Standing:
    """The part, the newest record, whether others train it, too, and else how far its copies have come, by keeper."""

    part: PartName
    record: CloseRecord
    shared: bool
    copies: dict[PeerId, int]

    @property
    def safe_with(self) -> PeerId | None:
        """Return who has the newest state, too, of a part that nobody else trains."""
        return max((peer for peer, had in self.copies.items() if had >= self.record.step), default=None)


class LastHolder:
    """This peer, as the only replica of its part. It cannot be spared, and a machine that is taken back, or wanted for
    something else, does not wait: then a copy that is a step behind would be all that is left. Those who have the copy,
    or train the part, too, may be told to go at the same moment, and rely on this peer: so its own disk comes first."""

    def __init__(self, run: RunContext, holding: RoleManager, observers: Observers) -> None:
        self._run, self._holding, self._observers = run, holding, observers
        self._clock = run.around.clock

    async def secure(self, within_s: float) -> str:
        """Return, in words, where the newest state is, once this peer may end, and should before another step closes:
        as soon as it is on this disk, if that takes it in the first half of the time, and somebody else has it; or
        after that time, when an event has said what is lost or lies on this disk alone. Returns "" after that time
        where another replica holds the part, at once where this peer holds nothing of the run."""
        until, later_s, kept, problem = self._clock.monotonic() + within_s, (1 - WRITING_SHARE) * within_s, -1, NO_TIME
        while (now := self._standing()) is not None:
            left_s = until - self._clock.monotonic()
            early, unwritten = left_s > later_s, problem == NO_TIME and kept < now.record.step
            if not (early and unwritten) and (peer := now.safe_with) is not None:
                at = f"the copy at {now.record.members[peer].name} has its newest state, of step {now.record.step}"
                return f"no other trains {now.part}, and {at}"
            if left_s <= 0:
                return "" if now.shared else self._left_behind(now, "" if kept == now.record.step else problem)
            if unwritten:
                problem = await self._write(now.record, left_s - later_s if early else left_s)
                if not problem:
                    kept, problem = now.record.step, NO_TIME  # of the next one, until that is written, too
            await self._clock.sleep(min(LOOK_S, left_s))
        return ""

    def _left_behind(self, now: _Standing, problem: str) -> str:
        newest, step = max(now.copies.values(), default=None), now.record.step
        event = StateLeftBehind(part=now.part, step=step, copied=newest, reason=problem[:400])
        self._run.around.events.emit(event)
        kept = f", and {problem}" if problem else "; it is on this disk"
        return f"no other is known to have {now.part} of step {step}{kept}"

    async def keep(self, record: CloseRecord, copies: Callable[[CloseRecord], Awaitable[Sequence[Snapshot]]]) -> None:
        """Write what this peer has of the state after a record that no other may follow: its own part, and ``copies``.
        That of parts that are lost may be in the memory of those that are left alone. Takes at most KEEP_S."""
        until = self._clock.monotonic() + KEEP_S
        if problem := await self._write(record, KEEP_S):
            logger.info("of step %d this peer's own part is not on this disk: %s", record.step, problem)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - self._clock.monotonic()):
                there = await copies(record)
                await self._run.keeper.keep_copies(there, record, until - self._clock.monotonic())

    async def _write(self, record: CloseRecord, within_s: float) -> str:
        """Keep the newest state on this disk; returns why it is not there, "" once it is."""
        held = self._holding.part
        if held is None:
            return NO_TIME
        try:
            async with asyncio.timeout(within_s):
                state = await self._run.around.device.run(held.snapshot)
                if state.step != record.step:  # the next one closes just now, and its record is about to be known
                    return NO_TIME
                return await self._run.keeper.keep_now(state, record)
        except TimeoutError:
            return NO_TIME
        except Exception as error:  # noqa: BLE001 - no memory for it, or a broken device: what is lost must be told
            return f"it failed on its way to the disk: {type(error).__name__}: {error}"

    def _standing(self) -> _Standing | None:
        """None where this peer holds nothing of the run, or the run is over."""
        at, part, me = self._run.position, self._holding.part, self._run.around.endpoint.peer
        if part is None or at.head is None or not at.is_member or at.over:
            return None
        name, lost = part.spec.name, self._run.lost()
        replicas = set(at.head.members.replicas(name)) - lost.keys()
        if me not in replicas:
            return None
        shared, copies = replicas != {me}, self._run.around.manifest.run.copies
        keepers = () if shared else copy_holders(at.head.members, name, copies)
        followers = self._observers.followers(name).items()
        return _Standing(
            name, at.head, shared, {peer: had for peer, had in followers if peer in keepers and peer not in lost}
        )

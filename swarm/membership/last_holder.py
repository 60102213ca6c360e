"""Sees to the newest state of a part that only this peer holds, where it has to go before it may."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.consensus.copies import copy_holders
from swarm.consensus.records import CloseRecord
from swarm.events import StateLeftBehind
from swarm.ids import PartName, PeerId
from swarm.membership.holding import RoleManager
from swarm.membership.observers import Observers
from swarm.membership.run import RunContext

LOOK_S = 0.05
"""How often it is looked whether a copy has the newest state: a step may close at any time, and then it has not."""
NO_TIME = "there was no time to write it to this disk"
WRITING_SHARE = 0.5
"""Of the time: what is left of it then is for writing the state to this disk."""


@dataclass(frozen=True, slots=True)
class _Standing:
    """The part, the newest record, and how far its copies have come, by who keeps them."""

    part: PartName
    record: CloseRecord
    copies: dict[PeerId, int]

    @property
    def safe_with(self) -> PeerId | None:
        """Who has the newest state, too."""
        return max((peer for peer, had in self.copies.items() if had >= self.record.step), default=None)


class LastHolder:
    """This peer, as the only replica of its part. It cannot be spared, and a machine that is taken back, or wanted for
    something else, does not wait: then a copy that is a step behind would be all that is left."""

    def __init__(self, run: RunContext, holding: RoleManager, observers: Observers) -> None:
        self._run, self._holding, self._observers = run, holding, observers
        self._clock = run.around.clock

    async def secure(self, within_s: float) -> str:
        """Return, in words, where the newest state is, once this peer may end, and should before another step closes:
        as soon as somebody else has it, or after that time, when an event has said what is lost or lies on this disk
        alone. Returns "" at once where another replica holds the part."""
        until, written, problem = self._clock.monotonic() + within_s, -1, NO_TIME
        while (now := self._standing()) is not None:
            if (peer := now.safe_with) is not None:
                at = f"the copy at {now.record.members[peer].name} has its newest state, of step {now.record.step}"
                return f"no other trains {now.part}, and {at}"
            if (left_s := until - self._clock.monotonic()) <= 0:
                return self._left_behind(now, "" if written == now.record.step else problem)
            if left_s <= WRITING_SHARE * within_s and written < now.record.step and problem == NO_TIME:
                problem = await self._write(now, left_s)
                if not problem:
                    written, problem = now.record.step, NO_TIME  # of the next one, until that is written, too
            await self._clock.sleep(min(LOOK_S, left_s))
        return ""

    def _left_behind(self, now: _Standing, problem: str) -> str:
        newest, step = max(now.copies.values(), default=None), now.record.step
        event = StateLeftBehind(part=now.part, step=step, copied=newest, reason=problem[:400])
        self._run.around.events.emit(event)
        return f"no other has {now.part} of step {step}{f', and {problem}' if problem else '; it is on this disk'}"

    async def _write(self, now: _Standing, within_s: float) -> str:
        """Keep the newest state on this disk; returns why it is not there, "" once it is."""
        held = self._holding.part
        if held is None:
            return NO_TIME
        try:
            async with asyncio.timeout(within_s):
                state = await self._run.around.device.run(held.snapshot)
                if state.step != now.record.step:  # the next one closes just now, and its record is about to be known
                    return NO_TIME
                return await self._run.keeper.keep_now(state, now.record)
        except TimeoutError:
            return NO_TIME

    def _standing(self) -> _Standing | None:
        """None where this peer holds nothing that another does not train as well."""
        at, part, me = self._run.position, self._holding.part, self._run.around.endpoint.peer
        if part is None or at.head is None or not at.is_member or at.over:
            return None
        name, lost = part.spec.name, self._run.lost()
        if set(at.head.members.replicas(name)) - lost.keys() != {me}:
            return None
        keepers = copy_holders(at.head.members, name, self._run.around.manifest.run.copies)
        copies = {
            peer: had for peer, had in self._observers.followers(name).items() if peer in keepers and peer not in lost
        }
        return _Standing(name, at.head, copies)

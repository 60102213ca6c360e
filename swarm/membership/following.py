"""Follow the decided records: take this peer's part, tell the observers, and open the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from swarm.columns import becomes
from swarm.consensus.records import CloseRecord, Decision
from swarm.errors import ConfigError, Refused, RunEnded, StateError
from swarm.events import LateWorkLost, PeerReady, ResidualLost
from swarm.ids import PartName, PeerId
from swarm.membership.copying import Copying
from swarm.membership.download import download_part
from swarm.membership.holding import RoleManager
from swarm.membership.joining import PARTED
from swarm.membership.observer_service import ObserverService
from swarm.membership.part_memory import check_memory
from swarm.membership.parts import blank, build_empty
from swarm.membership.run import RunContext
from swarm.membership.step_events import StepEvents
from swarm.optim.local_part import LocalPart
from swarm.optim.part import TrainedPart
from swarm.state.snapshot import digest
from swarm.step.lateness import lacking, owed_tokens

MOVED, CALLED = "all that held it are lost, and a copy was here", "it had the least capacity, and a copy was here"


class OpensWithStep(Protocol):
    """Begins anew with every step."""

    def opened(self, record: CloseRecord) -> None:
        """The step after this record is open."""


class Following:
    """Follows the run with the part that this peer holds: see :class:`swarm.step.context.PartHolder`.

    ``opens`` are told of each step that opens, in this order; ``events`` tells of each that closed.
    """

    def __init__(
        self,
        run: RunContext,
        holding: RoleManager,
        opens: Sequence[OpensWithStep],
        copying: Copying,
        observers: ObserverService,
    ) -> None:
        self._run, self._at, self._holding, self._opens = run, run.position, holding, opens
        self._copying, self._observers = copying, observers
        self.events = StepEvents(run)
        self._was_member, self._has_been_ready = False, False
        self._since = run.around.clock.monotonic()
        self._unfit: asyncio.Future[ConfigError | StateError] = asyncio.get_running_loop().create_future()

    @property
    def part(self) -> TrainedPart | None:
        """Return the part that this peer trains; None for a peer that holds nothing."""
        return self._holding.part

    # --- taking a part -------------------------------------------------------------------------------------------

    async def install(self, record: CloseRecord, donor: PeerId) -> None:
        """Download and verify the part that the genesis names for us, and be ready. Raises the founder's PeerError.

        What is wrong on our side ends this peer with the reason (:meth:`end_unfit`); the founder is told no.
        """
        self._run.exit.admitted.set()  # from here on a record may name us
        try:
            await self._take_place(record, donor)
        except (ConfigError, StateError) as error:
            if not self._unfit.done():
                self._unfit.set_result(error)
            raise Refused(str(error)) from error

    async def end_unfit(self) -> None:
        """Raise RunEnded once this peer has found that it cannot take its part; else wait until cancelled."""
        error = await asyncio.shield(self._unfit)
        raise RunEnded(str(error), error.ending) from error

    async def _take_place(self, record: CloseRecord, donor: PeerId) -> None:
        around, role = self._run.around, self._run.settings.role
        self._run.learn(record.members)
        own = record.members[around.endpoint.peer].part
        part = None
        reason = "the run starts with it" if own is not None else f"a {role} holds none"
        self._run.assigned(None if own is None else PartName(own), reason, record)
        if own is not None:
            part = await self._kept(PartName(own), record)
        if own is not None and part is None:
            await around.device.run(check_memory, around, PartName(own))
            part = await build_empty(around, PartName(own), (donor, *record.members.peers))
            await download_part(around, record, part, donor)
        await self.prepare(part, record)

    async def _kept(self, name: PartName, record: CloseRecord) -> TrainedPart | None:
        """Return what was downloaded for another founding record, in which we held the same part."""
        part = self._holding.part
        if part is None or part.spec.name != name:
            return None
        found = await self._run.around.device.run(lambda: digest(part.snapshot()))
        return part if found == record.digests[name] else None

    async def prepare(self, part: TrainedPart | None, record: CloseRecord) -> None:
        """Serve our part, which is here for the first time, with the state that the record names."""
        self._holding.take(part, record)

    async def _move(self, record: CloseRecord) -> str:
        """This record has us hold another part, of which we said that we hold a copy; returns what is in the way.

        What was held is let go first, so that never two parts are here that can be trained; it stays as a copy, where
        this peer is to keep one of it.
        """
        name, before = PartName(record.members[self._run.around.endpoint.peer].part or ""), self._holding.part
        state = await self._copying.take(name, record.step)
        if state is None and name in self._run.rules.frozen:
            state = blank(self._run.around.manifest, name, record.step)
        self._run.situation.moved(name, MOVED if record.void else CALLED)
        if before is not None and before.feedback.residual is not None:
            self._residual_lost(before, record, f"this peer holds {name} from now on")
        old = None if before is None else await self._run.around.device.run(before.snapshot)
        self._holding.let_go()
        del before
        if old is not None:
            await self._copying.keep(old, record)
        if state is None:
            return f"it holds {name} from step {record.step + 1} on, and no copy of that state is here"
        part = await build_empty(self._run.around, name, record.members.peers)
        await self._run.around.device.run(part.install, state)
        await self.prepare(part, record)
        return ""

    async def _part(self, held: TrainedPart, decision: Decision) -> None:
        """With this record stages share their layers no more: hold as the stage that it gives us what we held as all of
        them, with what was rounded off, and so the copies that this peer is to keep; who follows it with our help gets
        its last update first."""
        record, around = decision.record, self._run.around
        name = PartName(record.members[around.endpoint.peer].part or "")
        await self._observers.publish(decision, held.spec.name)
        self._run.situation.moved(name, PARTED)
        self._holding.let_go()
        for other in self._copying.wanted.intersection(becomes(held.spec.name)) - {name}:
            state = await around.device.run(held.parted, other)
            await self._copying.keep(await asyncio.to_thread(state.apart), record)
        part, state = await build_empty(around, name), await around.device.run(held.parted, name)
        await around.device.run(part.install, state)
        part.feedback = held.feedback
        await self.prepare(part, record)
        await self._observers.copied(name, replace(decision, mean=None))

    async def _publish(self, decision: Decision, name: PartName | None) -> str:
        """Serve observers, with the part ``name`` from now on where the record names us; returns what is in the way of
        that."""
        held, lacks = self._holding.part, ""
        if held is not None and name != held.spec.name and name in becomes(held.spec.name):
            await self._part(held, decision)
            return ""
        if name is not None and (self._run.situation.part or "") != name:
            lacks = await self._move(decision.record)
            decision = replace(decision, mean=None)  # it is of the part that was held
            held = self._holding.part
        await self._observers.publish(decision, None if held is None else held.spec.name)
        return lacks

    # --- from record to record -----------------------------------------------------------------------------------

    async def decided(self, decision: Decision) -> str:
        """Tell of a decided record whose result our part has, serve observers, open the next step. Returns as
        :meth:`swarm.step.context.PartHolder.decided`."""
        record, roster, me = decision.record, decision.record.members, self._run.around.endpoint.peer
        inside, watch = self._at.names(record), self._run.around.watch
        if not record.repeats:  # that one proves no step of its own
            self._run.saw(record)
        self._run.situation.may_go_back = False  # it was for what was lost before this record
        seconds = self.events.closed(record, took_part=self._was_member, digest=decision.digest)
        if self._was_member:
            self._run.deadline.observe(seconds)
        await self._copying.decided(decision)
        lacks = await self._publish(decision, PartName(roster[me].part or "") if inside else None)
        held = self._holding.part
        # Who leaves may hold none of it; and of a part that nobody holds yet the record has what was, not what is here.
        # Of one whose last host leaves it has what is here, and nobody else has that.
        has = set(record.digests).difference(() if self._at.departed else roster.paused)
        kept = None if held is None or held.spec.name not in has else held
        await self._run.keeper.decided(decision, kept, departed=self._at.departed)
        if self._run.rules.over(record) or self._at.departed:
            watch.follow(())
            return lacks
        if inside:
            self._run.learn(roster)
            watch.follow(self._at.forking.watched(roster), roster.lives, roster.machines)
        if me in roster and not inside:
            return lacks  # an earlier life of this peer is in it, for which it votes at most
        for each in self._opens:
            each.opened(record)
        if inside and not self._was_member and not lacks:
            self._ready(record)
        return lacks

    def start_over(self) -> None:
        """Take the next record that names this peer for the first again: the run went on without it."""
        self._was_member, self._since = False, self._run.around.clock.monotonic()

    def _ready(self, record: CloseRecord) -> None:
        """This record is the first that names us."""
        around, situation, self._was_member = self._run.around, self._run.situation, True
        if not self._run.exit.asked:
            situation.ready()
        seconds, again = around.clock.monotonic() - self._since, self._has_been_ready
        part, reason, self._has_been_ready = situation.part, situation.reason, True
        around.events.emit(PeerReady(part=part, step=record.step, reason=reason, seconds=seconds, again=again))
        held = self._holding.part
        if again and held is not None and around.manifest.averaging.feeds_back and held.feedback.residual is None:
            self._residual_lost(held, record, "it was cut off, and what it had rounded off may have been averaged")
        me = around.endpoint.peer
        if again and isinstance(held, LocalPart) and me in lacking(record, {me: held.since}):
            tokens = owed_tokens(record)[me]
            lost = LateWorkLost(step=record.step, peer=me, tokens=tokens, reason="it got its state from others")
            around.events.emit(lost)

    def _residual_lost(self, part: TrainedPart, record: CloseRecord, reason: str) -> None:
        around = self._run.around
        lost = ResidualLost(step=record.step, part=part.spec.name, peer=around.endpoint.peer, reason=reason)
        around.events.emit(lost)

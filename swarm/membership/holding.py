"""The part of the model that this peer holds, and its role with it.

It holds nothing until a record or a download says what, and another part from the step on at whose close it takes a
lost one over. :class:`LocalSGD` runs its mixing while replicas train apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace

from swarm.averaging.gossip.mixing import Held, Mix, Mixing, MixingContext, MixingRules, Taking
from swarm.averaging.gossip.pushing import Pushing, PushSum
from swarm.averaging.gossip.versions import VersionService
from swarm.averaging.gossip.wait_avoiding import WaitAvoiding
from swarm.averaging.strategies import STRATEGIES
from swarm.consensus.records import MAX_PACE_US, CloseRecord
from swarm.consensus.roster import Roster
from swarm.events import Event, EventSink, Mixed
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.membership.roles import PeerContext, Role, StageRole, TrainerRole
from swarm.membership.rules import reach_of
from swarm.membership.run import RunContext
from swarm.membership.status import PeerStatus
from swarm.network.protocols import Service
from swarm.optim.local_part import LocalPart
from swarm.optim.part import TrainedPart
from swarm.pipeline.activity import PipelineActivity
from swarm.step.loop import Feed
from swarm.step.member.remote_leader import RemoteLeader
from swarm.step.rounds import Rounds


class RoleManager:
    """The role of one peer. Empty until :meth:`take`; a bootstrap's stays so."""

    def __init__(self, run: RunContext, leader: RemoteLeader) -> None:
        self._settings, self._around, self._leader = run.settings, run.around, leader
        self._role: Role | None = None
        self._changed = asyncio.Event()
        self.ready = asyncio.Event()

    @property
    def role(self) -> Role | None:
        """Return what is done now; None before a part is here, and for a bootstrap."""
        return self._role

    @property
    def part(self) -> TrainedPart | None:
        """Return what is held now."""
        return None if self._role is None else self._role.part

    def take(self, part: TrainedPart | None, record: CloseRecord) -> None:
        """Our part is here, with the state that the record names: serve it, instead of what was held before."""
        before, self._role = self._role, self._role_for(part, record.members)
        if before is not None:
            self._around.endpoint.unmount(before.service)
        if self._role is not None:
            self._around.endpoint.mount(self._role.service)
        self._changed.set()
        self.ready.set()

    def let_go(self) -> None:
        """Hold nothing, until another part is taken: what was held is needed no more."""
        before, self._role = self._role, None
        if before is not None:
            self._around.endpoint.unmount(before.service)
        self._changed.set()

    def _role_for(self, part: TrainedPart | None, roster: Roster) -> Role | None:
        if self._settings.role == "trainer":
            source = self._around.source
            assert source is not None  # noqa: S101 - opened before the run was entered
            return TrainerRole(self._around, part, roster, source, self._settings.max_in_flight)
        if part is not None:
            return StageRole(self._around, part, roster)
        return None

    async def run(self) -> None:
        """Do what is held, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._role is None:
                continue
            working = asyncio.create_task(self._role.run())
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({working, changed}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                working.cancel()
                changed.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def activity(self, rounds: Rounds) -> PipelineActivity:
        """Return what is done for microbatches now, and whether one of the ``rounds`` of the part goes on in the
        background."""
        doing = PipelineActivity() if self._role is None else self._role.service.activity()
        return replace(doing, averaging=rounds.held_bytes > 0)

    def pace_us(self) -> int:
        """Microseconds that a stage's replica computes a microbatch for; 0 where that is not known, or none."""
        role = self._role
        return min(MAX_PACE_US, round(role.service.activity().compute_s * 1e6)) if isinstance(role, StageRole) else 0

    def feed(self) -> Feed | None:
        """A trainer's work for one step, told to its leader; None for a peer that does not train with data."""
        if self._settings.role != "trainer":
            return None

        async def feed(step: int) -> None:
            role = self._role
            assert isinstance(role, TrainerRole)  # noqa: S101 - taken before this peer is a member
            self._leader.begun = role.service
            await role.feed(step, self._leader)

        return feed

    # --- from step to step ---------------------------------------------------------------------------------------

    def opened(self, record: CloseRecord) -> None:
        """The step after this record is open."""
        if self._role is not None:
            self._role.opened(record)

    def rewound(self) -> None:
        """A lineage was given up: nothing that was done in its steps counts, and its leaders are others."""
        self._leader.rewound()
        if self._role is not None:
            self._role.service.rewound()

    async def settle(self, step: int, assigned: Mapping[StepWork, tuple[PeerId, ...]]) -> None:
        """Hold exactly what is assigned: see :class:`swarm.step.member.open_step.Settle`."""
        if self._role is not None:
            await self._role.service.settle(step, assigned)

    def cursor(self, step: int, committed: Collection[MicrobatchId]) -> tuple[int, int] | None:
        """Return where our shard continues after a step with these microbatches; None without a shard."""
        return self._role.service.cursor_after(step, committed) if isinstance(self._role, TrainerRole) else None


# --- mixing while replicas train apart, as the manifest says it goes -------------------------------------------------


class _Counting:
    """Events, and among them how often this peer has mixed."""

    def __init__(self, events: EventSink, situation: PeerStatus) -> None:
        self._events, self._situation = events, situation

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        if isinstance(event, Mixed):
            self._situation.has_mixed(event.averaged)
        self._events.emit(event)


class LocalSGD:
    """Does nothing where replicas do not train apart, or meet only when a step closes; ``services`` are to be
    mounted."""

    def __init__(self, run: RunContext, holding: RoleManager) -> None:
        around, averaging = run.around, run.around.manifest.averaging
        self._holding, self._at, self._endpoint = holding, run.position, around.endpoint
        self._mixing: Mixing | None = None
        self.services: tuple[Service, ...] = ()
        if averaging.mode != "local" or averaging.local.sync_every == 1:
            return
        events = _Counting(around.events, run.situation)
        context = MixingContext(
            endpoint=around.endpoint, device=around.device, clock=around.clock, events=events, held=self._held
        )
        mixes = self._mixes(context, around)
        self._mixing = Mixing(mixes, self._held, averaging.local.sync_every)

    def opened(self, record: CloseRecord) -> None:
        """The step after this record is open: its roster says how many share a batch."""
        part = self._holding.part
        if isinstance(part, LocalPart):
            part.replicas = len(record.members.replicas(part.spec.name))
            part.leg_over = self._leg_over

    def _leg_over(self) -> None:
        if self._mixing is not None:
            self._mixing.leg_over()

    def _mixes(self, context: MixingContext, around: PeerContext) -> Mix:
        averaging, seed = around.manifest.averaging, around.manifest.run.seed
        if averaging.strategy == "push-sum":
            pushing = Pushing(context, PushSum(), seed, reach_of(around.manifest))
            self.services = (pushing,)
            return pushing
        self.services = (VersionService(self._held),)
        rules = MixingRules(
            strategy=STRATEGIES[averaging.strategy],
            seed=seed,
            wait_avoiding=WaitAvoiding(averaging.local.staleness),
            reach=reach_of(around.manifest),
        )
        return Taking(context, rules)

    async def run(self) -> None:
        """Mix after each leg, until cancelled."""
        if self._mixing is not None:
            await self._mixing.run()

    def _held(self) -> Held | None:
        part = self._holding.part
        if not isinstance(part, LocalPart):
            return None
        replicas = self._at.roster.replicas(part.spec.name)
        if self._endpoint.peer not in replicas:  # cut off, or not let in yet
            return None
        return part.spec.name, part, replicas

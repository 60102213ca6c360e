"""One peer's membership of one run: it is announced, gets its part at the genesis or joins later, follows the steps,
and leaves.

:meth:`Membership.run` tells the story.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import torch

from data_shards.source import ShardSource
from peers.announcer import Announcer
from peers.checkpoints import CheckpointWriter, run_directory_of
from peers.contact import ask_standing
from peers.founder import Founder
from peers.joining import Joining, insist_on_being_reached
from peers.leaving import Leaving
from peers.roles import Role, StageRole, Surroundings, TrainerRole, build_empty, download_part
from peers.settings import PeerSettings
from peers.situation import Situation
from peers.step_events import StepEvents
from swarm.averaging.allreduce import AllReduce
from swarm.averaging.plan import RoundKey, RoundResult
from swarm.averaging.round import RoundCall, average, plan_round
from swarm.averaging.strategies import STRATEGIES
from swarm.config import Manifest
from swarm.errors import ConfigError, PeerError, Refused, RunEnded, StateError
from swarm.events import PeerReady
from swarm.ids import PartName, PeerId, stage_of
from swarm.models.split import split_model
from swarm.network.protocols import MAX_BODY_BYTES, Directory
from swarm.network.records import PeerRecord
from swarm.optimization.calls import StepCalls
from swarm.optimization.history import History
from swarm.optimization.lead import LeadDesk
from swarm.optimization.loop import Feed, StepLoop
from swarm.optimization.member import Member, MemberContext
from swarm.optimization.observing import ObserverDesk
from swarm.optimization.part import TrainedPart
from swarm.optimization.parting import Parting
from swarm.optimization.records import CloseRecord, Decision, record_room
from swarm.optimization.roster import Roster
from swarm.optimization.rules import StepRules
from swarm.optimization.step import Closing, RemoteLeader
from swarm.planning.deadlines import AdaptiveDeadline
from swarm.security.signing import verify
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import StateDonor

STEP_FLOOR_S, STEP_CEILING_S = 20.0, 120.0
ROUND_SHARE = 0.8
"""A round's share of the time that the leader waits for its outcome: so the round fails first and names the culprit."""
WAITING_S = 1.0
"""How often a peer that waits for the genesis asks how far it is."""


def rules_of(manifest: Manifest) -> StepRules:
    """What the manifest says about every step."""
    batch, stages = manifest.batch, manifest.split.stages
    return StepRules(
        run=manifest.run_id,
        steps=manifest.run.steps,
        target=batch.microbatches_per_step,
        max_share=batch.max_share,
        max_tokens=batch.microbatch_size * manifest.model.context,
        stages=stages,
        parts=tuple(spec.name for spec in split_model(manifest.model, manifest.split)),
        max_members=record_room(batch.microbatches_per_step, stages, MAX_BODY_BYTES),
        reproducible=manifest.run.reproducible,
        optimizer=manifest.optimizer,
    )


class Membership:
    """Everything a peer has once it knows the manifest.

    ``contact`` is the peer through which it found the run (itself for the founder), ``founder`` the one whose genesis
    counts, ``source`` a trainer's data.
    """

    def __init__(
        self,
        settings: PeerSettings,
        around: Surroundings,
        directory: Directory,
        *,
        contact: PeerId,
        founder: PeerId,
        source: ShardSource | None = None,
    ) -> None:
        self._settings, self._around, self._directory = settings, around, directory
        self._contact, self._source = contact, source
        self._founds = contact == around.endpoint.peer
        self._rules = rules_of(around.manifest)
        self.situation = Situation(around.events)
        self._deadline = AdaptiveDeadline(STEP_FLOOR_S, STEP_CEILING_S)
        self._history = History(settings.home / "history.jsonl")
        self._allreduce = AllReduce(around.endpoint, around.clock)
        self._member = Member(self._member_context(founder))
        self._desk = LeadDesk(self._rules, around.endpoint.peer, self._member.wait_open, verify)
        self._calls = StepCalls(around.endpoint)
        self._parting = Parting()
        self._donor = StateDonor(around.clock, max_downloads=self._downloads())
        self._observers = ObserverDesk(founder, self._donor, self._snapshot, self._waiting_for, around.clock)
        self._announcer = Announcer(settings, around.endpoint, directory, self.situation, around.clock)
        self._step_events = StepEvents(around, self.situation)
        self._leaving = Leaving(
            around.manifest.run_id, self._member, self._calls, around.identity, self.situation, self._deadline
        )
        self._role: Role | None = None
        self._was_member = False
        self._followed: tuple[PeerId, ...] = ()
        self._installed = asyncio.Event()
        self._unfit: asyncio.Future[ConfigError | StateError] = asyncio.get_running_loop().create_future()
        self._checkpoints = self._checkpoint_writer()
        self._writing: asyncio.TaskGroup | None = None
        self._born = around.clock.monotonic()
        for service in (
            around.watch, self._member, self._desk, self._allreduce, self._parting, self._donor, self._observers,
        ):  # fmt: skip
            around.endpoint.mount(service)

    def _downloads(self) -> int:
        """All at once at the genesis, from the founder; later a few."""
        start = self._around.manifest.run.start_when
        return start.stage_hosts + start.trainers if self._founds else 4

    def _member_context(self, founder: PeerId) -> MemberContext:
        around = self._around
        return MemberContext(
            me=around.endpoint.peer,
            rules=self._rules,
            device=around.device,
            average=self._average,
            history=self._history,
            sign=around.identity.sign,
            verify=verify,
            cursor=self._cursor,
            install=self._install,
            decided=self._decided,
            founder=founder,
        )

    def _checkpoint_writer(self) -> CheckpointWriter | None:
        settings, around = self._settings, self._around
        if settings.run_directory is None:
            return None
        return CheckpointWriter(
            run_directory_of(settings.run_directory, around.manifest).checkpoints,
            settings.checkpoint_every,
            self._rules.steps,
            kept=settings.checkpoints_kept,
            events=around.events,
            clock=around.clock,
        )

    # --- the story -----------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Announce, be founded or join, train, and leave when the last step is closed or earlier when asked. Returns
        why it is over, in words. Raises, in an ExceptionGroup, whatever ends it earlier."""
        try:
            await self._live()
        except* RunEnded:  # it never came to be, or cannot go on: others need not wait for its record to expire
            await self._announcer.gone()
            raise
        await self._announcer.gone()
        if self._member.departed:
            return f"it left in order after step {self._member.open_step - 1}"
        return "every step of the run is closed"

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as writing:  # checkpoints may outlast the steps
            self._writing = writing
            async with asyncio.TaskGroup() as group:
                work = (self._announcer.run, self._work, self._end_unfit, self._leaving.run)
                background = [group.create_task(part()) for part in work]
                group.create_task(self._begin())
                closing = Closing(
                    rules=self._rules,
                    calls=self._calls,
                    history=self._history,
                    events=self._around.events,
                    timeout_s=self._deadline.seconds,
                    asking=self._desk.asking,
                    settle=self._desk.settle,
                )
                await StepLoop(self._member, self._desk, closing, self._parting, self._feed()).run()
                for task in background:
                    task.cancel()

    def leave(self, reason: str, exit_code: int) -> str:
        """Leave in order: see :meth:`peers.leaving.Leaving.ask`. :meth:`run` then ends after the step's close."""
        return self._leaving.ask(reason, exit_code)

    @property
    def exit_code(self) -> int:
        """What the process ends with when :meth:`run` returned."""
        return self._leaving.exit_code if self._member.departed else 0

    async def _begin(self) -> None:
        """Be in the roster, in one of three ways: found the run, be in its genesis, or join it in progress."""
        if self._founds:
            await self._found()
            return
        await self._be_reached()
        while not self._member.is_member:
            standing = await ask_standing(self._around.endpoint, self._around.clock, self._contact)
            if standing.closed is not None and not self._installed.is_set():
                joining = Joining(
                    self._settings, self._around, self._member, self.situation, self._leaving, self._prepare
                )
                await joining.run(self._contact)
                return
            if standing.closed is None:
                self.situation.wait_for(standing.waiting_for or "the run to start")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAITING_S):
                    await self._member.wait_member()

    async def _found(self) -> None:
        founder = Founder(self._around, self._directory, self._calls, self._announcer.record, self._donor)
        try:
            await founder.found(self._settings.patience_s, self.situation.wait_for)
        except asyncio.CancelledError:
            await founder.give_up("its founder left before the run started")
            raise
        await self._around.be_reachable(self._member.roster.peers)  # now there is somebody to ask

    async def _be_reached(self) -> None:
        """Before anybody counts on us. Whoever is in the directory may relay for us."""
        if await self._around.be_reachable((self._contact,)):
            records: dict[PeerId, PeerRecord] = {}
            with contextlib.suppress(PeerError):
                records = await self._directory.lookup(PeerRecord)
            for peer, record in records.items():
                self._around.endpoint.learn(peer, record.addresses)
            await insist_on_being_reached(self._around, tuple(records))

    def _waiting_for(self) -> str:
        return self.situation.waiting_for

    async def _work(self) -> None:
        await self._installed.wait()
        if self._role is not None:
            await self._role.run()

    async def _end_unfit(self) -> None:
        error = await asyncio.shield(self._unfit)
        raise RunEnded(str(error), error.exit_code) from error

    def _feed(self) -> Feed | None:
        if self._settings.role != "trainer":
            return None

        async def feed(step: int) -> None:
            role = self._role
            assert isinstance(role, TrainerRole)  # noqa: S101 - built before this peer is a member
            roster = self._member.roster
            await role.feed(step, RemoteLeader(self._calls, roster, self._deadline.seconds))

        return feed

    def _cursor(self) -> tuple[int, int] | None:
        return self._role.service.cursor if isinstance(self._role, TrainerRole) else None

    async def _snapshot(self) -> Snapshot | None:
        part = None if self._role is None else self._role.part
        return None if part is None else await self._around.device.run(part.snapshot)

    async def _average(
        self, step: int, part: PartName, weights: Mapping[PeerId, int], sums: torch.Tensor
    ) -> RoundResult:
        manifest = self._around.manifest
        call = RoundCall(
            key=RoundKey(step, part, 0),
            replicas=tuple(weights),
            weights=weights,
            elements=sums.numel(),
            timeout_s=ROUND_SHARE * self._deadline.seconds(),
            dtype="float64" if manifest.run.reproducible else "float32",
            seed=manifest.run.seed,
        )
        plan = plan_round(call, STRATEGIES[manifest.averaging.strategy], self._around.endpoint.peer)
        return await average(self._allreduce, plan, sums, self._around.events)

    # --- what the member calls back ------------------------------------------------------------------------------

    async def _install(self, record: CloseRecord, donor: PeerId) -> None:
        """The genesis names our part: download it, verify it, be ready. Raises the founder's PeerError.

        What is wrong on our side ends this peer with the reason; the founder is told no.
        """
        self._leaving.admitted.set()  # from here on a record may name us
        try:
            await self._take_place(record, donor)
        except (ConfigError, StateError) as error:
            if not self._unfit.done():
                self._unfit.set_result(error)
            raise Refused(str(error)) from error

    async def _take_place(self, record: CloseRecord, donor: PeerId) -> None:
        around, roster = self._around, record.members
        self._learn(roster)
        own = roster[around.endpoint.peer].part
        part = None
        reason = "the run starts with it" if own is not None else f"a {self._settings.role} holds none"
        self.situation.assigned(None if own is None else PartName(own), reason)
        if own is not None:
            part = await build_empty(around, PartName(own))
            await download_part(around, record, part, donor)
        await self._prepare(part, record)

    async def _prepare(self, part: TrainedPart | None, record: CloseRecord) -> None:
        """Our part is here for the first time: serve it."""
        around, roster = self._around, record.members
        if self._settings.role == "trainer":
            assert self._source is not None  # noqa: S101 - opened before the run was entered
            self._role = TrainerRole(around, part, roster, self._source, self._settings.max_in_flight)
        elif part is not None and (stage := stage_of(part.spec.name)) is not None:
            self._role = StageRole(around, part, stage, roster)
        if self._role is not None:
            around.endpoint.mount(self._role.service)
            self._member.part = self._role.part
        self._installed.set()

    def _learn(self, roster: Roster) -> None:
        for member in roster.members:
            if member.peer != self._around.endpoint.peer:
                self._around.endpoint.learn(PeerId(member.peer), member.addresses)

    async def _decided(self, decision: Decision) -> None:
        """A record was decided and our part has its result: say so, serve observers, open the next step."""
        record, roster = decision.record, decision.record.members
        inside = self._around.endpoint.peer in roster
        seconds = self._step_events.closed(record, took_part=self._was_member)
        if self._was_member:
            self._deadline.observe(seconds)
        await self._observers.publish(decision)
        await self._keep_checkpoint(record)
        if record.step >= self._rules.steps or self._member.departed:
            self._around.watch.follow(())
            return
        if inside:
            self._learn(roster)
            if roster.peers != self._followed:
                self._followed = roster.peers
                self._around.watch.follow(roster.peers)
        self._desk.open_step(record.step + 1, roster, record.hash())
        if self._role is not None:
            self._role.open_step(record.step + 1, roster)
        if inside and not self._was_member:
            self._ready(record)

    def _ready(self, record: CloseRecord) -> None:
        """This record is the first that names us."""
        around, self._was_member = self._around, True
        if isinstance(self._role, TrainerRole):
            with contextlib.suppress(ConfigError):  # another shard than last time: from its beginning
                self._role.service.seek(record.cursors.get(around.endpoint.peer, (0, 0)))
        if not self._leaving.asked:
            self.situation.ready()
        seconds = around.clock.monotonic() - self._born
        around.events.emit(
            PeerReady(part=self.situation.part, step=record.step, reason=self.situation.reason, seconds=seconds)
        )

    async def _keep_checkpoint(self, record: CloseRecord) -> None:
        held = None if self._role is None else self._role.part
        if self._checkpoints is None or held is None:
            return
        if self._checkpoints.due(record.step) or self._member.departed:
            assert self._writing is not None  # noqa: S101 - records are only decided inside run()
            snapshot = await self._around.device.run(held.snapshot)
            self._writing.create_task(self._checkpoints.write(snapshot, record))

    # --- names ---------------------------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Who takes part in the open step; empty before the genesis."""
        return self._member.roster

    def name_of(self, peer: str) -> str:
        """The name a peer gave itself, its id when it is not in the roster."""
        return self.roster[peer].name if peer in self.roster else peer

    def describe(self, error: BaseException) -> str:
        """A peer's failure, with its name."""
        if isinstance(error, PeerError) and error.peer:
            name = self.name_of(error.peer)
            who = error.peer if name == error.peer else f"{name} ({error.peer})"
            return f"{who} failed: {error.code}, {error.reason}"
        return str(error)

"""One peer's membership of one run: it is announced, gets its part at the genesis, and follows the steps.

:meth:`Membership.run` tells the story.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from peers.checkpoints import CheckpointWriter
from peers.founder import Founder
from peers.roles import Role, StageRole, Surroundings, TrainerRole, download_part, open_shard
from peers.settings import PeerSettings
from swarm.averaging.allreduce import AllReduce
from swarm.averaging.plan import RoundKey, RoundResult
from swarm.averaging.round import RoundCall, average, plan_round
from swarm.averaging.strategies import STRATEGIES
from swarm.errors import EXIT_UNREACHABLE, ConfigError, PeerError, Refused, RunEnded, StateError
from swarm.events import LinkUsage, PeerReady, RunStarted, StepClosed
from swarm.ids import PartName, PeerId, stage_of
from swarm.models.flops import model_parameter_count
from swarm.network.protocols import Directory
from swarm.network.records import PeerRecord
from swarm.optimization.calls import StepCalls
from swarm.optimization.history import History
from swarm.optimization.lead import LeadDesk
from swarm.optimization.loop import Feed, StepLoop
from swarm.optimization.member import Member, MemberContext
from swarm.optimization.parting import Parting
from swarm.optimization.records import CloseRecord
from swarm.optimization.rules import StepRules
from swarm.optimization.step import Closing, RemoteLeader
from swarm.planning.deadlines import AdaptiveDeadline
from swarm.security.signing import verify

RECORD_TTL_S = 60.0
RECORD_RENEWAL_S = 20.0
STEP_FLOOR_S, STEP_CEILING_S = 20.0, 120.0
ROUND_SHARE = 0.8
"""A round's share of the time that the leader waits for its outcome: so the round fails first and names the culprit."""
WAITING_S = 5.0
"""How often a peer that waits for the genesis looks whether the run has started without it."""


class Membership:
    """Everything a peer has once it knows the manifest."""

    def __init__(self, settings: PeerSettings, around: Surroundings, directory: Directory, founder: PeerId) -> None:
        self._settings, self._around, self._directory = settings, around, directory
        self._founder = founder
        manifest = around.manifest
        self._rules = StepRules(
            run=manifest.run_id,
            steps=manifest.run.steps,
            target=manifest.batch.microbatches_per_step,
            max_share=manifest.batch.max_share,
            max_tokens=manifest.batch.microbatch_size * manifest.model.context,
            stages=manifest.split.stages,
            reproducible=manifest.run.reproducible,
            optimizer=manifest.optimizer,
        )
        self._deadline = AdaptiveDeadline(STEP_FLOOR_S, STEP_CEILING_S)
        self._history = History(settings.home / "history.jsonl")
        self._allreduce = AllReduce(around.endpoint, around.clock)
        self._member = Member(self._member_context(founder))
        self._desk = LeadDesk(self._rules, around.endpoint.peer, self._member.wait_open, verify)
        self._calls = StepCalls(around.endpoint)
        self._parting = Parting()
        self._role: Role | None = None
        self._installed = asyncio.Event()
        self._unfit: asyncio.Future[ConfigError | StateError] = asyncio.get_running_loop().create_future()
        self._checkpoints = self._checkpoint_writer()
        self._writing: asyncio.TaskGroup | None = None
        self._usage = (0, 0)
        self._incarnation = int(around.clock.wall() * 1000)
        self._opened_at = self._born = around.clock.monotonic()
        for service in (around.watch, self._member, self._desk, self._allreduce, self._parting):
            around.endpoint.mount(service)

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
        if settings.checkpoints is None:
            return None
        return CheckpointWriter(
            settings.checkpoints,
            settings.checkpoint_every,
            self._rules.steps,
            events=around.events,
            clock=around.clock,
        )

    # --- the story -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Announce, be founded, train, and leave when the last step is closed. Raises, in an ExceptionGroup, whatever
        ends it earlier."""
        async with asyncio.TaskGroup() as writing:  # checkpoints may outlast the steps
            self._writing = writing
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(work()) for work in (self._announce, self._work, self._end_unfit)]
                if self._settings.role == "bootstrap":
                    await Founder(self._around, self._directory, self._calls, self._own_record).found()
                closing = Closing(
                    rules=self._rules,
                    calls=self._calls,
                    history=self._history,
                    events=self._around.events,
                    timeout_s=self._deadline.seconds,
                )
                await StepLoop(self._member, self._desk, closing, self._feed()).run()
                await self._parting.part(self._calls, self._member.roster, self._rules.steps)
                for task in background:
                    task.cancel()

    async def _announce(self) -> None:
        """Keep our record in the directory alive. A directory that cannot be reached now is tried again in time."""
        while True:
            pause = RECORD_RENEWAL_S if self._installed.is_set() else WAITING_S
            try:
                await self._directory.announce(self._own_record(), ttl_s=RECORD_TTL_S)
                await self._check_place()
            except PeerError:
                pause = 1.0
            await self._around.clock.sleep(pause)

    async def _check_place(self) -> None:
        """A peer that the genesis left out would wait for ever. Raises RunEnded when the run has started without us."""
        if self._installed.is_set() or self._founder == self._around.endpoint.peer:
            return
        founder = (await self._directory.lookup(PeerRecord)).get(self._founder)
        if founder is not None and founder.step > 0 and not self._installed.is_set():
            reason = "the run has started without this peer, and this version cannot join a run in progress"
            raise RunEnded(f"{reason}; start it together with the others", EXIT_UNREACHABLE)

    def _own_record(self) -> PeerRecord:
        settings, step = self._settings, self._member.open_step
        return PeerRecord(
            role=settings.role,
            name=settings.name,
            stage=settings.stage,
            addresses=self._around.endpoint.addresses,
            incarnation=self._incarnation,
            status="ready" if step else "waiting",
            step=step,
            wire=self._around.manifest.run.wire,
        )

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
            assert isinstance(role, TrainerRole)  # noqa: S101 - installed at the genesis
            roster = self._member.roster
            await role.feed(step, RemoteLeader(self._calls, roster, self._deadline.seconds))

        return feed

    def _cursor(self) -> tuple[int, int] | None:
        return self._role.service.cursor if isinstance(self._role, TrainerRole) else None

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

        What is wrong on our side, such as a damaged shard, ends this peer with the reason; the founder is told no.
        """
        try:
            await self._take_place(record, donor)
        except (ConfigError, StateError) as error:
            self._unfit.set_result(error)
            raise Refused(str(error)) from error

    async def _take_place(self, record: CloseRecord, donor: PeerId) -> None:
        around, roster = self._around, record.members
        me = around.endpoint.peer
        for member in roster.members:
            if member.peer != me:
                around.endpoint.learn(PeerId(member.peer), member.addresses)
        own = roster[me].part
        part = await download_part(around, record, PartName(own), donor) if own is not None else None
        if self._settings.role == "trainer":
            assert self._settings.shard is not None  # noqa: S101 - checked with the settings
            source = open_shard(around, self._settings.shard)
            self._role = TrainerRole(around, part, roster, source, self._settings.max_in_flight)
        elif part is not None and (stage := stage_of(part.spec.name)) is not None:
            self._role = StageRole(around, part, stage, roster)
        if self._role is not None:
            around.endpoint.mount(self._role.service)
            self._member.part = self._role.part
        self._installed.set()
        seconds = around.clock.monotonic() - self._born
        part_name = None if own is None else PartName(own)
        around.events.emit(PeerReady(part=part_name, step=0, reason="member of the genesis", seconds=seconds))

    async def _decided(self, record: CloseRecord) -> None:
        """A record was decided and our part is swapped: say so, and open the next step."""
        now = self._around.clock.monotonic()
        if record.step == 0:
            self._emit_run_started(record)
            self._around.watch.follow(record.members.peers)
        else:
            self._deadline.observe(now - self._opened_at)
            self._emit_step_closed(record, now - self._opened_at)
        await self._keep_checkpoint(record)
        self._opened_at = now
        if record.step >= self._rules.steps:
            self._around.watch.follow(())
            return
        self._desk.open_step(record.step + 1, record.members)
        if self._role is not None:
            self._role.open_step(record.step + 1, record.members)

    async def _keep_checkpoint(self, record: CloseRecord) -> None:
        held = None if self._role is None else self._role.part
        if self._checkpoints is None or held is None or not self._checkpoints.due(record.step):
            return
        assert self._writing is not None  # noqa: S101 - records are only decided inside run()
        if record.members.replicas(held.spec.name)[0] == self._around.endpoint.peer:
            snapshot = await self._around.device.run(held.snapshot)
            self._writing.create_task(self._checkpoints.write(snapshot, record))

    # --- events --------------------------------------------------------------------------------------------------

    def _emit_run_started(self, record: CloseRecord) -> None:
        manifest = self._around.manifest
        roster = tuple({"peer": m.peer, "name": m.name, "role": m.role, "part": m.part} for m in record.roster)
        self._around.events.emit(
            RunStarted(
                run=manifest.run_id,
                stages=manifest.split.stages,
                roster=roster,
                parameters=model_parameter_count(manifest.model),
            )
        )

    def _emit_step_closed(self, record: CloseRecord, seconds: float) -> None:
        events = self._around.events
        events.emit(
            StepClosed(
                step=record.step,
                loss=record.loss,
                tokens=record.tokens,
                microbatches=len(record.committed),
                grad_norm=record.grad_norm,
                clip=record.clip,
                lr=record.lr,
                digests=dict(record.digests),
                leader=record.members.leader(record.step),
                record=record.hash(),
                seconds=seconds,
            )
        )
        sent, received = self._around.endpoint.statistics().total
        before = self._usage
        self._usage = (sent, received)
        events.emit(LinkUsage(step=record.step, bytes_sent=sent - before[0], bytes_received=received - before[1]))

    # --- names ---------------------------------------------------------------------------------------------------

    def name_of(self, peer: str) -> str:
        """The name a peer gave itself, its id when it is not in the roster."""
        if self._history.next_step and peer in self._member.roster:
            return self._member.roster[peer].name
        return peer

    def describe(self, error: BaseException) -> str:
        """A peer's failure, with its name."""
        if isinstance(error, PeerError) and error.peer:
            name = self.name_of(error.peer)
            who = error.peer if name == error.peer else f"{name} ({error.peer})"
            return f"{who} failed: {error.code}, {error.reason}"
        return str(error)

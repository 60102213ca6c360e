"""What a peer does besides being a member: hold a stage, train with its own data, or neither.

A role is built when the genesis record says which part this peer holds, and follows the run from step to step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.columns import becomes, columns_of, takes
from swarm.compression.registry import codec_named
from swarm.config import Manifest
from swarm.consensus.faults import HopFault, auditors
from swarm.consensus.records import CloseRecord, CodecPair, Contribution
from swarm.consensus.roster import HowToJoin, Roster, join_words
from swarm.device import Device
from swarm.errors import Advice, ConfigError, Ending, RunEnded, WrongStep
from swarm.events import EventSink
from swarm.health.watch import HealthWatch
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.membership.admission import AdmissionService
from swarm.membership.gate import CallGate
from swarm.membership.part_memory import Checkpointing, GraphMemory
from swarm.membership.rules import codec_rules, most_loss
from swarm.models.registry import family_of
from swarm.models.spec import token_spec
from swarm.network.protocols import Endpoint
from swarm.optim.part import TrainedPart
from swarm.optim.swapped_part import Home
from swarm.pipeline.batch import BatchSource
from swarm.pipeline.boundary import BoundarySpecs, CodecsAcross, StepCodecs
from swarm.pipeline.compute import Bounds, EndsCompute, StageCompute
from swarm.pipeline.retention import RETENTION_BYTES
from swarm.pipeline.seals import Seals
from swarm.pipeline.stage.admission import Participants, StageContext, StageSettings
from swarm.pipeline.stage.server import StageServer
from swarm.pipeline.stage.shared import SharedServer
from swarm.pipeline.trainer.audits import Audits, HopClaim
from swarm.pipeline.trainer.flight import EarlyRules, InFlight
from swarm.pipeline.trainer.held_out import HeldOut, HeldOutRows
from swarm.pipeline.trainer.journey import FinishedJourney, JourneyContext
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.pipeline.trainer.trainer import Trainer
from swarm.pipeline.wiring import Wiring
from swarm.planning.costs import (
    graph_bytes,
    most_in_flight,
)
from swarm.schema import AFTER_CHARS
from swarm.security.credentials import Credential
from swarm.security.signing import PrivateIdentity, verify
from swarm.security.statements import AuditStatement
from swarm.state.frozen import ModelFiles
from swarm.step.member.remote_leader import RemoteLeader
from swarm.step.messages import SignedReceipt

logger = logging.getLogger(__name__)

LATE = "it was late for the close before"
"""Why trainers try a replica with one microbatch first."""


async def _reachable(through: Sequence[PeerId]) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContext:
    """What every role of a peer works with. ``be_reachable`` sees to it that others can call this peer, through
    some of those given where it must be; what is in the way, "" when nothing is. ``source`` is a trainer's data,
    ``held_out`` what it measures the loss of, ``how_to_join`` what people are told who must find somebody,
    ``files`` what this machine has of the model, ``activation_checkpointing`` and ``deferred_weights`` this peer's
    own choices. ``chance`` draws, from 0 to 1, what is audited. ``admission`` decides what others may call, and has
    what admits this peer, in a run that not everybody may join. ``siblings`` are in this process,
    now; ``home`` is where parts are that take turns on the device with this one."""

    manifest: Manifest
    identity: PrivateIdentity
    endpoint: Endpoint
    device: Device
    events: EventSink
    clock: Clock
    watch: HealthWatch
    be_reachable: Callable[[Sequence[PeerId]], Awaitable[str]] = _reachable
    source: BatchSource | None = None
    held_out: HeldOutRows | None = None
    how_to_join: HowToJoin = join_words
    files: ModelFiles = ModelFiles()
    activation_checkpointing: Checkpointing = "auto"
    deferred_weights: bool = True
    admission: AdmissionService | None = None
    chance: Callable[[], float] = random.SystemRandom().random
    siblings: Collection[PeerId] = ()
    home: Home | None = None

    @property
    def gate(self) -> CallGate | None:
        """Return what decides who may call; None where anybody may."""
        return None if self.admission is None else self.admission.gate

    @property
    def credential(self) -> Credential | None:
        """Return what admits this peer; None where nothing has to."""
        return None if self.gate is None else self.gate.credential

    def boundary(self, behind: int, ahead: int) -> BoundarySpecs:
        """Return what crosses stage boundaries in this run, seen by who holds what lies between these two; those of a
        trainer with private ends are the last and the first."""
        model, size, rules = self.manifest.model, self.manifest.batch.microbatch_size, codec_rules(self.manifest)
        forward, backward = codecs_named([rules.first])[0]
        return BoundarySpecs(
            activation=rules.activation,
            tokens=token_spec(size, model.context),
            codec=forward,
            back=backward,
            steps=StepCodecs(behind, ahead, codecs_named(rules.possible)) if rules.recorded else None,
            hosted=self.manifest.split.ends == "hosted",
            packed=self.manifest.batch.packing == "documents",
            counted=family_of(model).balances,
        )


def codecs_named(pairs: Iterable[CodecPair]) -> list[CodecsAcross]:
    """The codecs of boundaries, by their names."""
    return [(codec_named(forward), codec_named(backward)) for forward, backward in pairs]


def open_boundary(manifest: Manifest, specs: BoundarySpecs, record: CloseRecord) -> None:
    """Have the step after this record use the codecs that it names, where records do."""
    if specs.steps is not None:
        specs.steps.open_step(record.step + 1, codecs_named(codec_rules(manifest).of(record)))


def journeys_of_a_trainer(specs: BoundarySpecs) -> int:
    """Return how many a trainer may have under way; see :func:`~swarm.planning.costs.most_in_flight`."""
    return most_in_flight(specs.activation_bytes + specs.gradient_bytes, RETENTION_BYTES)


def open_bounds(manifest: Manifest, bounds: Bounds, part: TrainedPart, record: CloseRecord) -> None:
    """Bound work of the step after this record, where the manifest says so, by what is usual; of a stage that has just
    parted from others, by what was of all of them."""
    if influence := manifest.optimizer.influence:
        name = part.spec.name
        usual = (lengths for one, lengths in record.usual.items() if name in (one, *becomes(PartName(one))))
        bounds.open(record.step, next(usual, (0.0, 0.0)), influence)


def _participants(roster: Roster, part: PartName) -> Participants:
    """Return who takes part, as a replica of a part sees it: where organisations keep parts to themselves, only
    trainers whose microbatches pass it."""
    unfed = set(roster.trainers).difference(roster.fed(roster.trainers))
    feeding = [peer for peer in roster.trainers if not roster.owners or takes(part, roster[peer].choice)]
    return Participants.of(feeding, roster.columns(), roster.borders, unfed, roster.variants)


class StageRole:
    """Hosts one replica of a stage."""

    def __init__(self, around: PeerContext, part: TrainedPart, roster: Roster) -> None:
        self.part, self._around, self._manifest = part, around, around.manifest
        self._specs, self._bounds = list[BoundarySpecs](), list[Bounds]()
        most = journeys_of_a_trainer(around.boundary(0, 1))
        self._memory = GraphMemory(around, part, around.activation_checkpointing, journeys=most)
        self._memory.follow(roster)
        under_way = max(64, 16 * len(roster.trainers), min(most, self._memory.fits))
        mode = self._manifest.averaging.mode
        self._keeps_graphs = around.home is None  # else the part may be elsewhere by the time of the backward
        defers = around.deferred_weights and self._keeps_graphs
        self._defers = defers and mode == "sync" and not self._manifest.speed.overlaps
        part.defer_weight_gradients(self._defers)
        stages = columns_of(part.spec.name)
        servers = [self._server(stage, len(stages), under_way, roster) for stage in stages]
        self.service = servers[0] if len(servers) == 1 else SharedServer(servers)

    def _server(self, stage: int, of: int, under_way: int, roster: Roster) -> StageServer:
        """Return what serves one of the stages, ``of`` so many, in which this replica may stand."""
        around, manifest, part = self._around, self._manifest, self.part
        specs, hop = around.boundary(stage, stage + 1), stage if of > 1 else 0
        settings = StageSettings(
            run=manifest.run_id,
            seed=manifest.run.seed + hop,  # stages that share layers drop other elements
            part=part.spec.name,
            stage=stage,
            stages=manifest.split.stages,
            specs=specs,
            max_queue=under_way,
            max_under_way=under_way,
            max_fed=2 * manifest.step_microbatches,
            retention_bytes=RETENTION_BYTES // of,
            ahead=manifest.speed.overlaps,
            deferred_bytes=self._memory.deferrable() // of if self._defers else 0,
            mixture=family_of(manifest.model).mixture,
            hop=hop,
            keeps_graphs=self._keeps_graphs,
        )
        compute = StageCompute(around.device.place(part), specs, around.device.torch_device)
        compute.most_loss = most_loss(manifest)
        self._specs.append(specs)
        self._bounds.append(compute.bounds)
        context = StageContext(
            endpoint=around.endpoint,
            device=around.device,
            compute=compute,
            sign=around.identity.sign,
            seals=Seals(manifest.run_id, around.identity.sign, verify),
            events=around.events,
            clock=around.clock,
        )
        return StageServer(settings, context, _participants(roster, part.spec.name))

    def opened(self, record: CloseRecord) -> None:
        """The step after this record is open."""
        roster, after = record.members, record.hash()[:AFTER_CHARS]
        for specs, bounds in zip(self._specs, self._bounds, strict=True):
            open_boundary(self._manifest, specs, record)
            open_bounds(self._manifest, bounds, self.part, record)
        there = _participants(roster, self.part.spec.name)
        self.service.open_step(record.step + 1, there, after, record.previous[:AFTER_CHARS])
        self._memory.follow(roster)

    @property
    def expected_graphs(self) -> tuple[int, int]:
        """Return how many graphs there may be at a time, and about how many bytes one has."""
        return self._memory.expected

    async def run(self) -> None:
        """Compute, until cancelled."""
        await self.service.run()


class TrainerRole:
    """Feeds microbatches of its own shard; with private ends it also trains embedding and head."""

    def __init__(
        self, around: PeerContext, part: TrainedPart | None, roster: Roster, source: BatchSource, in_flight: int | None
    ) -> None:
        manifest, specs = around.manifest, around.boundary(around.manifest.split.stages, 0)
        self.part, self._peer, self._manifest, self._specs = part, around.endpoint.peer, manifest, specs
        self._clock, self._roster = around.clock, roster
        size = manifest.batch.microbatch_size
        graph = 0 if part is None else graph_bytes(manifest.model, part.spec, size)
        at_once = min(manifest.step_microbatches, in_flight or journeys_of_a_trainer(specs))
        self.expected_graphs = (at_once if graph else 0, graph)
        self._siblings = around.siblings
        stages = self._replicas(roster)
        self._wiring = Wiring(stages, seed=int(source.shard, 16) ^ manifest.run.seed)
        ends = None if part is None else EndsCompute(around.device.place(part), specs, around.device.torch_device)
        self._bounds = None if ends is None else ends.bounds
        if ends is not None:
            ends.most_loss = most_loss(manifest)
        context = JourneyContext(
            seed=manifest.run.seed,
            target=manifest.step_microbatches,
            early=EarlyRules(
                share=manifest.speed.early_share if manifest.speed.overlaps else 0.0,
                target=manifest.step_microbatches,
                last=manifest.run.steps,
                exact=manifest.run.reproducible,
            ),
            stages=len(stages),
            endpoint=around.endpoint,
            device=around.device,
            specs=specs,
            ends=ends,
            replicas=ReplicaChoice(
                wiring=self._wiring,
                gone=lambda: around.watch.gone.keys(),
                doubted=lambda: around.watch.doubted,
                choices=source.choices,
            ),
            events=around.events,
            clock=around.clock,
            seals=Seals(manifest.run_id, around.identity.sign, verify),
            suspect=around.watch.suspect,
            most_loss=most_loss(manifest),
            audits=self._audits(around),
        )
        self._held_out = None if around.held_out is None else HeldOut(context, around.held_out)
        self.service = Trainer(
            context,
            source,
            in_flight=InFlight(self._wiring, len(roster.trainers), most=journeys_of_a_trainer(specs), fixed=in_flight),
        )

    def _replicas(self, roster: Roster) -> tuple[tuple[PeerId, ...], ...]:
        """Return who computes this trainer's microbatches, by stage: a sibling where one is there, so that nothing of
        them leaves this process, else whom the roster has."""
        stages = roster.columns(near=self._peer)
        return tuple(tuple(one for one in replicas if one in self._siblings) or replicas for replicas in stages)

    def _audits(self, around: PeerContext) -> Audits | None:
        """Return what has hops computed again, where the manifest says so."""
        if not around.manifest.verify.audit:
            return None
        return Audits(
            run=around.manifest.run_id,
            endpoint=around.endpoint,
            clock=around.clock,
            verify=verify,
            judges=lambda key, hop, peer: auditors(self._roster, key, hop, peer),
            share=around.manifest.verify.audit,
            gone=lambda: around.watch.gone.keys(),
            chance=around.chance,
            known={*self._roster.peers} - self._roster.since.keys(),
        )

    def opened(self, record: CloseRecord) -> None:
        """The step after this record is open, and our shard continues where the record says; its work is started by
        the step loop."""
        roster, cursor, after = record.members, record.cursors.get(self._peer), record.hash()[:AFTER_CHARS]
        self._roster = roster
        open_boundary(self._manifest, self._specs, record)
        if self._bounds is not None and self.part is not None:
            open_bounds(self._manifest, self._bounds, self.part, record)
        self._wiring.know_variants(roster.variants)
        self._wiring.know_links(codec_rules(self._manifest).link_seconds(record))
        follows, trainers = (after, record.previous[:AFTER_CHARS]), len(roster.trainers)
        if self._peer in roster.unfed:
            trainers = self._manifest.step_microbatches + 1  # so that it feeds nothing early
        stages = self._replicas(roster)
        with contextlib.suppress(ConfigError):  # another shard than last time: from its beginning
            self.service.open_step(record.step + 1, stages, trainers, cursor, follows, roster.since)
        if self._held_out is not None:
            self._held_out.open_step(record.step + 1, after)
        for stage, replicas in enumerate(stages):  # who was late may not have opened the step yet
            for peer in filter(record.late.__contains__, replicas):
                self._wiring.fail(stage, peer, now=self._clock.monotonic(), reason=LATE)

    async def run(self) -> None:
        """Nothing beside the steps but the loss of held-out rows, until cancelled."""
        try:
            await (asyncio.Event().wait() if self._held_out is None else self._held_out.run())
        finally:
            await self.service.close()

    async def feed(self, step: int, leader: RemoteLeader) -> None:
        """One step's work, until cancelled or the step is closed; see
        :meth:`swarm.pipeline.trainer.trainer.Trainer.feed`."""
        with contextlib.suppress(WrongStep):
            await self.service.feed(step, _Reports(leader))


class _Reports:
    """Translates a finished journey into the ledger's terms; the pipeline does not know the ledger."""

    def __init__(self, leader: RemoteLeader) -> None:
        self._leader = leader

    async def lease(self, step: int, wanted: int) -> int:
        return await self._leader.lease(step, wanted)

    async def wait_quota(self, step: int) -> None:
        await self._leader.wait_quota(step)

    async def set_aside(self, step: int, microbatch: MicrobatchId, reason: str) -> None:
        await self._leader.put_aside(step, microbatch, reason)

    async def accuse(self, claim: HopClaim, found: Sequence[AuditStatement]) -> None:
        fault = HopFault(
            **claim.key._asdict(),
            hop=claim.hop,
            accused=claim.accused,
            told=claim.receipt.digest,
            tokens=claim.receipt.tokens,
            receipt=claim.receipt.signature,
            statements=tuple(found),
        )
        await self._leader.accuse(fault)

    async def complete(self, journey: FinishedJourney) -> None:
        contribution = Contribution(
            microbatch=journey.key.microbatch,
            tokens=journey.tokens,
            loss_sum=journey.loss_sum,
            route=journey.route,
            early=journey.early,
            choice=journey.choice,
        )
        receipts = [SignedReceipt(digest=one.digest, signature=one.signature) for one in journey.receipts]
        await self._leader.complete(journey.key.step, contribution, tuple(receipts))


Role = StageRole | TrainerRole
"""What a peer does; a bootstrap has no role beside its membership."""


async def insist_on_being_reached(around: PeerContext, through: Sequence[PeerId]) -> None:
    """Who is named in a roster must be there for everybody in it. Raises RunEnded when nobody can call this peer."""
    problem = await around.be_reachable(through)
    if problem:
        raise RunEnded(
            f"other peers cannot connect to this one: {problem}",
            Ending.UNREACHABLE,
            check=Advice.PORT,
            remedy=Advice.RELAY,
        )

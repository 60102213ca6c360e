"""What a peer does besides being a member: hold a stage, train with its own data, or neither.

A role is built when the genesis record says which part this peer holds, and follows the run from step to step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from swarm.clock import Clock
from swarm.compression.registry import codec_named
from swarm.config import Manifest
from swarm.consensus.records import CloseRecord, CodecPair, Contribution
from swarm.consensus.roster import HowToJoin, Roster, join_words
from swarm.device import Device
from swarm.errors import Advice, ConfigError, Ending, RunEnded, StateError, WrongStep
from swarm.events import EventSink
from swarm.health.watch import HealthWatch
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.membership.rules import codec_rules, update_of
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec, token_spec
from swarm.network.protocols import Endpoint
from swarm.optim.part import TrainedPart
from swarm.pipeline.batch import BatchSource
from swarm.pipeline.boundary import BoundarySpecs, CodecsAcross, StepCodecs
from swarm.pipeline.compute import EndsCompute, StageCompute
from swarm.pipeline.stage.admission import Participants, StageContext, StageSettings
from swarm.pipeline.stage.server import StageServer
from swarm.pipeline.trainer.context import JourneyContext
from swarm.pipeline.trainer.journey import FinishedJourney
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.pipeline.trainer.taken import MAX_IN_FLIGHT, EarlyRules
from swarm.pipeline.trainer.trainer import Trainer
from swarm.pipeline.wiring import Wiring
from swarm.planning.costs import (
    RESIDUAL_BYTES,
    MemoryKind,
    apart_bytes,
    bytes_by_kind,
    graph_bytes,
    graphs_under_way,
    needs_checkpointing,
)
from swarm.schema import AFTER_CHARS
from swarm.security.signing import PrivateIdentity, verify
from swarm.state.frozen import ModelFiles
from swarm.step.member.remote_leader import RemoteLeader

logger = logging.getLogger(__name__)

Checkpointing = Literal["auto", "on", "off"]
"""Whether layers compute their activations again in the backward: ``auto`` where memory is short."""


DEFERRED_BYTES = 1 << 30
"""At most so much holds what backwards left to do for the gradients of weights."""


async def _reachable(through: Sequence[PeerId]) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContext:
    """What every role of a peer works with. ``be_reachable`` sees to it that others can call this peer, through some of
    those given where it must be; what is in the way, "" when nothing is. ``source`` is a trainer's data,
    ``how_to_join`` what people are told who must find somebody, ``files`` what this machine has of the model,
    ``activation_checkpointing`` and ``deferred_weights`` this peer's own choices."""

    manifest: Manifest
    identity: PrivateIdentity
    endpoint: Endpoint
    device: Device
    events: EventSink
    clock: Clock
    watch: HealthWatch
    be_reachable: Callable[[Sequence[PeerId]], Awaitable[str]] = _reachable
    source: BatchSource | None = None
    how_to_join: HowToJoin = join_words
    files: ModelFiles = ModelFiles()
    activation_checkpointing: Checkpointing = "auto"
    deferred_weights: bool = True

    def boundary(self, behind: int, ahead: int) -> BoundarySpecs:
        """What crosses stage boundaries in this run, seen by who holds what lies between these two; those of a trainer
        with private ends are the last and the first."""
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
        )


def codecs_named(pairs: Iterable[CodecPair]) -> list[CodecsAcross]:
    """The codecs of boundaries, by their names."""
    return [(codec_named(forward), codec_named(backward)) for forward, backward in pairs]


def open_boundary(manifest: Manifest, specs: BoundarySpecs, record: CloseRecord) -> None:
    """Have the step after this record use the codecs that it names, where records do."""
    if specs.steps is not None:
        specs.steps.open_step(record.step + 1, codecs_named(codec_rules(manifest).of(record)))


def spec_of(manifest: Manifest, name: PartName) -> PartSpec:
    """What a part of the run's model is made of. Raises StateError for one that the model does not have."""
    spec = next((spec for spec in family_of(manifest.model).parts(manifest.split) if spec.name == name), None)
    if spec is None:
        raise StateError(f"{name} is not a part of this run's model")
    return spec


MORE_MEMORY = "Join where there is more, allow this peer more where that is limited, or found a run with more stages."


class MemoryContext(Protocol):
    """A run, and the device on which a part of it is to be trained."""

    @property
    def manifest(self) -> Manifest:
        """The run's."""

    @property
    def device(self) -> Device:
        """With the memory that is free."""


def lacking_memory(around: MemoryContext, name: PartName) -> str:
    """Return what a part takes that this peer's memory does not hold, or its device's; "" for a part that fits.
    Blocking: some milliseconds."""
    manifest, device, spec = around.manifest, around.device.torch_device, spec_of(around.manifest, name)
    takes = sum(part_bytes(manifest, spec, apart=device.type != "cpu").values())
    if device.type == "cpu":
        wants = [(takes, around.device.free_memory(), "memory")]
    else:
        exact, overlap = manifest.run.reproducible, manifest.speed.overlaps
        apart = apart_bytes(manifest.model, spec, exact=exact, overlap=overlap)
        on_host = takes if device.type == "mps" else takes - apart  # Apple's GPU has no memory of its own
        wants = [(on_host, around.device.free_host_memory(), "memory")]
        wants.append((apart, around.device.free_memory(), f"memory of {device}"))
    for needed, free, what in wants:
        if needed > free:
            return f"training {name} takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {what} are free here"
    return ""


def check_memory(around: PeerContext, name: PartName) -> None:
    """Raises StateError for a part that this peer's memory does not hold. Blocking: some milliseconds."""
    if reason := lacking_memory(around, name):
        raise StateError(f"{reason}. {MORE_MEMORY}")


def part_bytes(manifest: Manifest, spec: PartSpec, *, apart: bool = False) -> dict[MemoryKind, int]:
    """What training a part takes in this run beside its activations, at most, by kind; see
    :func:`~swarm.planning.costs.bytes_by_kind`."""
    model, local = manifest.model, manifest.averaging.mode == "local"
    vectors, exact = len(update_of(manifest).vectors), manifest.run.reproducible
    cost = family_of(model).cost(spec, model.context)
    overlap = manifest.speed.overlaps
    each = bytes_by_kind(model, vectors=vectors, exact=exact, local=local, apart=apart, overlap=overlap)
    if manifest.averaging.feeds_back:
        each["gradients"] += RESIDUAL_BYTES
        each["round"] += RESIDUAL_BYTES
    return {kind: size * cost.parameters for kind, size in each.items()} | {"frozen": cost.frozen_held}


def part_training_bytes(manifest: Manifest, spec: PartSpec) -> int:
    """All of them together."""
    return sum(part_bytes(manifest, spec).values())


class GraphMemory:
    """How many graphs a stage may have at a time as the roster changes, of how many bytes, and whether they fit into
    the memory that is left, where its owner does not say how they are kept. What is left is looked up once, before
    there are any. Cost: a part is built without weights, some milliseconds."""

    def __init__(self, around: PeerContext, part: TrainedPart) -> None:
        manifest, device = around.manifest, around.device.torch_device
        self._part, self._microbatches, self._on = part, manifest.step_microbatches, False
        self._choice, self._under_way = around.activation_checkpointing, 1
        rows = manifest.batch.microbatch_size
        self._graph = graph_bytes(manifest.model, part.spec, rows)
        self._thrifty = graph_bytes(manifest.model, part.spec, rows, checkpointing=True)
        state = 4 * len(update_of(manifest).vectors) * part.layout.elements
        # The state is there; the rest of what training takes on the host is allocated later, on a GPU it is there, too.
        later = 0 if device.type == "cuda" else max(0, part_training_bytes(manifest, part.spec) - state)
        self._left = max(0, around.device.free_memory() - later)

    @property
    def expected(self) -> tuple[int, int]:
        """How many graphs there may be at a time, and the bytes of one as they are kept now."""
        return self._under_way, self._thrifty if self._on else self._graph

    def deferrable(self) -> int:
        """How many bytes gradients of weights that are computed later may hold: half of what graphs leave, at most
        DEFERRED_BYTES."""
        under_way, graph = self.expected
        return max(0, min(DEFERRED_BYTES, (self._left - under_way * graph) // 2))

    def follow(self, roster: Roster) -> None:
        """Have the part checkpoint activations from now on where this roster may bring it more graphs than fit."""
        name, at_once = self._part.spec.name, MAX_IN_FLIGHT * len(roster.trainers)
        under_way = graphs_under_way(self._microbatches, len(roster.replicas(name)), at_once)
        if self._part.spec.head:  # its backward follows each forward at once
            under_way = 1
        self._under_way, before = under_way, self._on
        short = needs_checkpointing(self._graph, under_way, self._left)
        self._on = short if self._choice == "auto" else self._choice == "on"
        self._part.checkpoint_activations(self._on)
        if self._on != before and self._choice == "auto":
            how = "are computed again in the backward" if self._on else "are kept for the backward again"
            figures = f"{under_way} graphs of {self._graph / 1e9:.2g} GB, {self._left / 1e9:.2g} GB are left"
            logger.info("%s: activations %s: %s", name, how, figures)


class StageRole:
    """Hosts one replica of a stage."""

    def __init__(self, around: PeerContext, part: TrainedPart, stage: int, roster: Roster) -> None:
        manifest, specs = around.manifest, around.boundary(stage, stage + 1)
        self.part, self._manifest, self._specs = part, manifest, specs
        self._memory = GraphMemory(around, part)
        self._memory.follow(roster)
        defers = around.deferred_weights and manifest.averaging.mode == "sync" and not manifest.speed.overlaps
        part.defer_weight_gradients(defers)
        settings = StageSettings(
            run=manifest.run_id,
            seed=manifest.run.seed,
            stage=stage,
            stages=manifest.split.stages,
            specs=specs,
            max_queue=max(32, 4 * len(roster.trainers)),
            max_under_way=max(64, 16 * len(roster.trainers)),
            ahead=manifest.speed.overlaps,
            deferred_bytes=self._memory.deferrable() if defers else 0,
        )
        context = StageContext(
            endpoint=around.endpoint,
            device=around.device,
            compute=StageCompute(around.device.place(part), specs, around.device.torch_device),
            sign=around.identity.sign,
            events=around.events,
            clock=around.clock,
        )
        self.service = StageServer(settings, context, Participants.of(roster.trainers, roster.stages()))

    def open_step(self, record: CloseRecord, after: str) -> None:
        """The step after this record, whose hash begins with ``after``, opens now."""
        roster = record.members
        open_boundary(self._manifest, self._specs, record)
        places = Participants.of(roster.trainers, roster.stages())
        self.service.open_step(record.step + 1, places, after, record.previous[:AFTER_CHARS])
        self._memory.follow(roster)

    @property
    def expected_graphs(self) -> tuple[int, int]:
        """How many graphs there may be at a time, and about how many bytes one has."""
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
        size = manifest.batch.microbatch_size
        graph = 0 if part is None else graph_bytes(manifest.model, part.spec, size)
        at_once = min(manifest.step_microbatches, in_flight or MAX_IN_FLIGHT)
        self.expected_graphs = (at_once if graph else 0, graph)
        stages = roster.stages()
        context = JourneyContext(
            run=manifest.run_id,
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
            ends=None if part is None else EndsCompute(around.device.place(part), specs, around.device.torch_device),
            replicas=ReplicaChoice(
                wiring=Wiring(stages, seed=int(source.shard, 16) ^ manifest.run.seed),
                gone=lambda: around.watch.gone.keys(),
                doubted=lambda: around.watch.doubted,
            ),
            events=around.events,
            clock=around.clock,
            verify=verify,
            suspect=around.watch.suspect,
        )
        self.service = Trainer(
            context,
            source,
            specs=specs,
            replicas=[len(replicas) for replicas in stages],
            trainers=len(roster.trainers),
            max_in_flight=in_flight,
        )

    def open_step(self, record: CloseRecord, after: str) -> None:
        """The step after this record, whose hash begins with ``after``, opens now, and our shard continues where the
        record says; its work is started by the step loop."""
        roster, cursor = record.members, record.cursors.get(self._peer)
        open_boundary(self._manifest, self._specs, record)
        follows, trainers = (after, record.previous[:AFTER_CHARS]), len(roster.trainers)
        with contextlib.suppress(ConfigError):  # another shard than last time: from its beginning
            self.service.open_step(record.step + 1, roster.stages(), trainers, cursor, follows, roster.since)

    async def run(self) -> None:
        """Nothing beside the steps, until cancelled."""
        try:
            await asyncio.Event().wait()
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

    async def complete(self, journey: FinishedJourney) -> None:
        contribution = Contribution(
            microbatch=journey.key.microbatch,
            tokens=journey.tokens,
            loss_sum=journey.loss_sum,
            route=journey.route,
            early=journey.early,
        )
        await self._leader.complete(journey.key.step, contribution, journey.receipts)


Role = StageRole | TrainerRole
"""What a peer does; a bootstrap has no role beside its membership."""


async def insist_on_being_reached(around: PeerContext, through: Sequence[PeerId]) -> None:
    """Who is named in a roster must be there for everybody in it. Raises RunEnded when nobody can call this peer."""
    problem = await around.be_reachable(through)
    if problem:
        raise RunEnded(
            f"others cannot call this peer: {problem}",
            Ending.UNREACHABLE,
            check=Advice.PORT,
            remedy=Advice.RELAY,
        )

"""Two replicas of each part of a model in one process, whose boundaries and averaging go through the product's own
codecs: what the benchmark ``compression-loss`` trains."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data_shards.source import ShardSource
from swarm.averaging.allreduce.plan import RoundKey, RoundResult
from swarm.averaging.allreduce.round import RoundCall, average, plan_rounds
from swarm.averaging.allreduce.service import AllReduce
from swarm.averaging.strategies import STRATEGIES
from swarm.compression.registry import codec_named
from swarm.events import NullSink
from swarm.ids import PartName, PeerId, RunId, StepWork, stage_of
from swarm.models.dropout import dropout_seed
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec, SplitConfig, token_spec
from swarm.optim.adamw import AdamW
from swarm.optim.clipping import clip_parts, factor
from swarm.optim.local_part import LocalPart, LocalRules
from swarm.optim.outer import Outer, OuterNesterov
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import learning_rate
from swarm.phases import complete
from swarm.pipeline.batch import Batch
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.compute import EndsCompute, Material, StageCompute
from swarm.sim.loop import LoopClock
from swarm.sim.network import SimNetwork
from swarm.state.snapshot import initial_snapshot
from tests.benchmarks._convergence_replicas import ROWS_AT_ONCE, Scale, Text
from tests.harness.rigs.common import inline

CPU = torch.device("cpu")
STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """What a run compresses: what crosses boundaries, both ways, and what is averaged. ``feedback``: whether what
    averaging rounds off is added to the next contribution, as the product does. ``nudged`` begins with one weight a
    last bit away. ``apart``: how many optimizer steps each replica takes alone between two averagings of deltas, in
    `local` mode; 0: gradients are averaged in every step."""

    boundaries: str = "float32"
    averaging: str = "float32"
    feedback: bool = True
    nudged: bool = False
    apart: int = 0


class Team:
    """Replica n of every part works on every ``replicas``-th microbatch. Made and used in a running loop."""

    def __init__(self, scale: Scale, text: Text, codecs: Codecs, seed: int) -> None:
        self._scale, self._text, self._codecs, self._seed = scale, text, codecs, seed
        family, update = family_of(scale.model), AdamW(scale.optimizer)
        boundary = codec_named(codecs.boundaries)
        self._specs = BoundarySpecs(
            activation=family.boundary(scale.rows, scale.model.context),
            tokens=token_spec(scale.rows, scale.model.context),
            codec=boundary,
            back=boundary,
            hosted=False,
        )
        weights = family.initial_weights(seed)
        if codecs.nudged:
            first = next(iter(weights.values())).view(-1)
            first[0] = torch.nextafter(first[0], torch.tensor(2.0))
        self._parts: dict[PartName, list[TrainedPart]] = {}
        for spec in family.parts(SplitConfig(stages=STAGES)):
            self._parts[spec.name] = [self._part(spec, update) for _ in scale.peers]
            for part in self._parts[spec.name]:
                part.install(initial_snapshot(spec.name, part.layout, weights))
        self._stages = [
            [StageCompute(part, self._specs, CPU) for part in parts]  # type: ignore[arg-type]
            for name, parts in self._parts.items()
            if stage_of(name) is not None
        ]
        self._ends = [EndsCompute(part, self._specs, CPU) for part in self._parts[PartName("ends")]]  # type: ignore[arg-type]
        self._sources = [
            ShardSource(path, trainer=peer, microbatch_size=scale.rows, context=scale.model.context)
            for peer, path in zip(scale.peers, text.shards, strict=True)
        ]
        self._network: dict[PartName, dict[PeerId, AllReduce]] = {}
        self.boundary_bytes = self.averaging_bytes = 0

    def _part(self, spec: PartSpec, update: AdamW) -> TrainedPart:
        scale, codecs = self._scale, self._codecs
        if not codecs.apart:
            return TrainedPart(spec, scale.model, update)
        rules = LocalRules(
            batch=1,  # of one replica: each takes a step for every microbatch
            tokens=scale.rows * scale.model.context,
            mix_after=codecs.apart,
            inner_steps=codecs.apart,
            steps=scale.steps // codecs.apart,
            optimizer=scale.optimizer,
            inner=update,
            outer=Outer(OuterNesterov()),
        )
        return LocalPart(spec, scale.model, rules)

    async def train(self, microbatches: int) -> float:
        """Take every step, of so many microbatches of each replica; the held-out loss, in nats a token. Apart, replicas
        meet after as many steps as they take alone: the same microbatches in all."""
        for name in self._parts:
            self._network[name] = await _services(self._scale.peers)
        together = self._codecs.apart or 1
        for step in range(1, self._scale.steps // together + 1):
            tokens = dict.fromkeys(self._scale.peers, 0)
            for _ in range(microbatches * together):
                for number, (peer, source) in enumerate(zip(self._scale.peers, self._sources, strict=True)):
                    tokens[peer] += self._microbatch(step, number, source.take())
            await self._close(step, tokens)
        return self.held_out_loss()

    def _microbatch(self, step: int, number: int, batch: Batch) -> int:
        """One journey through replica ``number`` of every part; returns its target tokens."""
        work, seed = StepWork(step, batch.id), dropout_seed(self._seed, batch.id)
        ends, stages = self._ends[number], [replicas[number] for replicas in self._stages]
        payload, embedded = ends.embed(batch.inputs, seed, work)
        went = []
        for stage in stages:
            self.boundary_bytes += memoryview(payload).nbytes
            output, graph = complete(stage.forward(payload, seed, work, first=stage is stages[0]))
            went.append((stage, payload, graph))
            payload = output
        _, tokens, gradient, head = ends.loss(payload, batch.targets, work)
        self.boundary_bytes += memoryview(payload).nbytes + gradient.nbytes
        for stage, given, graph in reversed(went):
            first = stage is stages[0]
            material = Material(work=work, seed=seed, first=first, input=given, gradient=gradient)
            back = complete(stage.contribute(material, graph, None)).gradient
            assert back is not None
            gradient = back
            self.boundary_bytes += gradient.nbytes
        ends.finish(embedded, gradient, head, work)
        return tokens

    async def _close(self, step: int, tokens: Mapping[PeerId, int]) -> None:
        """Average every part, clip all by one factor, and have all replicas take the step."""
        scale = self._scale
        found = {name: await self._averaged(name, step, tokens) for name in self._parts}
        # Apart, each has clipped its own gradients.
        most = math.inf if self._codecs.apart else scale.optimizer.clip_norm
        clipping = clip_parts({name: results[0].squared_norm for name, results in found.items()}, most)
        lr = learning_rate(scale.optimizer, step, scale.steps)
        for name, results in found.items():
            clip, digests = factor(clipping.clip, clipping.caps.get(name, 1.0)), set()
            for part, result in zip(self._parts[name], results, strict=True):
                digests.add(part.prepare(result.tensor, lr=lr, clip=clip, step=step, left=result.left))
                part.swap()
                if not self._codecs.feedback:
                    part.feedback.drop()
            if len(digests) > 1:
                raise AssertionError(f"replicas of {name} differ after step {step}")

    async def _averaged(self, name: PartName, step: int, tokens: Mapping[PeerId, int]) -> list[RoundResult]:
        parts, services = self._parts[name], self._network[name]
        call = RoundCall(
            key=RoundKey(step, name, 0),
            replicas=self._scale.peers,
            weights=tokens,
            elements=parts[0].layout.elements,
            timeout_s=60.0,
            codec=self._codecs.averaging,
        )
        jobs = (
            average(
                services[peer], plan_rounds(call, STRATEGIES["everyone"], peer), self._sum(part, tokens[peer]), SINK
            )
            for peer, part in zip(self._scale.peers, parts, strict=True)
        )
        results = list(await asyncio.gather(*jobs))
        self.averaging_bytes += sum(result.bytes_sent for result in results)
        return results

    def _sum(self, part: TrainedPart, tokens: int) -> Tensor:
        sums = part.contribution(part.step + 1, part.accumulated(part.step + 1), tokens)
        assert sums is not None
        return sums

    def held_out_loss(self) -> float:
        """Of the weights as they are, nothing on the way being rounded."""
        parts = [replicas[0] for name, replicas in self._parts.items() if stage_of(name) is not None]
        ends, total, count = self._parts[PartName("ends")][0], 0.0, 0
        for rows in self._text.held_out.split(ROWS_AT_ONCE):
            hidden, _ = ends.embed(rows[:, :-1])
            for part in parts:
                hidden, _ = part.forward(hidden, seed=None, graph=False)
            loss, tokens, _, _ = ends.loss(hidden, rows[:, 1:])
            total, count = total + loss, count + tokens
        return total / count


SINK = NullSink()


async def _services(peers: tuple[PeerId, ...]) -> dict[PeerId, AllReduce]:
    """A network of its own for the replicas of a part."""
    network, services = SimNetwork(LoopClock()), {}
    for peer in peers:
        endpoint = network.endpoint(peer)
        await endpoint.enter(RunId("0" * 64))
        services[peer] = AllReduce(endpoint, LoopClock(), run=inline)
        endpoint.mount(services[peer])
    return services

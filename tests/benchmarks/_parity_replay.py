"""The training of a swarm once more in one plain loop, with no swarm in it.

What is shared with the swarm is the model's code and the shards on disk. Batches, gradients, sums, norm, clipping,
schedule and optimizer are written here once more, in the fewest lines of PyTorch that say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peers.data.trainer_data import open_source
from swarm.columns import takes
from swarm.config import Manifest
from swarm.consensus.records import Contribution
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.models.balance import weighed
from swarm.models.dropout import dropout_seed
from swarm.models.layout import FlatLayout, install_weights
from swarm.models.lora import Stored, install_base
from swarm.models.packing import packed
from swarm.models.registry import family_of, steering
from swarm.models.strips import strips_of
from swarm.optim.accumulate import Accumulator
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import Snapshot, digest
from tests.benchmarks._parity_run import Incoherent, TrainedRun


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One committed microbatch as the loop sees it: int64 (B, T) tokens, the seed of its dropout, of packed rows the
    positions, and its choice of stages' variants."""

    id: MicrobatchId
    inputs: Tensor
    targets: Tensor
    seed: int
    positions: Tensor | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedStep:
    """Loss sum in nats of every microbatch in the ledger's order, their target tokens, and the
    digest of every part after the step."""

    loss_sums: tuple[float, ...]
    tokens: int
    digests: Mapping[str, str]

    @property
    def loss(self) -> float:
        """Nats per target token."""
        return math.fsum(self.loss_sums) / self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The steps, and the weights by name after the last."""

    steps: tuple[ReplayedStep, ...]
    weights: dict[str, Tensor]


def replay(run: TrainedRun, loop: ExactLoop) -> Replay:
    """Feed a loop what the ledger says was committed.

    Raises Incoherent when a shard does not hold what the ledger names.
    """
    steps, batches = [], Batches(run)
    with _one_thread():
        for record in run.records[1:]:
            done = loop.step(record.step, [batches.take(contribution) for contribution in record.committed])
            if done.tokens != record.tokens:
                raise Incoherent(f"step {record.step} has {done.tokens} target tokens, the record says {record.tokens}")
            steps.append(done)
    return Replay(tuple(steps), {name: weight.clone() for name, weight in loop.weights().items()})


class Batches:
    """The trainers' shards, opened once more: any microbatch of the ledger by its id."""

    def __init__(self, run: TrainedRun) -> None:
        self._run = run
        chosen = {one.microbatch.trainer: one.choice for record in run.records for one in record.committed}
        self._sources = {
            member.peer: open_source(
                run.manifest,
                run.directory.shard(int(member.name.removeprefix("trainer-"))),
                PeerId(member.peer),
                chosen.get(PeerId(member.peer)),
            )
            for member in run.records[0].members.members
            if member.role == "trainer"
        }

    def take(self, contribution: Contribution) -> Sample:
        """The microbatch of a contribution, read again. Raises Incoherent when that shard holds another one there."""
        wanted = contribution.microbatch
        source = self._sources[wanted.trainer]
        source.seek((wanted.epoch, wanted.position))
        batch = source.take()
        if (batch.id, batch.choice) != (wanted, contribution.choice):
            raise Incoherent(f"the ledger names {wanted}, the shard gives {batch.id} with choice {batch.choice}")
        seed = dropout_seed(self._run.manifest.run.seed, wanted)
        return Sample(batch.id, batch.inputs, batch.targets, seed, batch.positions, batch.choice)


class ExactLoop:
    """The reproducible run's numbers, bit for bit: for the same order-free sums and the same optimizer.

    Two things are the project's and not PyTorch's. Sums are float64 on a grid (:mod:`swarm.optim.accumulate`),
    because only sums without rounding are the same for every assignment of microbatches to replicas. And the step
    is :func:`swarm.optim.adamw.adamw_step`: ``torch.optim.AdamW`` rounds differently (it fuses multiplications
    and additions, differently from machine to machine), which bits cannot forgive.
    Everything else, the split, the wire, the ledger, the averaging, the norm and the schedule, is what is tested.
    """

    def __init__(self, manifest: Manifest, files: Path | None = None, base: Mapping[str, Stored] | None = None) -> None:
        """``files`` are the model's, ``base`` the frozen weights of a run that trains adapters."""
        self._config, self._steps, self._rate = manifest.optimizer, manifest.run.steps, steering(manifest.model)
        family = family_of(manifest.model)
        self._model = family.build(family.whole)
        self._layout = family.layout(self._model)
        cpu = (torch.device("cpu"),)
        self._strips = strips_of(self._model, self._layout, family.tensor_plan, manifest.split.tensor, cpu)
        weights = family.initial_weights(manifest.run.seed, files=files)
        self._parts = {
            spec.name: _PartLoop.of(spec.name, family.layout(family.build(spec)), weights)
            for spec in family.parts(manifest.split)
        }
        if base is not None:
            install_base(self._model, base, torch.device("cpu"))

    def step(self, number: int, samples: Sequence[Sample]) -> ReplayedStep:
        """One optimizer step, counted from 1, on all these microbatches, whose order must not matter. Each has a model
        of its own, where stages have variants: those that it passes, which alone learn from it."""
        loss_sums, tokens = [], 0
        for sample in samples:
            self._install(self.weights(sample.choice))
            with packed(sample.positions), weighed(int((sample.targets >= 0).sum())):
                total, count = self._model.loss(self._model(sample.inputs, sample.seed), sample.targets)
            named = self._model.trained_of()
            gradients = self._whole(dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True)))
            for part in self._passed(sample.choice):
                part.sum.add(sample.id, [(name, gradients[name]) for name in part.names])
                part.tokens += count
            loss_sums.append(total.item())
            tokens += count
        fed = {name: part for name, part in self._parts.items() if part.tokens and part.names}
        means = {name: part.mean() for name, part in fed.items()}
        clip = clip_factor([float(mean.double().square().sum()) for mean in means.values()], self._config.clip_norm)
        numbers = StepNumbers(step=number, lr=scheduled_lr(self._config, number, self._steps), clip=clip)
        for name, part in fed.items():  # the others stay as they are
            after = adamw_step(part.state, means[name], part.layout, self._config, numbers)
            part.state = self._steered(part, means[name], after)
        digests = {str(name): part.closed(number) for name, part in self._parts.items()}
        return ReplayedStep(tuple(loss_sums), tokens, digests)

    def _steered(self, part: _PartLoop, mean: Tensor, after: AdamWState) -> AdamWState:
        """Take back what the optimizer made of counts of tokens, and steer by them: who has less than the mean gets the
        rate more."""
        for slot in part.layout.slots:
            if slot.name not in part.layout.steered | part.layout.told:
                continue
            place = slice(slot.offset, slot.offset + slot.elements)
            for vector, before in zip(after, part.state, strict=True):
                vector[place] = before[place]
            if slot.name in part.layout.steered:
                counts = mean[place].double()
                after.params[place] += torch.sign(counts.mean() - counts).float() * self._rate
        return after

    def _install(self, weights: Mapping[str, Tensor]) -> None:
        if self._strips is None:
            install_weights(self._model, weights, requires_grad=True)
        else:
            self._strips.install(self._model, weights)

    def _whole(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of whole tensors, of a run that computes layers in strips, too: one process, one device."""
        if self._strips is None:
            return gradients
        wholes = self._layout.views(torch.zeros(self._layout.elements))
        self._strips.add_into(wholes, gradients.items())
        return wholes

    def _passed(self, choice: int) -> list[_PartLoop]:
        return [part for name, part in self._parts.items() if takes(name, choice)]

    def weights(self, choice: int = 0) -> dict[str, Tensor]:
        """Parameters by name, of the parts that a choice leads to; not to be written to."""
        views = [part.layout.views(part.state.params) for part in self._passed(choice)]
        return {name: weight for part in views for name, weight in part.items()}


@dataclass(slots=True, eq=False)
class _PartLoop:
    """A part, or one variant of a stage: its state, and what is added up of a step, with the target tokens of that."""

    name: PartName
    layout: FlatLayout
    state: AdamWState
    sum: Accumulator
    tokens: int = 0

    @staticmethod
    def of(name: PartName, layout: FlatLayout, weights: Mapping[str, Tensor]) -> _PartLoop:
        """Return a part with these initial weights."""
        params = layout.flatten({slot.name: weights[slot.name] for slot in layout.slots})
        state = AdamWState(params, torch.zeros_like(params), torch.zeros_like(params))
        return _PartLoop(name, layout, state, Accumulator(layout, "float64", torch.device("cpu")))

    @property
    def names(self) -> list[str]:
        """Return those of its parameters."""
        return [slot.name for slot in self.layout.slots]

    def mean(self) -> Tensor:
        """Return the gradient of a target token of those that passed it."""
        return torch.from_numpy((self.sum.total.numpy() / float(self.tokens)).astype(np.float32))

    def closed(self, number: int) -> str:
        """Forget what was added up. Return what the close record says: parameters and both moments."""
        self.sum.reset()
        self.tokens = 0
        vectors = (self.state.params, self.state.exp_avg, self.state.exp_avg_sq)
        return digest(Snapshot(part=self.name, step=number, layout=self.layout, vectors=vectors))


def clip_factor(squares: Iterable[float], clip_norm: float) -> float:
    """What shortens a gradient to ``clip_norm``, given the squared norms of its parts; the same epsilon as torch's."""
    return min(1.0, clip_norm / (math.sqrt(math.fsum(squares)) + 1e-6))


def scheduled_lr(config: OptimizerConfig, step: int, steps: int) -> float:
    """Linear warm-up to the peak, then a cosine to a fraction of it at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    floor = config.min_lr_fraction
    return config.lr * (floor + (1.0 - floor) * (0.5 * (1.0 + math.cos(math.pi * done))))


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread, as the peers have: kernels cut their work, and so round, by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

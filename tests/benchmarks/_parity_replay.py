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
from swarm.config import Manifest
from swarm.consensus.records import Contribution
from swarm.ids import MicrobatchId, PeerId
from swarm.models.dropout import dropout_seed
from swarm.models.layout import install_weights
from swarm.models.lora import Stored, install_base
from swarm.models.packing import packed
from swarm.models.registry import family_of
from swarm.optim.accumulate import Accumulator
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import Snapshot, digest
from tests.benchmarks._parity_run import Incoherent, TrainedRun


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One committed microbatch as the loop sees it: int64 (B, T) tokens, the seed of its dropout, and of packed rows
    the positions."""

    id: MicrobatchId
    inputs: Tensor
    targets: Tensor
    seed: int
    positions: Tensor | None = None


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
        self._sources = {
            member.peer: open_source(
                run.manifest,
                run.directory.shard(int(member.name.removeprefix("trainer-"))),
                PeerId(member.peer),
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
        if batch.id != wanted:
            raise Incoherent(f"the ledger names {wanted}, the shard gives {batch.id}")
        seed = dropout_seed(self._run.manifest.run.seed, wanted)
        return Sample(batch.id, batch.inputs, batch.targets, seed, batch.positions)


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
        self._manifest, self._config, self._steps = manifest, manifest.optimizer, manifest.run.steps
        family = family_of(manifest.model)
        self._model = family.build(family.whole)
        self._layout = family.layout(self._model)
        params = self._layout.flatten(family.initial_weights(manifest.run.seed, files=files))
        self._state = AdamWState(params, torch.zeros_like(params), torch.zeros_like(params))
        self._sum = Accumulator(self._layout, "float64", torch.device("cpu"))
        if base is not None:
            install_base(self._model, base, torch.device("cpu"))
        install_weights(self._model, self._layout.views(params), requires_grad=True)

    def step(self, number: int, samples: Sequence[Sample]) -> ReplayedStep:
        """One optimizer step, counted from 1, on all these microbatches, whose order must not matter."""
        named = self._model.trained_of()
        loss_sums, tokens = [], 0
        for sample in samples:
            with packed(sample.positions):
                total, count = self._model.loss(self._model(sample.inputs, sample.seed), sample.targets)
            gradients = torch.autograd.grad(total, list(named.values()))
            self._sum.add(sample.id, list(zip(named, gradients, strict=True)))
            loss_sums.append(total.item())
            tokens += count
        mean = torch.from_numpy((self._sum.total.numpy() / float(tokens)).astype(np.float32))
        clip = clip_factor([float(mean.double().square().sum())], self._config.clip_norm)
        numbers = StepNumbers(step=number, lr=scheduled_lr(self._config, number, self._steps), clip=clip)
        self._state = adamw_step(self._state, mean, self._layout, self._config, numbers)
        install_weights(self._model, self._layout.views(self._state.params), requires_grad=True)
        self._sum.reset()
        return ReplayedStep(tuple(loss_sums), tokens, self._digests(number))

    def weights(self) -> dict[str, Tensor]:
        """Parameters by name; not to be written to."""
        return self._layout.views(self._state.params)

    def _digests(self, number: int) -> dict[str, str]:
        """What the close record says about every part of the cut model: parameters and both moments."""
        state = self._state
        params, exp_avg, exp_avg_sq = map(self._layout.views, (state.params, state.exp_avg, state.exp_avg_sq))
        digests = {}
        for spec in family_of(self._manifest.model).parts(self._manifest.split):
            layout = family_of(self._manifest.model).layout(family_of(self._manifest.model).build(spec))
            snapshot = Snapshot(
                part=spec.name,
                step=number,
                layout=layout,
                vectors=tuple(layout.flatten(one) for one in (params, exp_avg, exp_avg_sq)),
            )
            digests[str(spec.name)] = digest(snapshot)
        return digests


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

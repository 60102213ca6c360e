"""A run of which each step's first microbatches are computed one state too early: what the benchmark ``delay`` trains.

One process does what replicas of `overlap` do: before step c is taken, and so with the state after step c - 1, it
computes the early microbatches of step c + 1; with the state after step c the rest of them. Parts, sums, clipping and
optimizers are the product's. What is computed with one state goes through the model in one pass: the gradient is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data_shards.shard import Shard
from data_shards.source import ShardSource
from swarm.ids import StepWork
from swarm.membership.rules import optimizer_of
from swarm.models.layout import install_weights, refresh_weights
from swarm.models.passes import Gradients, run_backward, run_loss
from swarm.models.registry import family_of
from swarm.optim.accumulate import Accumulator
from swarm.optim.clipping import clip_parts
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig, learning_rate
from swarm.optim.update import StepNumbers
from swarm.state.snapshot import initial_snapshot
from tests.benchmarks._convergence_replicas import ROWS_AT_ONCE, Scale, Text

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Of each step's microbatches ``early``, never all, are computed one state too early, the first step's excepted;
    with ``ahead`` at where the optimizer's own look-ahead puts that state."""

    early: int = 0
    ahead: bool = False


class DelayedRun:
    """One model, with the optimizer and text of ``scale``, whose ``rows`` are a step's microbatches, of a row each."""

    def __init__(self, scale: Scale, optimizer: OptimizerConfig, delay: Delay, text: Text, seed: int) -> None:
        family = family_of(scale.model)
        self._scale, self._optimizer, self._delay, self._text = scale, optimizer, delay, text
        self._update = optimizer_of(optimizer)
        self._part = TrainedPart(family.whole, scale.model, self._update)
        self._layout = self._part.layout
        self._part.install(initial_snapshot(family.whole.name, self._layout, family.initial_weights(seed)))
        self._early = Accumulator(self._layout, "float32", _CPU)
        self._module, self._params = family.build(family.whole), torch.zeros(self._layout.elements)
        install_weights(self._module, self._layout.views(self._params), requires_grad=True)
        self._source = ShardSource(
            text.shards[0], trainer=scale.peers[0], microbatch_size=1, context=scale.model.context
        )

    @property
    def params(self) -> Tensor:
        """The newest parameters, flat."""
        return self._part.snapshot().params

    def train(self) -> float:
        """Take all steps. Returns :meth:`held_out_loss`."""
        for _ in range(self._scale.steps):
            self.step()
        return self.held_out_loss()

    def step(self) -> None:
        """Take one step, and begin the one after it meanwhile."""
        scale, step = self._scale, self._part.step + 1
        self._compute_rest()
        total = self._part.gradient_sum().add_(self._early.total)
        self._early.reset()
        lr = learning_rate(self._optimizer, step, scale.steps)
        if self._delay.early and step < scale.steps:
            self._compute_early()
        mean = total.mul_(1.0 / (scale.rows * scale.model.context))
        norms = {self._part.spec.name: float(mean.double().square().sum())}
        self._part.prepare(mean, lr=lr, clip=clip_parts(norms, self._optimizer.clip_norm).clip, step=step)
        self._part.swap()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats a token on the held-out rows, of the newest parameters."""
        total, counted = 0.0, 0
        for rows in self._text.held_out.split(ROWS_AT_ONCE):
            loss, count, _ = self._part.forward_loss(rows[:, :-1], rows[:, 1:], seed=None, graph=False)
            total, counted = total + loss, counted + count
        return total / counted

    def _compute_rest(self) -> None:
        begun = self._delay.early if self._early.work else 0
        first, inputs, targets = self._take(self._scale.rows - begun)
        _, _, graph = self._part.forward_loss(inputs, targets, seed=None)
        assert graph is not None
        self._part.accumulate(first, self._part.backward(graph, None)[1])

    def _compute_early(self) -> None:
        first, inputs, targets = self._take(self._delay.early)
        if not self._delay.ahead:
            _, _, graph = self._part.forward_loss(inputs, targets, seed=None)
            assert graph is not None
            self._early.add(first, self._part.backward(graph, None)[1])
            return
        self._look_ahead()
        self._early.add(first, self._gradients_ahead(inputs, targets))

    def _look_ahead(self) -> None:
        step = self._part.step
        numbers = StepNumbers(step=step, lr=learning_rate(self._optimizer, step, self._scale.steps), clip=1.0)
        self._update.look_ahead(self._part.snapshot().vectors, self._layout, numbers, self._params, _CPU)
        refresh_weights(self._module, self._layout.views(self._params))

    def _gradients_ahead(self, inputs: Tensor, targets: Tensor) -> Gradients:
        _, _, graph = run_loss(self._module, inputs, targets, seed=None, graph=True)
        assert graph is not None
        return run_backward(graph, None)[1]

    def _take(self, count: int) -> tuple[StepWork, Tensor, Tensor]:
        """The next microbatches as one: what counts of it, inputs and targets (count, context)."""
        taken = [self._source.take() for _ in range(count)]
        work = StepWork(self._part.step + 1, taken[0].id)
        return work, torch.cat([one.inputs for one in taken]), torch.cat([one.targets for one in taken])


def unigram_loss(text: Text, vocab_size: int) -> float:
    """Nats a token on the held-out rows, of who knows only how often each token is in the text that is trained on."""
    tokens = np.asarray(Shard.open(text.shards[0]).tokens, dtype=np.int64)
    counts = np.bincount(tokens, minlength=vocab_size) + 1.0
    costs = -np.log(counts / counts.sum())
    return float(costs[text.held_out[:, 1:].numpy()].mean())

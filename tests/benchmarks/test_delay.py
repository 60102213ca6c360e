"""What the benchmark ``delay`` compares: early microbatches see the state before, the others the newest one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_shards.source import ShardSource
from peers.data.text import Corpus
from swarm.membership.rules import optimizer_of
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.passes import run_backward, run_loss
from swarm.models.registry import family_of
from swarm.optim.clipping import clip_factor
from swarm.optim.schedules import OptimizerConfig, learning_rate
from swarm.optim.update import StepNumbers, Vectors, stepped
from tests.benchmarks import delay
from tests.benchmarks._convergence_replicas import Scale, Text, make_text
from tests.benchmarks._delay_run import Delay, DelayedRun, unigram_loss
from tests.benchmarks.delay import Losses, to_result

CPU = torch.device("cpu")
SCALE = Scale(
    model=GptConfig(vocab_size=300, dim=16, layers=1, heads=2, context=16),
    optimizer=OptimizerConfig(warmup_steps=2, lr=1e-2),
    replicas=1,
    rows=5,
    steps=4,
    held_out_rows=3,
)
MUON = OptimizerConfig(name="muon", warmup_steps=2, lr=1e-2)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    documents = tuple(f"Document {number}: {'word ' * 20}{number * 7919} ends." for number in range(60))
    return make_text(tmp_path, Corpus("made up", documents), SCALE, seed=0)


def by_hand(text: Text, optimizer: OptimizerConfig, delay: Delay) -> Tensor:
    """The same as :class:`DelayedRun`, from its definition: the gradient of each row at the state that is its own."""
    family, update = family_of(SCALE.model), optimizer_of(optimizer)
    module = family.build(family.whole)
    layout = family.layout(module).kept_by(update.vectors)
    start = layout.flatten(family.initial_weights(1))
    states: list[Vectors] = [(start, *(torch.zeros_like(start) for _ in update.vectors[1:]))]
    source = ShardSource(text.shards[0], trainer=SCALE.peers[0], microbatch_size=1, context=SCALE.model.context)

    def rate(step: int) -> float:
        return learning_rate(optimizer, step, SCALE.steps)

    for step in range(1, SCALE.steps + 1):
        total = torch.zeros_like(start)
        for row in range(SCALE.rows):
            params, early = states[step - 1][0], step > 1 and row < delay.early
            if early:
                params = states[step - 2][0].clone()
            if early and delay.ahead:
                numbers = StepNumbers(step=step - 2, lr=rate(step - 2), clip=1.0)
                update.look_ahead(states[step - 2], layout, numbers, params, CPU)
            install_weights(module, layout.views(params), requires_grad=True)
            batch = source.take()
            graph = run_loss(module, batch.inputs, batch.targets, seed=None, graph=True)[2]
            assert graph is not None
            total += layout.flatten(dict(run_backward(graph, None)[1]))
        mean = total / (SCALE.rows * SCALE.model.context)
        clip = clip_factor(float(torch.linalg.vector_norm(mean)), optimizer.clip_norm)
        plan = update.plan(states[-1], mean, layout, StepNumbers(step=step, lr=rate(step), clip=clip), CPU)
        states.append(stepped(plan, states[-1]))
    return states[-1][0]


@pytest.mark.parametrize("optimizer", [SCALE.optimizer, MUON], ids=["adamw", "muon"])
def test_each_row_is_computed_with_its_own_state(text: Text, optimizer: OptimizerConfig) -> None:
    delays = [Delay(), Delay(early=2), Delay(early=2, ahead=True), Delay(early=4)]
    found = []
    for each in delays:
        run = DelayedRun(SCALE, optimizer, each, text, seed=1)
        loss = run.train()
        assert unigram_loss(text, SCALE.model.vocab_size) < loss < math.log(SCALE.model.vocab_size)
        found.append(run.params)
        assert torch.allclose(run.params, by_hand(text, optimizer, each), rtol=1e-3, atol=2e-5), each
    for number, one in enumerate(found):
        for other in found[:number]:
            assert (one - other).abs().max() > 1e-3


def test_figures_are_differences_within_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay, "OVERLAP_STEP_S", delay.SYNC_STEP_S / 2)
    overlap = {case: [2.01, 4.02] if case == "20_ahead" else [2.2, 4.4] for case in delay.CASES}
    losses = Losses(sync=[2.0, 4.0], sync_in_time=[2.1, 4.2], overlap=overlap)
    result = to_result(replace(SCALE, steps=100), {"adamw": losses, "muon": losses}, unigram=5.0)
    assert result.summary.keys() == set(delay.KEYS)
    assert result.summary["steps_in_equal_time"] == 50
    assert result.summary["worse_adamw_20_ahead"] == 0.005
    assert result.summary["equal_time_adamw_20_ahead"] == round(2.01 / 2.1 - 1, 4)
    assert (result.summary["met_adamw_20"], result.summary["met_adamw_20_ahead"]) == (False, True)
    worth = {(row[1], row[3]): row[-1] for row in result.rows if row[0] == "muon"}
    assert (worth["sync", 100], worth["sync", 50], worth["20_ahead", 100]) == (1.0, 0.5, 0.95)

"""Experts that others hold: a stage without them and shards are the whole stage, bit for bit."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.errors import BugError, ConfigError
from swarm.models.balance import targets_counted, weighed
from swarm.models.exchange import Dispatch, GradientDispatch
from swarm.models.gpt_config import BalanceConfig, GptConfig
from swarm.models.layout import install_weights, refresh_weights
from swarm.models.passes import backward_steps, forward_steps, loss_steps, run_backward, run_forward, run_loss
from swarm.models.registry import family_of
from swarm.models.shards import LocalShards, shard_specs, without_experts
from swarm.models.spec import SplitConfig
from swarm.models.suspend import ask, suspended
from tests.harness.rigs.models import MODEL

MIXED = MODEL.model_copy(update={"layers": 3, "experts": 4, "top_k": 2, "expert_every": 1, "dropout": 0.1})
ROWS, LENGTH, EXPERTS = 3, 16, 4


def mixed(kind: str = "aux", **changes: Any) -> GptConfig:
    return MIXED.model_copy(update={"balance": BalanceConfig(kind=kind, weight=0.5), **changes})


def states(seed: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, MIXED.dim, generator=torch.Generator().manual_seed(seed))


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("kind", ["aux", "bias", "none"])
@pytest.mark.parametrize("capacity", [0.0, 1.0])
@pytest.mark.parametrize(("number", "again", "defers"), [(2, False, True), (4, True, False)])
def test_stage_and_shards_give_the_whole_stages_bits(
    kind: str, capacity: float, number: int, again: bool, defers: bool
) -> None:
    family = family_of(mixed(kind, capacity=capacity))
    spec = family.parts(SplitConfig(stages=1))[0]
    weights = family.initial_weights(0, spec)
    whole = family.build(spec)
    install_weights(whole, weights, requires_grad=True)
    stage, shards = without_experts(family, spec, number, weights), LocalShards(family, spec, number, weights)
    stage.activation_checkpointing = again
    x, back = states(1), states(2)
    with weighed(40):
        expected, graph = run_forward(whole, x, seed=5, graph=True)
        steps = forward_steps(stage, x, seed=5, graph=True, defers=defers)
    assert graph is not None
    wanted, of_whole = run_backward(graph, back)
    output, cut = shards.driven(steps, defers=defers)
    assert cut is not None
    gradient, rest = shards.driven(backward_steps(cut, back))
    assert torch.equal(output, expected)
    assert gradient is not None
    assert wanted is not None
    assert torch.equal(gradient, wanted)
    found = family.joined(dict(rest.finish()), map(dict, shards.gradients))
    assert not differing(found, dict(of_whole))
    assert [(type(one), one.layer) for one in shards.asked] == [
        *((Dispatch, layer) for layer in range(3)),
        *((GradientDispatch, layer) for layer in (2, 1, 0)),
    ]
    without = [one.index == EXPERTS for one in shards.asked if isinstance(one, Dispatch)]
    assert any(map(bool, map(torch.any, without))) is (capacity > 0)


def test_stage_that_has_the_ends_asks_too_and_one_that_nobody_learns_from() -> None:
    family = family_of(mixed("none"))
    spec = family.whole
    weights = family.initial_weights(0)
    whole = family.build(spec)
    install_weights(whole, weights, requires_grad=True)
    stage, shards = without_experts(family, spec, 2, weights), LocalShards(family, spec, 2, weights)
    tokens = torch.randint(300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    total, count, graph = run_loss(whole, tokens, tokens, seed=5, graph=True)
    assert graph is not None
    found, counted, cut = shards.driven(loss_steps(stage, tokens, tokens, seed=5, graph=True))
    assert (found, counted) == (total, count)
    assert cut is not None
    none, rest = shards.driven(backward_steps(cut, None))
    assert none is None
    got = family.joined(dict(rest.finish()), map(dict, shards.gradients))
    assert not differing(got, dict(run_backward(graph, None)[1]))
    plain, nothing = shards.driven(forward_steps(stage, tokens, seed=None, graph=False))
    assert nothing is None
    assert torch.equal(plain, run_forward(whole, tokens, seed=None, graph=False)[0])


def test_cut_names_the_whole_stages_tensors_and_begins_as_they_do() -> None:
    family = family_of(mixed("bias"))
    spec = family.parts(SplitConfig(stages=3))[1]
    weights, whole = family.initial_weights(7, spec), family.build(spec)
    specs = [replace(spec, expert_shards=2), *shard_specs(spec, 2)]
    states = [family.initial_weights(7, one) for one in specs]
    assert sum(map(len, states)) == len(weights)
    assert not differing(family.joined(states[0], states[1:]), weights)
    for one, state in zip(specs, states, strict=True):
        assert not differing(family.cut(one, weights), state)
    layouts = [family.layout(family.build(one)) for one in specs]
    for kind in ("decayed", "matrices", "steered", "told"):
        assert frozenset[str]().union(*(getattr(one, kind) for one in layouts)) == getattr(family.layout(whole), kind)
    costs = [family.cost(one, LENGTH) for one in specs]
    for what in ("parameters", "idle", "forward_flops"):
        assert sum(getattr(one, what) for one in costs) == getattr(family.cost(spec, LENGTH), what)


@pytest.mark.parametrize(
    ("model", "shards", "stages", "said"),
    [
        (MODEL, 2, 1, "none of its layers has experts"),
        (MIXED, 3, 1, "a divisor of 4, the experts of a layer"),
        (mixed(expert_every=2), 2, 3, "stage-0 has no layer with experts"),
    ],
)
def test_models_without_experts_to_share_out_are_refused(model: GptConfig, shards: int, stages: int, said: str) -> None:
    family_of(MIXED).check_expert_shards(4, SplitConfig(stages=3))
    with pytest.raises(ConfigError, match=said):
        family_of(model).check_expert_shards(shards, SplitConfig(stages=stages))


def test_stage_that_asks_says_so_where_nobody_answers() -> None:
    family = family_of(MIXED)
    spec = family.parts(SplitConfig(stages=1))[0]
    stage = without_experts(family, spec, 2, family.initial_weights(0, spec))
    with pytest.raises(BugError, match="not driven by steps"):
        run_forward(stage, states(1), seed=5, graph=True)


def test_layer_computed_again_refuses_weights_that_were_changed() -> None:
    family = family_of(MIXED)
    spec = family.parts(SplitConfig(stages=1))[0]
    weights = family.initial_weights(0, spec)
    stage, shards = without_experts(family, spec, 2, weights), LocalShards(family, spec, 2, weights)
    stage.activation_checkpointing = True
    _, cut = shards.driven(forward_steps(stage, states(1), seed=5, graph=True))
    assert cut is not None
    refresh_weights(stage, weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        shards.driven(backward_steps(cut, states(2)))


# --- leaving a computation in the middle ------------------------------------------------------------------------------


def test_computation_sees_what_was_set_when_its_steps_were_made() -> None:
    with weighed(7):
        steps = suspended(lambda: (ask("first"), targets_counted(), threading.get_ident()))
    with weighed(9):
        assert next(steps) == "first"
    with pytest.raises(StopIteration) as end:
        steps.send("answer")
    answer, targets, thread = end.value.value
    assert (answer, targets) == ("answer", 7)
    assert thread != threading.get_ident()


def test_computation_ends_where_it_asked() -> None:
    ended: list[str] = []

    def compute() -> None:
        try:
            ask("anything")
        except ValueError:
            ended.append("thrown")
            raise
        finally:
            ended.append("ended")

    steps = suspended(compute)
    next(steps)
    with pytest.raises(ValueError, match="no answer"):
        steps.throw(ValueError("no answer"))
    assert ended == ["thrown", "ended"]
    steps = suspended(compute)
    next(steps)
    before = threading.active_count()
    steps.close()
    assert ended == ["thrown", "ended", "ended"]
    assert threading.active_count() == before - 1

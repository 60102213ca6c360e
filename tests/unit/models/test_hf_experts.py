"""Mixtures of transformers whose experts are in shards, against the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.errors import ConfigError
from swarm.models.exchange import Dispatch
from swarm.models.hf.hf_config import NOT_SHARED_OUT, SHARED_OUT, HfConfig
from swarm.models.layout import state_of
from swarm.models.lora_config import LoraConfig
from swarm.models.passes import run_experts, run_experts_backward
from swarm.models.registry import family_of
from swarm.models.shards import LocalShards, shard_specs
from swarm.models.spec import ModelConfig, SplitConfig
from tests.harness.rigs.foreign import foreign_model
from tests.harness.rigs.models import MODEL

MIXED = MODEL.model_copy(update={"experts": 4, "top_k": 2})
FOUR: dict[str, Any] = {"jamba": {"num_experts": 4, "num_experts_per_tok": 2}}
BESIDE = frozenset({"qwen2_moe", "qwen3_next"})
"""Have a shared expert in each layer, whose gradient is added in another order."""


def mixture(name: str) -> HfConfig:
    return foreign_model(name, **FOUR.get(name, {})).model_copy(update={"experts_implementation": "eager"})


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", sorted(SHARED_OUT))
def test_stage_and_shards_give_the_whole_models_gradients(name: str, shards: int) -> None:
    from swarm.models.hf.selftest import experts_difference

    assert experts_difference(mixture(name), shards) <= (1e-6 if name in BESIDE else 0.0)


@pytest.mark.parametrize(
    ("name", "shards", "said"),
    [
        *((name, 2, why) for name, why in NOT_SHARED_OUT.items()),
        ("mixtral", 3, "a divisor of 4, the experts of a layer"),
        ("llama", 2, "none of its layers has experts"),
    ],
)
def test_models_whose_experts_cannot_be_shared_out_are_refused(name: str, shards: int, said: str) -> None:
    model = foreign_model(name)
    if name != "llama":
        model = model.model_copy(update={"experts_implementation": "eager"})
    with pytest.raises(ConfigError, match=said):
        family_of(model).check_expert_shards(shards, SplitConfig(stages=1))


def test_run_must_say_that_experts_are_computed_one_after_the_other() -> None:
    split = SplitConfig(stages=2)
    family_of(mixture("mixtral")).check_expert_shards(2, split)
    with pytest.raises(ConfigError, match='experts_implementation = "eager"'):
        family_of(foreign_model("mixtral")).check_expert_shards(2, split)
    with pytest.raises(ConfigError, match="adapters are trained, and experts have none"):
        family_of(mixture("mixtral").model_copy(update={"lora": LoraConfig()})).check_expert_shards(2, split)
    with pytest.raises(ConfigError, match="stage-0 has no layer with experts"):
        family_of(mixture("deepseek_v3")).check_expert_shards(2, SplitConfig(stages=4))


def test_shard_has_a_tensor_for_each_expert_and_begins_as_the_whole_does() -> None:
    family = family_of(mixture("mixtral"))
    spec = family.parts(SplitConfig(stages=2))[1]
    weights = family.initial_weights(3, spec)
    specs = shard_specs(spec, 2)
    shards = [family.initial_weights(3, one) for one in specs]
    assert [name.rpartition("layers.")[2] for name in shards[1]][:2] == [
        "2.mlp.experts.2.gate_up_proj",
        "2.mlp.experts.2.down_proj",
    ]
    stage = family.cut(replace(spec, expert_shards=2), weights)
    joined = family.joined(stage, shards)
    assert joined.keys() == weights.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in weights.items())
    held = sum(family.cost(one, 16).parameters for one in specs)
    assert held == sum(tensor.numel() for name, tensor in weights.items() if name not in stage)
    assert all(state_of(family.build(one)).keys() == shard.keys() for one, shard in zip(specs, shards, strict=True))


@pytest.mark.parametrize("model", [lambda: mixture("mixtral"), lambda: MIXED])
def test_shard_that_no_row_goes_to_answers_and_has_gradients_of_zeros(model: Callable[[], ModelConfig]) -> None:
    family = family_of(model())
    spec = family.parts(SplitConfig(stages=1))[0]
    shards = LocalShards(family, spec, 2, family.initial_weights(0, spec))
    width, layer = family.boundary(1, 1).shape[-1], family.expert_layers(spec)[0]
    asked = Dispatch(layer, torch.empty(0, width), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    answer, graph = run_experts(shards.parts[1], asked, graph=True, defers=True)
    assert answer.shape == (0, width)
    assert graph is not None
    of_hidden, of_weights, rest = run_experts_backward(graph, answer)
    assert (of_hidden.shape, of_weights.shape) == ((0, width), (0, 2))
    found = dict(rest.finish())
    assert found.keys() == shards.parts[1].of_layer(layer).keys()
    assert not any(map(bool, map(torch.any, found.values())))

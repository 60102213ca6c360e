from __future__ import annotations

import pytest
import torch

from swarm.errors import ConfigError, StateError
from swarm.ids import ENDS
from swarm.models.gpt import Rotary
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig, TensorSpec
from swarm.planning.costs import (
    model_parameter_count,
    training_flops_per_token,
)

MODEL = GptConfig(vocab_size=300, dim=32, layers=5, heads=4, kv_heads=2, context=16)
FAMILY = family_of(MODEL)


@pytest.mark.parametrize("ends", ["private", "hosted"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_split_parts_together_are_the_whole_model(stages: int, ends: str) -> None:
    specs = FAMILY.parts(SplitConfig(stages=stages, ends=ends))
    whole = {name: p.shape for name, p in FAMILY.build(FAMILY.whole).state_dict().items()}
    modules = [FAMILY.build(spec) for spec in specs]
    states = [module.state_dict() for module in modules]
    assert sum(len(state) for state in states) == len(whole)
    assert {name: p.shape for state in states for name, p in state.items()} == whole
    assert (specs[-1].name == ENDS) == (ends == "private")
    for spec, module in zip(specs, modules, strict=True):
        assert FAMILY.cost(spec, 16).parameters == sum(p.numel() for p in module.parameters())
    assert model_parameter_count(MODEL) == sum(FAMILY.cost(spec, 16).parameters for spec in specs)


def test_split_uneven_gives_earlier_stages_more() -> None:
    specs = FAMILY.parts(SplitConfig(stages=3))
    assert [(s.first_layer, s.last_layer) for s in specs[:-1]] == [(0, 2), (2, 4), (4, 5)]
    specs = FAMILY.parts(SplitConfig(stages=2, layers_per_stage=(1, 4)))
    assert [(s.first_layer, s.last_layer) for s in specs[:-1]] == [(0, 1), (1, 5)]


@pytest.mark.parametrize("split", [{"stages": 6}, {"stages": 2, "layers_per_stage": (2, 2)}])
def test_split_that_does_not_fit_is_a_config_error(split: dict) -> None:
    with pytest.raises(ConfigError, match=r"split\."):
        FAMILY.parts(SplitConfig(**split))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    whole = FAMILY.initial_weights(3)
    name = "blocks.4.feed_forward.down.weight"
    last = FAMILY.parts(SplitConfig(stages=5))[4]
    assert torch.equal(FAMILY.initial_weights(3, last)[name], whole[name])
    assert not torch.equal(FAMILY.initial_weights(4, last)[name], whole[name])
    assert abs(whole["embedding.weight"].std().item() - 0.02) < 1e-3
    assert abs(whole[name].std().item() - 0.02 / 10**0.5) < 1e-3
    assert all(tensor.dtype == torch.float32 for tensor in whole.values())


def test_install_of_wrong_weights_is_a_state_error_that_changes_nothing() -> None:
    module = FAMILY.build(FAMILY.parts(SplitConfig(stages=1))[0])
    with pytest.raises(StateError, match=r"blocks\.0\.attention_norm\.weight"):
        install_weights(module, {})
    wrong = FAMILY.initial_weights(0) | {"blocks.4.feed_forward.down.weight": torch.zeros(3)}
    with pytest.raises(StateError, match="shape"):
        install_weights(module, wrong)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_rotary_tables_survive_every_kind_of_move() -> None:
    right = Rotary(MODEL).cosine
    meta = FAMILY.build(FAMILY.parts(SplitConfig(stages=1))[0])
    assert torch.equal(meta.rotary.cosine, right)
    gpt = FAMILY.build(FAMILY.whole)
    assert torch.equal(gpt.to_empty(device="cpu").rotary.cosine, right)
    rounded = gpt.to(torch.bfloat16).rotary
    assert rounded.cosine.dtype == torch.float32
    assert torch.equal(rounded.cosine, right)
    assert not any("rotary" in name for name in gpt.state_dict())


def test_flops_follow_the_matrices() -> None:
    spec = FAMILY.parts(SplitConfig(stages=1, ends="hosted"))[0]
    named = FAMILY.build(spec).named_parameters()
    matrices = sum(p.numel() for name, p in named if p.dim() == 2 and name != "embedding.weight")
    assert FAMILY.cost(spec, 16).forward_flops == 2 * matrices + 5 * 2 * 32 * 16
    assert training_flops_per_token(MODEL, spec, 16) == 3 * FAMILY.cost(spec, 16).forward_flops
    assert FAMILY.boundary(2, 16) == TensorSpec((2, 16, 32), "float32")

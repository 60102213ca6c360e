from __future__ import annotations

import pytest
import torch

from swarm.errors import ConfigError, StateError
from swarm.ids import ENDS
from swarm.models.gpt import GPT
from swarm.models.spec import ModelConfig, SplitConfig, TensorSpec
from swarm.models.split import boundary_spec, build_part, initial_weights, install_weights, split_model
from swarm.planning.costs import (
    boundary_bytes,
    forward_flops_per_token,
    model_parameter_count,
    parameter_count,
    training_flops_per_token,
)

MODEL = ModelConfig(vocab_size=300, dim=32, layers=5, heads=4, kv_heads=2, context=16)


@pytest.mark.parametrize("ends", ["private", "hosted"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_split_parts_together_are_the_whole_model(stages: int, ends: str) -> None:
    specs = split_model(MODEL, SplitConfig(stages=stages, ends=ends))
    whole = {name: p.shape for name, p in GPT(MODEL).state_dict().items()}
    modules = [build_part(spec, MODEL) for spec in specs]
    states = [module.state_dict() for module in modules]
    assert sum(len(state) for state in states) == len(whole)
    assert {name: p.shape for state in states for name, p in state.items()} == whole
    assert (specs[-1].name == ENDS) == (ends == "private")
    for spec, module in zip(specs, modules, strict=True):
        assert parameter_count(MODEL, spec) == sum(p.numel() for p in module.parameters())
    assert model_parameter_count(MODEL) == sum(parameter_count(MODEL, spec) for spec in specs)


def test_split_uneven_gives_earlier_stages_more() -> None:
    specs = split_model(MODEL, SplitConfig(stages=3))
    assert [(s.first_layer, s.last_layer) for s in specs[:-1]] == [(0, 2), (2, 4), (4, 5)]
    specs = split_model(MODEL, SplitConfig(stages=2, layers_per_stage=(1, 4)))
    assert [(s.first_layer, s.last_layer) for s in specs[:-1]] == [(0, 1), (1, 5)]


@pytest.mark.parametrize("split", [{"stages": 6}, {"stages": 2, "layers_per_stage": (2, 2)}])
def test_split_that_does_not_fit_is_a_config_error(split: dict) -> None:
    with pytest.raises(ConfigError, match="layers_per_stage"):
        split_model(MODEL, SplitConfig(**split))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    whole = initial_weights(MODEL, 3)
    name = "blocks.4.feed_forward.down.weight"
    assert torch.equal(initial_weights(MODEL, 3, [name])[name], whole[name])
    assert not torch.equal(initial_weights(MODEL, 4, [name])[name], whole[name])
    assert abs(whole["embedding.weight"].std().item() - 0.02) < 1e-3
    assert abs(whole[name].std().item() - 0.02 / 10**0.5) < 1e-3
    assert all(tensor.dtype == torch.float32 for tensor in whole.values())


def test_install_of_wrong_weights_is_a_state_error_that_changes_nothing() -> None:
    module = build_part(split_model(MODEL, SplitConfig(stages=1))[0], MODEL)
    with pytest.raises(StateError, match=r"blocks\.0\.attention_norm\.weight"):
        install_weights(module, {})
    wrong = initial_weights(MODEL, 0) | {"blocks.4.feed_forward.down.weight": torch.zeros(3)}
    with pytest.raises(StateError, match="shape"):
        install_weights(module, wrong)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_rotary_tables_survive_every_kind_of_move() -> None:
    right = GPT(MODEL).rotary.cosine.clone()
    meta = build_part(split_model(MODEL, SplitConfig(stages=1))[0], MODEL)
    assert torch.equal(meta.rotary.cosine, right)
    with torch.device("meta"):
        gpt = GPT(MODEL)
    assert torch.equal(gpt.to_empty(device="cpu").rotary.cosine, right)
    rounded = gpt.to(torch.bfloat16).rotary
    assert rounded.cosine.dtype == torch.float32
    assert torch.equal(rounded.cosine, right)
    assert not any("rotary" in name for name in gpt.state_dict())


def test_flops_follow_the_matrices() -> None:
    spec = split_model(MODEL, SplitConfig(stages=1, ends="hosted"))[0]
    matrices = sum(p.numel() for n, p in GPT(MODEL).named_parameters() if p.dim() == 2 and n != "embedding.weight")
    assert forward_flops_per_token(MODEL, spec, 16) == 2 * matrices + 5 * 2 * 32 * 16
    assert training_flops_per_token(MODEL, spec, 16) == 3 * forward_flops_per_token(MODEL, spec, 16)
    assert boundary_spec(MODEL, 2, 16, "bfloat16") == TensorSpec((2, 16, 32), "bfloat16")
    assert boundary_bytes(MODEL, 2, 16, "bfloat16") == 2 * 16 * 32 * 2

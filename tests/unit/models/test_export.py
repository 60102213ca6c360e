"""What transformers makes of our own transformer's tensors under its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import ConfigError
from swarm.models.family import ModelFamily, PartModule
from swarm.models.gpt_config import BalanceConfig, GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from tests.harness.rigs.models import ForeignConfig, ForeignFamily

ROWS, LENGTH = 3, 40
ODD = GptConfig(
    vocab_size=300, dim=64, layers=3, heads=4, kv_heads=2, ffn_dim=96, context=48, rope_theta=500.0, norm_eps=3e-3
)
"""Far from every default of a Llama's: a key that is lost shows."""
MIXED = ODD.model_copy(
    update={"experts": 5, "top_k": 2, "expert_every": 3, "balance": BalanceConfig(kind="bias", rate=0.1)}
)

SPARSE = {"sparsity": 0.7}


def ours(model: GptConfig) -> PartModule:
    """The whole model, with weights as large as those of a trained one."""
    family = family_of(model)
    gpt = family.build(family.whole)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in family.initial_weights(0).items()
    }
    install_weights(gpt, weights)
    return gpt.eval()


def theirs(model: GptConfig, split: SplitConfig, attention: str) -> Any:
    """A Llama with the weights of :func:`ours`, brought over part by part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    family, weights = family_of(model), dict(ours(model).named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    for spec in family.parts(split):
        own = {name: weights[name].detach() for name, _ in family.build(spec).named_parameters()}
        exported = family.export_weights(spec, own)
        assert not tensors.keys() & exported.keys()
        tensors |= exported
    llama = LlamaForCausalLM(LlamaConfig(**family.export_config()))
    llama.set_attn_implementation(attention)
    llama.load_state_dict(tensors, strict=True)
    return llama.eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("ends", ["private", "hosted"])
@pytest.mark.parametrize("changes", [{}, SPARSE])
@torch.no_grad()
def test_llama_of_our_parts_has_our_logits(changes: dict[str, Any], ends: str, attention: str) -> None:
    model = ODD.model_copy(update=changes)
    tokens = torch.randint(0, ODD.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    gpt = ours(model)
    expected = gpt.logits(gpt(tokens))
    found = theirs(model, SplitConfig(stages=2, ends=ends), attention)(tokens).logits
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("changes", [{}, {"top_k": 1, "expert_every": 1}, {"balance": BalanceConfig()}, SPARSE])
@torch.no_grad()
def test_ernie_of_our_parts_with_experts_has_our_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    """Loaded from files, whose tensors transformers stacks."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = MIXED.model_copy(update=changes)
    tokens = torch.randint(0, ODD.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    family, gpt = family_of(model), ours(model)
    tensors = family.export_weights(family.whole, dict(gpt.named_parameters()))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(family.export_config()))
    theirs, told = AutoModelForCausalLM.from_pretrained(
        tmp_path, local_files_only=True, output_loading_info=True, dtype="float32"
    )
    assert not told["missing_keys"] | told["unexpected_keys"]
    expected, found = gpt.logits(gpt(tokens)), theirs.eval()(tokens).logits
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= 2e-5


@torch.no_grad()
def test_llama_of_parts_computed_in_bfloat16_differs_by_rounding_only() -> None:
    tokens = torch.randint(0, ODD.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rounded = ODD.model_copy(update={"compute": "bfloat16"})
    gpt, exact = ours(rounded), ours(ODD)
    found = theirs(ODD, SplitConfig(stages=2), "sdpa").bfloat16()(tokens).logits.float()
    scale = exact.logits(exact(tokens)).std()
    assert (found - gpt.logits(gpt(tokens))).std() < 0.02 * scale


@pytest.mark.parametrize("key", ["kv_heads", "rope_theta", "norm_eps"])
@torch.no_grad()
def test_llama_with_one_key_of_another_value_has_other_logits(key: str) -> None:
    """So the comparison sees each of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {"kv_heads": "num_key_value_heads", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps"}
    llama = theirs(ODD, SplitConfig(stages=1), "eager")
    changed = family_of(ODD).export_config() | {names[key]: 1 if key == "kv_heads" else 1e-1}
    other = LlamaForCausalLM(LlamaConfig(**changed)).eval()
    other.set_attn_implementation("eager")
    state = llama.state_dict()
    if key == "kv_heads":
        state = {name: t[: ODD.head_dim] if ".k_proj" in name or ".v_proj" in name else t for name, t in state.items()}
    other.load_state_dict(state, strict=True)
    tokens = torch.arange(LENGTH).view(1, -1)
    assert (other(tokens).logits - llama(tokens).logits).abs().max() > 1e-2


def test_family_without_a_form_elsewhere_says_so() -> None:
    family: ModelFamily = ForeignFamily(ForeignConfig(family="foreign", config='{"depth": 1, "width": 4, "vocab": 9}'))
    for asked in (family.export_config, lambda: family.export_weights(family.whole, {})):
        with pytest.raises(ConfigError, match="'foreign': expected a family that transformers has a model for"):
            asked()

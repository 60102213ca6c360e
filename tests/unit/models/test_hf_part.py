"""Parts of models of transformers: the bits of the whole, what is refused, what goes to files and comes back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peers.foreign_model import check_parts
from swarm.errors import BugError, ConfigError, StateError
from swarm.models.family import PartModule
from swarm.models.hf.hf_config import LEAK_WHEN_PACKED, HfConfig, canonical
from swarm.models.hf.hf_family import HfFamily
from swarm.models.layout import install_weights
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from tests.harness.rigs.foreign import LEAKING, SMALL, foreign_config, foreign_model

TWO = SplitConfig(stages=2, ends="private")
TOKENS = torch.arange(24).view(2, 12) * 3 % 96


def whole_of(name: str, **changes: Any) -> Any:
    """The model as transformers makes it, with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = foreign_config(name, **changes)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config)).eval()


def installed(family: HfFamily, weights: dict[str, torch.Tensor], split: SplitConfig = TWO) -> list[PartModule]:
    parts = []
    for spec in family.parts(split):
        part = family.build(spec)
        install_weights(part, weights)
        parts.append(part)
    return parts


@pytest.mark.parametrize("name", [*SMALL, "lfm2"])
def test_model_gives_the_bits_of_the_whole_when_it_is_cut(name: str) -> None:
    from swarm.models.hf.selftest import self_test

    found = self_test(foreign_model(name))
    assert (found.equal, found.causal, found.packs) == (True, True, name not in LEAK_WHEN_PACKED)
    found.check(name)


def test_what_a_pass_depends_on_is_the_runs_whatever_the_config_says() -> None:
    from swarm.models.hf.selftest import self_test
    from swarm.models.hf.skeleton import PINNED, skeleton

    said = {key: not value for key, value in PINNED.items()}
    said |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = foreign_model("mixtral")
    model = model.model_copy(update={"config": canonical(json.loads(model.config) | said)})
    assert self_test(model).equal
    config = skeleton(model).config
    assert {key: getattr(config, key) for key in PINNED} == PINNED
    assert (config._attn_implementation, config._experts_implementation) == ("sdpa", "grouped_mm")
    assert skeleton(foreign_model("llama")).config._experts_implementation == "eager", "it has no experts"
    kept = HfFamily(model).export_config()
    assert {key: kept[key] for key in said} == said, "an export has the config as it was"


def test_run_says_with_which_implementation_of_experts_it_computes() -> None:
    from swarm.models.hf.selftest import self_test
    from swarm.models.hf.skeleton import skeleton

    plain, said = foreign_model("mixtral"), {"experts_implementation": "eager"}
    eager = plain.model_copy(update=said)
    eager.check()
    assert skeleton(eager).config._experts_implementation == "eager"
    assert self_test(eager).equal
    assert "experts_implementation" not in plain.model_dump(), "runs from before keep their id"
    assert eager.model_dump()["experts_implementation"] == "eager"
    with pytest.raises(ConfigError, match="no experts"):
        foreign_model("llama").model_copy(update=said).check()


@pytest.mark.parametrize("name", [*SMALL, "lfm2"])
def test_adapted_parts_are_tried_against_the_whole_with_merged_weights(name: str) -> None:
    from swarm.models.hf.selftest import check_adapters

    check_adapters(foreign_model(name).model_copy(update={"lora": LoraConfig(rank=4, base="nf4")}))


@pytest.mark.parametrize(
    ("base", "said"), [("nf4", "with adapters it fails"), ("float32", "logits or gradients differ")]
)
def test_adapters_of_modules_that_are_not_called_are_found_out_without_a_list_of_names(
    base: BaseDType, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarm.models.hf import hf_config
    from swarm.models.hf.selftest import check_adapters

    monkeypatch.setattr(hf_config, "NOT_ADAPTED", frozenset())
    model = foreign_model("mamba", time_step_rank=16)
    with pytest.raises(ConfigError, match=said):
        check_adapters(model.model_copy(update={"lora": LoraConfig(rank=4, base=base)}))
    check_adapters(model.model_copy(update={"lora": LoraConfig(rank=4, base="float32", targets=("in_proj",))}))
    check_adapters(model)
    with pytest.raises(ConfigError, match=said):  # where a run is founded
        check_parts(model.model_copy(update={"lora": LoraConfig(rank=4, base=base)}), TWO)


def test_those_whose_documents_leak_are_known_by_name() -> None:
    assert {name.partition(":")[0] for name in LEAKING} == LEAK_WHEN_PACKED


@pytest.mark.parametrize(
    ("name", "words"), [("gemma3n_text", "with the hidden state, and it depends"), ("zamba2", "share weights")]
)
def test_model_whose_layers_cannot_be_parted_is_found_out_without_a_list_of_names(name: str, words: str) -> None:
    from swarm.models.hf.anatomy import NotSeparable, find_anatomy
    from swarm.models.hf.skeleton import skeleton

    config = canonical(foreign_config(name))
    fields = {"architecture": name, "layers": 4, "width": 32, "vocab_size": 96, "context": 16}
    with pytest.raises(NotSeparable, match=words):
        find_anatomy(skeleton(HfConfig(family="hf", config=config, **fields)))


def test_weights_of_files_are_read_for_one_part_and_written_in_the_names_of_files(tmp_path: Path) -> None:
    for name in ("llama", "llama:tied", "qwen3_moe", "deepseek_v3"):
        theirs, there = whole_of(name), tmp_path / name.replace(":", "-")
        theirs.save_pretrained(there, max_shard_size="20KB")
        family = HfFamily(foreign_model(name).model_copy(update={"scratch": False}))
        weights: dict[str, torch.Tensor] = {}
        stored: dict[str, torch.Tensor] = {}
        for spec in family.parts(TWO):
            part = family.initial_weights(0, spec, there)
            assert not set(part) & set(weights), "no tensor belongs to two parts"
            weights |= part
            stored |= family.export_weights(spec, part)
        first, second, ends = installed(family, weights)
        hidden = second(first(ends.embed(TOKENS)))
        with torch.no_grad():
            assert torch.equal(ends.logits(hidden), theirs(input_ids=TOKENS, use_cache=False).logits), name
        original = {k: v for file in there.glob("*.safetensors") for k, v in load_file(file).items()}
        assert stored.keys() == original.keys()
        assert all(torch.equal(stored[key], original[key]) for key in original)


def test_files_that_cannot_be_used_are_refused_with_the_cause(tmp_path: Path) -> None:
    family = HfFamily(foreign_model("llama").model_copy(update={"scratch": False}))
    spec = family.parts(TWO)[0]
    with pytest.raises(StateError, match="not on this machine"):
        family.initial_weights(0, spec)
    with pytest.raises(StateError, match="neither model.safetensors nor"):
        family.initial_weights(0, spec, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(StateError, match="its header has"):
        family.initial_weights(0, spec, tmp_path)
    file.write_bytes(b"abc")
    with pytest.raises(StateError, match="no safetensors file"):
        family.initial_weights(0, spec, tmp_path)
    save_file({"model.norm.weight": torch.ones(32)}, file)
    with pytest.raises(StateError, match=r"lacks 18 of the part's 18 tensors: model\.layers\.0"):
        family.initial_weights(0, spec, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for map_, words in (({"a": "../b"}, "not next to it"), ({"a": "gone"}, "lacks gone"), ([], "no index")):
        index.write_text(json.dumps({"weight_map": map_}))
        with pytest.raises(StateError, match=words):
            family.initial_weights(0, spec, tmp_path)


def test_random_weights_are_the_same_for_every_cut_and_others_with_another_seed() -> None:
    family = family_of(foreign_model("qwen3_moe"))
    whole = family.initial_weights(7)
    parts = {k: v for spec in family.parts(TWO) for k, v in family.initial_weights(7, spec).items()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    other = family.initial_weights(8)
    assert not torch.equal(whole["model.lm_head.weight"], other["model.lm_head.weight"])
    assert whole["model.lm_head.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(whole["model.model.norm.weight"], torch.ones(32))


def test_hosted_ends_of_a_tied_model_are_refused_where_two_stages_would_part_them() -> None:
    family = HfFamily(foreign_model("llama:tied"))
    with pytest.raises(ConfigError, match="its head is its embedding"):
        family.build(family.parts(SplitConfig(stages=2, ends="hosted"))[0])
    family.build(family.whole)


def test_part_computes_with_hosted_ends_and_does_only_what_is_its_own() -> None:
    family = HfFamily(foreign_model("llama"))
    weights = family.initial_weights(0)
    first, last = installed(family, weights, SplitConfig(stages=2, ends="hosted"))
    stage0, stage1, ends = installed(family, weights)
    with torch.no_grad():
        assert torch.equal(last.logits(last(first(TOKENS))), ends.logits(stage1(stage0(ends.embed(TOKENS)))))
    for refused in (lambda: ends(TOKENS), lambda: stage0.embed(TOKENS), lambda: first.logits(first(TOKENS))):
        with pytest.raises(BugError):
            refused()
    assert not ends.parameters_of("forward")
    assert set(stage0.parameters_of("embed")) | set(stage0.parameters_of("head")) == set()
    assert set(ends.parameters_of("embed")) == {"model.model.embed_tokens.weight"}


def test_copy_of_a_part_runs_its_own_layers_with_its_own_weights() -> None:
    family = HfFamily(foreign_model("llama"))
    old, new = family.initial_weights(0), family.initial_weights(1)
    for first, second in zip(installed(family, old), installed(family, new), strict=True):
        copied = copy.deepcopy(first)
        install_weights(copied, new)
        works = (PartModule.embed, PartModule.logits) if first.parameters_of("head") else (PartModule.forward,)
        for work in works:
            x = TOKENS if work is PartModule.embed else torch.linspace(-1, 1, 2 * 12 * 32).view(2, 12, 32)
            with torch.no_grad():
                found, expected = (getattr(one, work.__name__)(x) for one in (copied, second))
                assert torch.equal(found, expected)
                assert not torch.equal(getattr(first, work.__name__)(x), found)


def test_config_that_says_other_numbers_than_the_run_is_refused_when_a_part_is_built() -> None:
    wrong = foreign_model("llama").model_copy(update={"layers": 3})
    with pytest.raises(ConfigError, match=r"model\.layers = 3.*the config gives 4"):
        family_of(wrong).build(family_of(wrong).parts(TWO)[0])


def test_matrices_decay_and_the_embedding_does_not_and_costs_follow_from_the_shapes() -> None:
    family = HfFamily(foreign_model("qwen3_moe"))
    first, _, ends = (family.build(spec) for spec in family.parts(TWO))
    assert family.decayed(ends) == {"model.lm_head.weight"}
    assert "model.model.layers.0.mlp.experts.gate_up_proj" in family.decayed(first)
    spec = family.parts(TWO)[0]
    cost = family.cost(spec, 16)
    assert cost.parameters == sum(p.numel() for p in first.parameters())
    assert cost.forward_flops < 2 * cost.parameters, "a token uses half of the experts"
    assert family.boundary(2, 16).shape == (2, 16, 32)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptj", {"max_position_embeddings": 8192, "rotary_dim": 1 << 19}),
        ("jamba", {"mamba_d_state": 1 << 14, "mamba_expand": 1 << 12}),
        ("xglm", {"max_position_embeddings": 1 << 20, "hidden_size": 1 << 12}),
    ],
)
def test_config_that_would_fill_the_memory_with_tables_is_refused_before_it_does(
    name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="tables of at most"):
        foreign_model(name, **changes)

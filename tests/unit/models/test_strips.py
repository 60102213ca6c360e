"""Layers cut across devices of one peer: what they compute, that no number depends on the devices, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from peers.foreign_model import check_parts
from swarm.config import parse_manifest
from swarm.errors import ConfigError
from swarm.ids import StepWork
from swarm.models.gpt_config import GptConfig
from swarm.models.hf.hf_config import HfConfig, canonical
from swarm.models.hf.hf_family import HfFamily
from swarm.models.packing import packed
from swarm.models.passes import Gradients
from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, SplitConfig
from swarm.models.strips import find_cut
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import initial_snapshot
from tests.harness.rigs.foreign import ALL, LEAKING, foreign_model
from tests.harness.rigs.strips import CPU, WORK, difference, passed, stage_of

MODEL = GptConfig(vocab_size=300, dim=32, layers=2, heads=4, context=16)
GROUPED = GptConfig(vocab_size=300, dim=32, layers=2, heads=8, kv_heads=4, context=16)
BOUND = 1.2e-6
NUMBERS: dict[str, Any] = {"lr": 0.01, "clip": 0.9, "step": 1}
WHOLE = frozenset({
    "gpt2", "opt", "bloom", "phi3", "gpt_neo", "gptj", "gpt_bigcode", "codegen", "stablelm", "falcon", "mpt",
    "hunyuan_v1_dense", "xglm", "biogpt", "persimmon", "olmoe", "granitemoe", "gpt_oss", "jamba", "mamba", "mamba2",
    "recurrent_gemma", "lfm2",
})  # fmt: skip
"""Of which nothing is cut."""
CUT = tuple(name for name in ALL | LEAKING if name.partition(":")[0] not in WHOLE)


@pytest.mark.parametrize("model", [MODEL, GROUPED], ids=["heads", "grouped"])
@pytest.mark.parametrize("number", [2, 4])
def test_stage_in_strips_is_the_whole_one_but_for_rounding(model: GptConfig, number: int) -> None:
    whole = passed(stage_of(model), model)
    assert 0.0 < difference(passed(stage_of(model, number), model), whole) <= BOUND


@pytest.mark.parametrize("name", CUT)
def test_stage_of_a_foreign_model_in_strips_is_the_whole_one_but_for_rounding(name: str) -> None:
    model = foreign_model(name)
    assert difference(passed(stage_of(model, 2), model), passed(stage_of(model), model)) <= BOUND


def test_kinds_of_which_nothing_is_cut_are_known_and_each_says_why() -> None:
    for name in (name for name in ALL | LEAKING if name.partition(":")[0] in WHOLE):
        model = foreign_model(name)
        family = HfFamily(model)
        cut = find_cut(family.build(family.parts(SplitConfig(stages=1))[0]), family.tensor_plan())
        assert (dict(cut.units), cut.share) == ({}, 0.0), name
        assert cut.whole, name
        with pytest.raises(ConfigError, match="no layer of its kind can be cut"):
            check_parts(model, SplitConfig(stages=2, tensor=2))


@pytest.mark.parametrize(
    ("name", "cut", "whole"),
    [
        ("mixtral", {"self_attn"}, {"mlp": "it has experts"}),
        ("olmo2", {"mlp"}, {"self_attn": "it looks across heads, or a matrix of it has several in one"}),
        ("deepseek_v3", {"shared_experts", "mlp"}, {"self_attn": "transformers says of no way to cut it"}),
        ("apertus", {"self_attn"}, {"mlp": "its plan does not name act_fn.alpha_p"}),
        ("qwen3", {"self_attn", "mlp"}, {}),
    ],
)
def test_what_is_cut_of_a_kind_follows_from_its_plan(name: str, cut: set[str], whole: dict[str, str]) -> None:
    family = HfFamily(foreign_model(name))
    found = find_cut(family.build(family.parts(SplitConfig(stages=1))[0]), family.tensor_plan())
    assert {path.rpartition(".")[2] for path in found.units} == cut
    assert whole.items() <= {kind.rpartition(".")[2]: why for kind, why in found.whole.items()}.items()


def test_plan_is_of_the_code_whatever_the_config_says() -> None:
    model = foreign_model("gpt2")
    said = json.loads(model.config) | {"base_model_tp_plan": {"h.*.attn.c_attn": "colwise"}}
    assert HfFamily(model.model_copy(update={"config": canonical(said)})).tensor_plan().styles == {}


@pytest.mark.parametrize("model", [MODEL, GROUPED, "qwen3"], ids=str)
def test_number_of_devices_changes_no_bit(model: GptConfig | str) -> None:
    config: Any = foreign_model(model, num_key_value_heads=4) if isinstance(model, str) else model
    parts = [stage_of(config, 4, (CPU,) * degree) for degree in (1, 2, 4)]
    one, *others = ([*passed(part, config)] for part in parts)
    for other in others:
        assert all(map(torch.equal, one, other))
    assert len({part.prepare((part.gradient_sum() / 24).float(), **NUMBERS) for part in parts}) == 1
    for part in parts:
        part.swap()
    again, *others_again = (output_of(part, config) for part in parts)
    assert all(torch.equal(again, other) for other in others_again)
    assert not torch.equal(again, one[0]), "they compute with the weights after the step"


def output_of(part: TrainedPart, model: ModelConfig, version: int | None = None) -> torch.Tensor:
    """What comes of some hidden states, with the weights after a step."""
    x = torch.randn(family_of(model).boundary(2, 12).shape, generator=torch.Generator().manual_seed(2))
    work = None if version is None else StepWork(version + 1, WORK.microbatch)
    return part.forward(x, seed=3, work=work, graph=False)[0]


def test_strips_have_the_weights_of_each_open_step_and_leave_those_that_are_lent() -> None:
    spec = family_of(MODEL).parts(SplitConfig(stages=1, tensor=4))[0]
    first = initial_snapshot(spec.name, stage_of(MODEL).layout, family_of(MODEL).initial_weights(0, spec))
    found = []
    for degree in (1, 2):
        part = TrainedPart(spec, MODEL, AdamW(OptimizerConfig()), devices=(CPU,) * degree, window=2)
        part.install(first)
        before, lent = output_of(part, MODEL), part.snapshot()
        passed(part, MODEL)
        part.prepare(part.gradient_sum() / 24, **NUMBERS)
        part.swap()
        after = output_of(part, MODEL)
        assert torch.equal(output_of(part, MODEL, version=0), before)
        assert not torch.equal(after, before)
        part.install(lent)
        assert torch.equal(output_of(part, MODEL), before)
        found.append(after)
    assert torch.equal(*found)


@pytest.mark.parametrize("way", ["at once", "again", "packed"])
def test_stage_in_strips_gives_the_same_bits_whenever_it_computes_them(way: str) -> None:
    """Weight gradients later or at once, activations kept or computed again; and packed rows are those of the whole."""
    model = MODEL.model_copy(update={"dropout": 0.1})
    plain, other = stage_of(model, 4, (CPU,) * 2), stage_of(model, 4, (CPU,) * 2)
    if way == "packed":
        positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
        with packed(positions):
            inside, whole = passed(plain, model), passed(stage_of(model), model)
        assert difference(inside, whole) <= BOUND
        assert not torch.equal(inside.output, passed(other, model).output)
        return
    other.checkpoint_activations(way == "again")
    assert all(map(torch.equal, passed(plain, model), passed(other, model, defers=way != "at once")))


def test_gradients_are_taken_out_again_and_bounded_alike_on_any_number_of_devices() -> None:
    for degree in (1, 2):
        part = stage_of(MODEL, 2, (CPU,) * degree)
        gradients = gradients_of(part)
        part.accumulate(WORK, gradients)
        part.reverse(WORK, gradients)
        assert not part.gradient_sum().any()


def gradients_of(part: TrainedPart) -> Gradients:
    x = torch.randn((2, 12, 32), generator=torch.Generator().manual_seed(2))
    _, graph = part.forward(x, seed=None)
    assert graph is not None
    return part.backward(graph, x)[1]


def test_each_device_holds_its_share_of_weights_and_sums() -> None:
    part = stage_of(MODEL, 4, (CPU,) * 4)
    assert part.strips is not None
    first, *others = (layout.elements for layout in part.strips.layouts)
    assert set(others) == {part.layout.elements * others[0] // part.layout.elements}
    assert first - others[0] == sum(-(-slot.elements // 16) * 16 for slot in part.layout.slots if "_norm." in slot.name)
    assert len(part.tensors()["gradients"]) == 4


@pytest.mark.parametrize(
    ("model", "number", "said"),
    [
        ({"dim": 48, "heads": 6}, 4, "a divisor of model.heads = 6"),
        ({"heads": 4, "kv_heads": 2}, 4, "a divisor of model.kv_heads = 2"),
        ({"heads": 4, "ffn_dim": 30}, 4, "a divisor of model.ffn_dim = 30"),
        ({"heads": 4, "lora": {"rank": 2}}, 2, "1 with model.lora"),
    ],
)
def test_number_that_a_model_cannot_be_cut_into_is_refused(model: dict[str, Any], number: int, said: str) -> None:
    document = {"model": {"dim": 32, "layers": 2} | model, "split": {"tensor": number},
                "tokenizer": {"digest": "0" * 64}}  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        parse_manifest(document, "test")


@pytest.mark.parametrize(
    ("changes", "number", "said"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 4, "has 2 key and value heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}, 8, "has 2 key and value heads"),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, 4, "has 50 columns of gate_proj"),
    ],
)
def test_number_that_a_foreign_model_cannot_be_cut_into_is_refused_where_it_is_founded(
    changes: dict[str, int], number: int, said: str
) -> None:
    model: HfConfig = foreign_model("llama", **changes)
    with pytest.raises(ConfigError, match=said):
        check_parts(model, SplitConfig(stages=2, tensor=number))

"""What a family that is nothing like our own meets: only what :mod:`swarm.models.family` says."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from swarm.config import parse_manifest
from swarm.errors import ConfigError
from swarm.ids import ENDS, MicrobatchId, PeerId, StepWork
from swarm.models import registry
from swarm.models.family import ModelFamily
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.checkpoints.parts import load_part, write_part
from swarm.state.snapshot import digest, initial_snapshot
from tests.harness.rigs.models import ForeignConfig, ForeignFamily, write_weights

THEIRS = json.dumps({"width": 16, "depth": 3, "vocab": 40})
MICROBATCH = MicrobatchId(PeerId("a"), "0" * 16, 0, 0)
TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ForeignConfig:
    members = dict(registry.FAMILIES) | {
        "foreign": registry.RegisteredFamily(ForeignConfig, ForeignFamily.__module__, ForeignFamily.__name__)
    }
    monkeypatch.setattr(registry, "FAMILIES", MappingProxyType(members))
    config = ForeignConfig(family="foreign", config=THEIRS, source=str(tmp_path / "model.safetensors"))
    family = family_of(config)
    write_weights(tmp_path / "model.safetensors", family.build(family.whole))
    return config


def trained(model: ForeignConfig, split: SplitConfig) -> list[TrainedPart]:
    family, found = family_of(model), []
    for spec in family.parts(split):
        part = TrainedPart(spec, model, AdamW(OptimizerConfig(lr=0.1, weight_decay=0.5)))
        part.install(initial_snapshot(spec.name, part.layout, family.initial_weights(0, spec)))
        found.append(part)
    return found


def one_microbatch(parts: list[TrainedPart]) -> float:
    """Through the stages and the private ends, and into their open steps."""
    *stages, ends = parts
    hidden, embedded = ends.embed(TOKENS)
    graphs = []
    for stage in stages:
        hidden, graph = stage.forward(hidden, seed=None)
        graphs.append(graph)
    loss_sum, _, grad, head = ends.loss(hidden, TOKENS + 1)
    for stage, graph in zip(reversed(stages), reversed(graphs), strict=True):
        assert graph is not None
        grad_input, gradients = stage.backward(graph, grad)
        assert grad_input is not None
        stage.accumulate(StepWork(stage.step + 1, MICROBATCH), gradients)
        grad = grad_input
    ends.accumulate(StepWork(ends.step + 1, MICROBATCH), [*ends.embed_backward(embedded, grad), *head])
    return loss_sum


def test_parts_of_another_family_have_the_gradients_of_its_whole(model: ForeignConfig) -> None:
    family: ModelFamily = family_of(model)
    whole = family.build(family.whole)
    install_weights(whole, family.initial_weights(0), requires_grad=True)
    total, _ = whole.loss(whole(TOKENS), TOKENS + 1)
    total.backward()
    parts = trained(model, SplitConfig(stages=2))
    assert one_microbatch(parts) == total.item()
    found = {name: view for part in parts for name, view in part.layout.views(part.gradient_sum()).items()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name
    assert set(found) - {name for name, _ in whole.named_parameters()} == {f"h.{i}.scale" for i in range(3)}


def test_step_of_another_family_leaves_its_buffers_and_keeps_what_is_tied(model: ForeignConfig, tmp_path: Path) -> None:
    parts = trained(model, SplitConfig(stages=2))
    before = {name: t.clone() for part in parts for name, t in part.snapshot().weights.items()}
    one_microbatch(parts)
    for part in parts:
        part.prepare(part.gradient_sum(), lr=0.1, clip=1.0, step=1)
        part.swap()
        for name, tensor in part.snapshot().weights.items():
            assert torch.equal(tensor, before[name]) == name.endswith(".scale"), name
        snapshot = part.snapshot()
        write_part(tmp_path, snapshot, {})
        assert digest(load_part(tmp_path, snapshot.step, snapshot.part)) == digest(snapshot)
    ends = parts[-1]
    assert ends.spec.name == ENDS
    assert ends.layout.names == ("wte.weight",)
    assert one_microbatch(parts) > 0, "the new weights are in both places"


def test_decay_is_decided_by_the_kind_of_module(model: ForeignConfig) -> None:
    family = family_of(model)
    assert family.decayed(family.build(family.whole)) == {f"h.{i}.mix.weight" for i in range(3)}
    ours = family_of(GptConfig(layers=1))
    found = ours.decayed(ours.build(ours.whole))
    assert {"embedding.weight", "norm.weight", "blocks.0.attention_norm.weight"}.isdisjoint(found)
    assert {"head.weight", "blocks.0.attention.query.weight"} <= found


def test_install_ties_again_what_was_tied_and_moves_no_graph(model: ForeignConfig) -> None:
    family = family_of(model)
    part = family.build(family.whole)
    install_weights(part, family.initial_weights(0))
    assert part.lm_head.weight is part.wte.weight
    assert torch.equal(part.h["1"].scale, family.initial_weights(0)["h.1.scale"])
    assert part.evaluate(TOKENS, TOKENS + 1)[1] == 16
    assert part.generate(torch.tensor([1]), 3, seed=0).shape == (3,)


# --- the manifest's [model] ------------------------------------------------------------------------------------------


def document(**model: Any) -> dict[str, Any]:
    return {"tokenizer": {"digest": "0" * 64}, "model": model}


@pytest.mark.parametrize("name", ["llama", "", 3, {}])
def test_family_that_there_is_not_is_a_mistake_that_names_those_that_there_are(name: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(family=name), "run.toml")
    assert caught.value.key == "model.family"
    assert caught.value.allowed == "'gpt' or 'hf'"


def test_keys_that_a_family_does_not_have_are_told_with_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(document(layer=3), "run.toml")
    assert caught.value.key == "model.layer"
    assert caught.value.remedy.startswith("Did you mean layers?")
    assert "rope_theta" in caught.value.allowed


def test_default_family_is_not_written_so_that_run_ids_stay() -> None:
    named, silent = (parse_manifest(document(**table), "a test") for table in ({"family": "gpt"}, {}))
    assert named == silent
    assert b"family" not in silent.canonical()
    assert named.run_id == silent.run_id

"""Adapters beside frozen weights: what is trained, what is frozen, and the same numbers as the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import StateError
from swarm.models.family import PartModule
from swarm.models.layout import install_weights, state_of
from swarm.models.lora import LoraFamily, install_base, merged
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.passes import run_backward, run_embedding, run_forward, run_head
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec, SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import initial_snapshot
from tests.harness.rigs.foreign import foreign_model
from tests.harness.rigs.models import MODEL
from tests.harness.rigs.optim import work

CPU, SPLIT = torch.device("cpu"), SplitConfig(stages=2)
MODELS: dict[str, Any] = {
    "gpt": lambda: MODEL.model_copy(update={"dropout": 0.0}),
    "llama in bfloat16": lambda: foreign_model("llama", compute="bfloat16"),
    **{name: lambda name=name: foreign_model(name) for name in ("llama", "gpt2", "mixtral")},
}
BASES: tuple[BaseDType, ...] = ("float32", "bfloat16", "nf4")


def with_lora(name: str, **said: Any) -> Any:
    return MODELS[name]().model_copy(update={"lora": LoraConfig(rank=8, **said)})


def family(model: Any) -> LoraFamily:
    found = family_of(model)
    assert isinstance(found, LoraFamily)
    return found


def stored(adapted: LoraFamily, spec: PartSpec) -> dict[str, Any]:
    base = adapted.base(spec)
    return base.views(base.pack(adapted.base_weights(0, spec, None)))


def adapters_for(adapted: LoraFamily, spec: PartSpec) -> dict[str, torch.Tensor]:
    """Not those of the beginning, which change nothing."""
    drawn = torch.Generator().manual_seed(5)
    begun = adapted.initial_weights(0, spec)
    return {name: torch.randn(tensor.shape, generator=drawn) * 0.05 for name, tensor in begun.items()}


def installed(adapted: LoraFamily, spec: PartSpec, adapters: dict[str, torch.Tensor]) -> PartModule:
    part = adapted.build(spec)
    install_base(part, stored(adapted, spec), CPU)
    install_weights(part, adapters, requires_grad=True, device=CPU)
    return part


def dense(adapted: LoraFamily, spec: PartSpec, adapters: dict[str, torch.Tensor]) -> PartModule:
    """The plain model with the merged weights."""
    part = adapted.inner.build(spec)
    install_weights(part, merged(adapted, spec, adapters, stored(adapted, spec)), requires_grad=True)
    return part


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", [name for name in MODELS if "bfloat16" not in name])
def test_adapted_parts_compute_what_the_merged_model_does(name: str, base: BaseDType) -> None:
    adapted = family(with_lora(name, base=base))
    first, *_, ends = adapted.parts(SPLIT)
    tokens = torch.randint(0, adapted.vocab_size, (2, 8), generator=torch.Generator().manual_seed(2))
    found = []
    for make in (installed, dense):
        stage, private = (make(adapted, spec, adapters_for(adapted, spec)) for spec in (first, ends))
        hidden, table = run_embedding(private, tokens, seed=None)
        output, graph = run_forward(stage, hidden, seed=None, graph=True)
        total, _, grad, _ = run_head(private, output, tokens)
        assert graph is not None
        back, gradients = run_backward(graph, grad)
        assert back is not None
        if make is installed:
            assert run_backward(table, back) == (None, [])  # the table is frozen
            assert {n for n, _ in gradients} == set(state_of(stage))
            assert all(n.endswith(("lora_a", "lora_b")) for n in state_of(stage))
            assert state_of(private) == {}
        found.append((total, output, back))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("name", ["gpt", "gpt2"])
def test_trained_part_of_two_steps_computes_each_with_its_own_adapters(name: str, base: BaseDType) -> None:
    """A step that is fed early has the parameters of the state before."""
    model = with_lora(name, base=base, dropout=0.1)
    adapted = family(model)
    spec, *_ = adapted.parts(SPLIT)
    part = TrainedPart(spec, model, AdamW(OptimizerConfig()), window=2)
    part.install_base(stored(adapted, spec))
    part.install(initial_snapshot(spec.name, part.layout, adapters_for(adapted, spec)))
    x, outputs = torch.randn(adapted.boundary(2, 8).shape, generator=torch.Generator().manual_seed(2)), []
    for step in range(1, 4):
        output, graph = part.forward(x, seed=7)
        assert graph is not None
        assert torch.equal(part.forward(x, seed=7, graph=False)[0], output)
        outputs.append(output)
        _, gradients = part.backward(graph, x)
        part.accumulate(work(0, step), gradients)
        part.prepare(part.gradient_sum(), lr=1e-2, clip=1.0, step=step)
        part.swap()
        late, _ = part.forward(x, seed=7, work=work(0, step + 1, early=True))
        assert torch.equal(late, output), "the parameters of the state before"
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("name", MODELS)
def test_adapters_begin_by_changing_nothing_and_alike_in_every_cut(name: str) -> None:
    adapted = family(with_lora(name, base="nf4"))
    whole = adapted.initial_weights(3, adapted.whole)
    cut = [adapted.initial_weights(3, spec) for spec in adapted.parts(SPLIT)]
    assert sum(map(len, cut)) == len(whole)
    for part in cut:
        for key, tensor in part.items():
            assert torch.equal(tensor, whole[key])
            assert bool(tensor.any()) == key.endswith("lora_a")


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_dropout_of_adapters_follows_from_the_seed_alone_however_it_is_computed(name: str) -> None:
    adapted = family(with_lora(name, dropout=0.3))
    first, second, _ = adapted.parts(SPLIT)
    x = torch.randn(adapted.boundary(2, 8).shape, generator=torch.Generator().manual_seed(2))

    def trained(parts: Sequence[PartSpec], seed: int | None, *, keeps: bool = True, defers: bool = False) -> Any:
        hidden, graphs = x, []
        for spec in parts:
            part = installed(adapted, spec, drawn[spec])
            part.activation_checkpointing = not keeps
            hidden, graph = run_forward(part, hidden, seed=seed, graph=True, defers=defers)
            graphs.append(graph)
        back, gradients = hidden * 0.1, dict[str, torch.Tensor]()
        for graph in reversed(graphs):
            back, found = run_backward(graph, back)
            gradients |= found
        return hidden, back, gradients

    whole = replace(first, last_layer=adapted.layers)
    every = adapters_for(adapted, whole)
    drawn = {spec: {name: every[name] for name in state_of(adapted.build(spec))} for spec in (first, second, whole)}
    wanted = trained((first, second), 7)
    others = [
        trained((first, second), 7, keeps=False),
        trained((first, second), 7, defers=True),
        trained((whole,), 7, keeps=False),
    ]
    for other in others:
        assert torch.equal(other[0], wanted[0])
        assert torch.equal(other[1], wanted[1])
        assert other[2].keys() == wanted[2].keys()
        assert all(torch.equal(gradient, wanted[2][name]) for name, gradient in other[2].items())
    assert not torch.equal(trained((first, second), 8)[0], wanted[0])
    undropped = trained((first, second), None)[0]
    adapted = family(with_lora(name))
    assert torch.equal(trained((first, second), 7)[0], undropped)


def test_frozen_weights_are_smaller_by_what_they_are_stored_in() -> None:
    sizes = {}
    for base in BASES:
        adapted = family(with_lora("llama", base=base))
        spec = adapted.parts(SPLIT)[0]
        cost = adapted.cost(spec, 8)
        sizes[base] = cost.frozen_bytes / cost.frozen
        assert adapted.base(spec).pack(adapted.base_weights(0, spec, None)).numel() * 4 == cost.frozen_bytes
    assert sizes["float32"] == pytest.approx(4.0, rel=0.01)
    assert sizes["bfloat16"] == pytest.approx(2.0, rel=0.05)
    assert sizes["nf4"] < 0.65  # small matrices: their norms count


def test_only_the_targets_get_adapters() -> None:
    adapted = family(with_lora("llama", targets=("q_proj", "mlp.down_proj")))
    paths = adapted.adapted(adapted.build(adapted.parts(SPLIT)[0]))
    assert {path.rpartition(".")[2] for path in paths} == {"q_proj", "down_proj"}


def test_part_without_a_target_has_one_gap_for_a_state() -> None:
    adapted = family(with_lora("llama", targets=("layers.0.self_attn.q_proj",)))
    first, second, _ = adapted.parts(SPLIT)
    assert [len(adapted.layout(adapted.build(spec)).slots) for spec in (first, second)] == [2, 0]
    layout = adapted.layout(adapted.build(second))
    assert layout.elements == 16
    assert layout.decay_runs() == ((0, 16, False),)
    assert not layout.flatten({}).any()


def test_frozen_weights_of_another_model_are_refused() -> None:
    adapted = family(with_lora("llama"))
    spec = adapted.parts(SPLIT)[0]
    part, base = adapted.build(spec), stored(adapted, spec)
    lacking = next(iter(base))
    with pytest.raises(StateError, match="not among the frozen weights"):
        install_base(part, {name: tensor for name, tensor in base.items() if name != lacking}, CPU)
    weights = adapted.base_weights(0, spec, None)
    with pytest.raises(StateError, match="same model"):
        adapted.base(spec).pack(weights | {lacking: torch.zeros(1)})


def test_frozen_weights_are_the_same_bytes_from_files_and_from_a_seed(tmp_path: Path) -> None:
    adapted = family(with_lora("gpt", base="nf4"))
    spec = adapted.parts(SPLIT)[1]
    once = adapted.base(spec).pack(adapted.base_weights(0, spec, tmp_path))
    again = adapted.base(spec).pack(adapted.base_weights(0, spec, None))
    assert torch.equal(once.view(torch.uint8), again.view(torch.uint8))

"""Activation checkpointing: the same bits from smaller graphs, and how large graphs are said to be."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from swarm.models.family import PartModule
from swarm.models.hf.hf_config import LEAK_WHEN_PACKED
from swarm.models.layout import install_weights, refresh_weights
from swarm.models.packing import packed
from swarm.models.passes import Graph, run_backward, run_forward, run_loss
from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, PartSpec, SplitConfig
from swarm.planning.costs import graph_bytes, graphs_under_way, needs_checkpointing
from tests.harness.rigs.foreign import SMALL, foreign_model
from tests.harness.rigs.models import MODEL

ROWS, TOKENS, SEED = 2, 12, 7
POSITIONS = torch.tensor([[at for length in lengths for at in range(length)] for lengths in ((5, 7), (8, 4))])
OURS = MODEL.model_copy(update={"layers": 4, "kv_heads": 2, "dropout": 0.1})
MODELS: dict[str, Any] = {
    "gpt": lambda: OURS,
    "gpt in bfloat16": lambda: OURS.model_copy(update={"compute": "bfloat16"}),
    "llama in bfloat16": lambda: foreign_model("llama", compute="bfloat16"),
    **{name: lambda name=name: foreign_model(name) for name in (*SMALL, "falcon:alibi", "gpt_neo", "jamba")},
}


class Held:
    """What a graph holds for its backward: the storages of tensors that are saved and alive, but those of the part."""

    def __init__(self, part: PartModule) -> None:
        own = (*part.parameters(), *part.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._saved: weakref.WeakSet[Any] = weakref.WeakSet()

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        kept = _Kept(tensor)
        self._saved.add(kept)
        return kept

    @property
    def bytes(self) -> int:
        storages = [kept.tensor.untyped_storage() for kept in self._saved]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for at, size in sizes.items() if at not in self._own)


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # with its history it would keep itself


def first_stage(model: ModelConfig, stages: int = 2) -> tuple[PartModule, PartSpec, dict[str, torch.Tensor]]:
    family = family_of(model)
    spec = family.parts(SplitConfig(stages=stages))[0]
    weights = family.initial_weights(0, spec)
    module = family.build(spec)
    install_weights(module, weights, requires_grad=True)
    return module, spec, weights


def hidden_for(model: ModelConfig, rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
    boundary = family_of(model).boundary(rows, tokens)
    hidden = torch.randn(boundary.shape, generator=torch.Generator().manual_seed(1))
    return hidden.to(getattr(torch, boundary.dtype))


def in_another_thread(graph: Graph, grad: torch.Tensor) -> Any:
    """The backward where nothing is known of packed rows, as in autograd's own thread for a GPU."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run_backward(graph, grad)))
    thread.start()
    thread.join()
    return found[0]


def same(one: Any, other: Any) -> bool:
    (grad, gradients), (grad2, gradients2) = one, other
    named = [name for name, _ in gradients] == [name for name, _ in gradients2]
    pairs = zip(gradients, gradients2, strict=True)
    return named and torch.equal(grad, grad2) and all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize(
    ("name", "positions"),
    [(name, positions) for name in MODELS for positions in (None, POSITIONS)[: 1 + (name not in LEAK_WHEN_PACKED)]],
    ids=lambda given: given.replace(" ", "-") if isinstance(given, str) else "stream" if given is None else "packed",
)
def test_graph_that_keeps_only_inputs_gives_the_bits_of_one_that_keeps_everything(
    name: str, positions: torch.Tensor | None
) -> None:
    model = MODELS[name]()
    module, spec, weights = first_stage(model)
    hidden, found, held = hidden_for(model), [], []
    for module.activation_checkpointing in (False, True):
        install_weights(module, weights, requires_grad=True)
        watch = Held(module)
        with packed(positions), watch.hooks():
            output, graph = run_forward(module, hidden, seed=SEED, graph=True)
        assert graph is not None
        held.append(watch.bytes)
        install_weights(module, {name: 1 + tensor for name, tensor in weights.items()}, requires_grad=True)
        found.append((output, in_another_thread(graph, torch.ones_like(output))))
        after = dict(module.named_parameters())
        assert all(torch.equal(after[name], (1 + weights[name]).to(after[name].dtype)) for name in after)
    assert torch.equal(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert all(gradient.abs().max() > 0 for _, gradient in found[0][1][1][:1])
    assert held[1] == (spec.last_layer - spec.first_layer) * hidden.nbytes < held[0] / 8


@pytest.mark.parametrize("again", [False, True])
def test_backward_after_weights_were_changed_in_place_is_refused(again: bool) -> None:
    module, _, weights = first_stage(OURS)
    module.activation_checkpointing = again
    output, graph = run_forward(module, hidden_for(OURS), seed=SEED, graph=True)
    assert graph is not None
    refresh_weights(module, weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_backward(graph, output)


def test_last_stage_with_head_gives_the_same_loss_and_gradients() -> None:
    family = family_of(OURS)
    spec = family.parts(SplitConfig(stages=2, ends="hosted"))[-1]
    module = family.build(spec)
    install_weights(module, family.initial_weights(0, spec), requires_grad=True)
    targets, found = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS), []
    for module.activation_checkpointing in (False, True):
        loss_sum, counted, graph = run_loss(module, hidden_for(OURS), targets, seed=SEED, graph=True)
        assert graph is not None
        found.append((loss_sum, counted, run_backward(graph, None)))
    assert found[0][:2] == found[1][:2]
    assert same(found[0][2], found[1][2])


def test_tokens_and_frozen_weights_have_no_gradient_with_it_either() -> None:
    family = family_of(OURS)
    spec = family.parts(SplitConfig(stages=2, ends="hosted"))[0]
    module, tokens = family.build(spec), torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    found = []
    for module.activation_checkpointing in (False, True):
        install_weights(module, family.initial_weights(0, spec), requires_grad=True)
        named = dict(module.named_parameters())
        named["embedding.weight"].requires_grad_(False)
        named["blocks.0.attention.query.weight"].requires_grad_(False)
        output = module(tokens, SEED)
        wanted = [parameter for parameter in named.values() if parameter.requires_grad]
        found.append(torch.autograd.grad(output.sum(), wanted))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_forward_without_graph_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, _ = first_stage(OURS)
    module.activation_checkpointing = True
    monkeypatch.setattr("swarm.models.family.recomputed", None)
    run_forward(module, hidden_for(OURS), seed=SEED, graph=False)
    with pytest.raises(TypeError):
        run_forward(module, hidden_for(OURS), seed=SEED, graph=True)


# --- how large graphs are --------------------------------------------------------------------------------------------


WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "model",
    [
        lambda: MODEL.model_copy(update={"dim": 128, "layers": 4, "context": 64}),
        lambda: MODEL.model_copy(update={"dim": 128, "layers": 4, "context": 64, "compute": "bfloat16", "kv_heads": 1}),
        lambda: foreign_model("llama", **WIDE),
        lambda: foreign_model("qwen3", compute="bfloat16", **(WIDE | {"head_dim": 32})),
        lambda: foreign_model("gemma2", compute="bfloat16", **(WIDE | {"head_dim": 32})),
        lambda: foreign_model("phi3", **WIDE),
        lambda: foreign_model("gpt2", n_embd=128),
    ],
    ids=["gpt", "gpt-bfloat16", "llama", "qwen3", "gemma2", "phi3", "gpt2"],
)
def test_bytes_of_a_graph_are_predicted_from_shapes(model: Any) -> None:
    model = model()
    module, spec, _ = first_stage(model)
    watch, hidden = Held(module), hidden_for(model, ROWS, model.context)
    with watch.hooks():
        _, graph = run_forward(module, hidden, seed=None, graph=True)
    assert graph is not None
    assert 0.6 < graph_bytes(model, spec, ROWS) / watch.bytes < 1.5
    assert graph_bytes(model, spec, ROWS, checkpointing=True) == 2 * hidden.nbytes


@pytest.mark.parametrize(
    ("microbatches", "replicas", "at_once", "expected"),
    [(16, 1, 32, 16), (16, 3, 32, 6), (256, 2, 32, 16), (256, 0, 320, 256), (1, 8, 32, 1), (16, 2, 0, 1)],
)
def test_graphs_under_way_are_a_replicas_share(microbatches: int, replicas: int, at_once: int, expected: int) -> None:
    assert graphs_under_way(microbatches, replicas, at_once) == expected


def test_checkpointing_is_needed_when_graphs_take_more_than_half_of_what_is_left() -> None:
    assert [needs_checkpointing(10, 5, left) for left in (0, 99, 100, 1000)] == [True, True, False, False]

"""Cutting a model changes no bit: split forward and backward against the whole model in one process."""

from __future__ import annotations

import pytest
import torch

from swarm.ids import ENDS
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.passes import run_backward, run_embedding, run_forward, run_head, run_loss
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec, SplitConfig

MODEL = GptConfig(vocab_size=300, dim=48, layers=4, heads=4, kv_heads=2, context=24, dropout=0.1)
SEED = 5
LEARNABLE = ("embedding.weight", "blocks.0.attention.query.weight", "blocks.3.feed_forward.down.weight", "head.weight")


def batch(model: GptConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (3, model.context), generator=generator)
    targets = torch.randint(0, model.vocab_size, (3, model.context), generator=generator)
    targets[0, :5] = -1
    return tokens, targets


def whole(model: GptConfig, seed: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss sum and gradients of plain autograd over the whole model."""
    family = family_of(model)
    gpt = family.build(family.whole)
    install_weights(gpt, family.initial_weights(0), requires_grad=True)
    tokens, targets = batch(model)
    total, counted = gpt.loss(gpt(tokens, seed), targets)
    assert counted == targets.ge(0).sum()
    total.backward()
    return total.item(), {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}


def parts(model: GptConfig, split: SplitConfig) -> tuple[list[PartSpec], dict[str, object]]:
    weights = family_of(model).initial_weights(0)
    specs = family_of(model).parts(split)
    modules = {}
    for spec in specs:
        module = modules[spec.name] = family_of(model).build(spec)
        install_weights(module, weights, requires_grad=True)
    return list(specs), modules


def cut_private(model: GptConfig, stages: int, seed: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    specs, modules = parts(model, SplitConfig(stages=stages))
    tokens, targets = batch(model)
    hidden, embedded = run_embedding(modules[ENDS], tokens, seed=seed)
    graphs = []
    for spec in specs[:-1]:
        hidden, graph = run_forward(modules[spec.name], hidden, seed=seed, graph=True)
        graphs.append(graph)
    loss_sum, _, grad, found = run_head(modules[ENDS], hidden, targets)
    gradients = dict(found)
    for graph in reversed(graphs):
        grad, found = run_backward(graph, grad)
        gradients |= dict(found)
    gradients |= dict(run_backward(embedded, grad)[1])
    return loss_sum, gradients


def cut_hosted(model: GptConfig, stages: int, seed: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    specs, modules = parts(model, SplitConfig(stages=stages, ends="hosted"))
    hidden, targets = batch(model)
    graphs = []
    for spec in specs[:-1]:
        hidden, graph = run_forward(modules[spec.name], hidden, seed=seed, graph=True)
        graphs.append(graph)
    loss_sum, _, graph = run_loss(modules[specs[-1].name], hidden, targets, seed=seed, graph=True)
    grad, found = run_backward(graph, None)
    gradients = dict(found)
    for graph in reversed(graphs):
        grad, found = run_backward(graph, grad)
        gradients |= dict(found)
    assert grad is None
    return loss_sum, gradients


@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [cut_private, cut_hosted])
def test_split_of_any_kind_gives_the_whole_models_bits(cut, stages: int, seed: int | None) -> None:
    loss, expected = whole(MODEL, seed)
    cut_loss, found = cut(MODEL, stages, seed)
    assert cut_loss == loss
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []
    assert all(found[name].abs().max() > 0 for name in LEARNABLE)


@pytest.mark.parametrize("cut", [cut_private, cut_hosted])
def test_split_in_bfloat16_gives_the_whole_models_bits(cut) -> None:
    model = MODEL.model_copy(update={"compute": "bfloat16"})
    loss, expected = whole(model, SEED)
    cut_loss, found = cut(model, 2, SEED)
    assert cut_loss == loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert abs(loss / whole(MODEL, SEED)[0] - 1) < 1e-2


def test_network_buffer_that_is_not_aligned_gives_the_same_bits() -> None:
    specs, modules = parts(MODEL, SplitConfig(stages=2))
    module = modules[specs[0].name]
    aligned = torch.randn((2, 8, MODEL.dim), generator=torch.Generator().manual_seed(3))
    memory = torch.zeros(aligned.numel() + 1)
    shifted = memory[1:].view(aligned.shape).copy_(aligned)
    outputs = [run_forward(module, x, seed=None, graph=False)[0] for x in (aligned, shifted)]
    assert torch.equal(*outputs)

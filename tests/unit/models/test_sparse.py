"""Sparse matrices: the same bits as whole ones with zeros, in a part that holds survivors alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.ids import PartName
from swarm.membership.memory import storage_bytes
from swarm.models.family import ModelFamily
from swarm.models.layout import install_weights
from swarm.models.passes import Gradients, run_backward, run_forward
from swarm.models.registry import family_of
from swarm.models.sparse import spread
from swarm.models.spec import SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.planning.costs import bytes_by_kind
from swarm.state.snapshot import initial_snapshot
from tests.harness.rigs.models import MODEL
from tests.harness.rigs.optim import work

SPARSE = MODEL.model_copy(update={"sparsity": 0.75})
MIXED = {"layers": 4, "experts": 4, "top_k": 2, "expert_every": 2}
ONE = SplitConfig(stages=1, ends="private")


def whole(family: ModelFamily, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights in the shapes that a model has which is not sparse."""
    shapes = {name: p.shape for name, p in family.dense(family.whole).named_parameters()}
    return {n: one if one.shape == shapes[n] else spread(n, one, shapes[n][1]) for n, one in weights.items()}


def backward(part: Any, again: bool) -> tuple[Tensor, Tensor, Gradients]:
    """Output, gradient of the input, and gradients of the parameters of a pass."""
    part.activation_checkpointing = again
    x, back = (torch.randn(3, 16, SPARSE.dim, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    output, graph = run_forward(part, x, seed=7, graph=True, defers=True)
    assert graph is not None
    of_input, gradients = run_backward(graph, back)
    assert of_input is not None
    return output, of_input, gradients


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "dropout": 0.1}, {"compute": "bfloat16"}, MIXED])
@pytest.mark.parametrize("again", [False, True])
def test_sparse_part_computes_the_bits_of_whole_matrices_with_zeros(changes: dict[str, Any], again: bool) -> None:
    """Also of survivors' gradients, and after activation checkpointing."""
    family = family_of(SPARSE.model_copy(update=changes))
    (spec, _) = family.parts(ONE)
    sparse, dense, weights = family.build(spec), family.dense(spec), family.initial_weights(0, spec)
    install_weights(sparse, weights, requires_grad=True)
    install_weights(dense, whole(family, weights), requires_grad=True)
    output, of_input, gradients = backward(sparse, again)
    expected, of_expected, every = backward(dense, again)
    assert torch.equal(output, expected)
    assert torch.equal(of_input, of_expected)
    found, alive = dict(gradients), 0
    for name, gradient in every:
        if found[name].shape == gradient.shape:
            assert torch.equal(found[name], gradient)
            continue
        there = spread(name, torch.ones_like(found[name]), gradient.shape[1])
        assert torch.equal(spread(name, found[name], gradient.shape[1]), gradient * there)
        assert there.sum(1).unique().tolist() == [gradient.shape[1] / 4], "each row has as many"
        assert (there.sum(0) > 0).float().mean() > 0.9, "rows have others"
        alive += 1
    assert alive >= 7 * (spec.last_layer - spec.first_layer)


def test_copy_of_a_sparse_part_uses_its_own_weights() -> None:
    """As one does that holds the parameters of two steps."""
    family = family_of(SPARSE)
    (spec, _) = family.parts(ONE)
    part = family.build(spec)
    install_weights(part, family.initial_weights(0, spec), requires_grad=True)
    other = copy.deepcopy(part)
    install_weights(other, family.initial_weights(1, spec), requires_grad=True)
    before = backward(part, again=False)[0]
    assert not torch.equal(backward(other, again=False)[0], before)
    assert torch.equal(backward(part, again=False)[0], before)


@pytest.mark.parametrize("changes", [{}, MIXED])
def test_sparse_part_holds_survivors_alone_and_says_so_before(changes: dict[str, Any]) -> None:
    """A quarter of the matrices' bytes, in the state, in the sums of gradients, and beside them a byte each."""
    model = SPARSE.model_copy(update=changes)
    family, plain = family_of(model), family_of(model.model_copy(update={"sparsity": 0.0}))
    (spec, _) = family.parts(ONE)
    cost, of_plain = family.cost(spec, model.context), plain.cost(spec, model.context)
    matrices = sum(p.numel() for n, p in plain.build(spec).named_parameters() if p.ndim == 2 and "router" not in n)
    assert of_plain.parameters - cost.parameters == matrices * 3 / 4
    assert cost.forward_flops == of_plain.forward_flops, "whole matrices are multiplied with"
    part = TrainedPart(spec, model, AdamW(OptimizerConfig()))
    part.install(initial_snapshot(PartName("stage-0"), part.layout, family.initial_weights(0, spec)))
    x = torch.randn(2, 8, model.dim)
    _, graph = part.forward(x, seed=1)
    assert graph is not None
    part.accumulate(work(1), part.backward(graph, x)[1])
    del graph
    held, said = storage_bytes(part.tensors()), bytes_by_kind(model)
    rotary = 2 * 4 * model.context * model.head_dim // 2
    assert held["weights"] <= said["weights"] * part.layout.elements + rotary
    for kind in ("optimizer", "gradients"):
        assert held[kind] == said[kind] * part.layout.elements
    assert 0 <= part.layout.elements - cost.parameters < 16 * len(part.layout.slots)

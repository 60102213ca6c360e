from __future__ import annotations

import pytest
import torch

from swarm.errors import BugError, Violation
from swarm.ids import ENDS
from swarm.models.layout import install_weights
from swarm.models.passes import run_backward, run_embedding, run_forward, run_head, run_loss
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec, SplitConfig
from tests.harness.rigs.models import TINY

TOKENS = torch.zeros((1, 8), dtype=torch.int64)


def part(index: int, ends: str = "hosted"):
    spec: PartSpec = family_of(TINY).parts(SplitConfig(stages=2, ends=ends))[index]
    module = family_of(TINY).build(spec)
    install_weights(module, family_of(TINY).initial_weights(0), requires_grad=True)
    return module


@pytest.mark.parametrize("bad", [-1, 300, 2**40])
def test_tokens_outside_the_vocabulary_are_a_violation(bad: int) -> None:
    tokens = TOKENS.clone()
    tokens[0, 3] = bad
    with pytest.raises(Violation, match="outside 0 … 299"):
        run_forward(part(0), tokens, seed=None, graph=True)
    with pytest.raises(Violation):
        run_embedding(part(2, "private"), tokens, seed=None)


def test_targets_below_zero_are_not_counted_and_beyond_the_vocabulary_refused() -> None:
    hidden = torch.ones((1, 8, 16))
    targets = TOKENS.clone()
    targets[0, :6] = -100
    assert run_loss(part(1), hidden, targets, seed=None, graph=False)[1] == 2
    with pytest.raises(Violation):
        run_loss(part(1), hidden, targets + 300, seed=None, graph=False)


def test_targets_that_all_are_ignored_give_zero_loss_and_zero_gradients() -> None:
    loss_sum, counted, grad, gradients = run_head(part(2, "private"), torch.ones((1, 8, 16)), TOKENS - 1)
    assert (loss_sum, counted) == (0.0, 0)
    assert grad.abs().max() == 0
    assert all(gradient.abs().max() == 0 for _, gradient in gradients)


def test_graph_that_was_spent_is_a_bug() -> None:
    _, graph = run_forward(part(0), TOKENS, seed=None, graph=True)
    run_backward(graph, torch.ones((1, 8, 16)))
    with pytest.raises(BugError, match="second backward"):
        run_backward(graph, torch.ones((1, 8, 16)))


def test_graph_of_old_weights_stays_right_after_new_ones_are_installed() -> None:
    module, x = part(1), torch.linspace(-1, 1, 128).view(1, 8, 16)
    grad = torch.ones_like(x)
    expected, _ = run_backward(run_forward(module, x, seed=None, graph=True)[1], grad)
    _, graph = run_forward(module, x, seed=None, graph=True)
    install_weights(module, family_of(TINY).initial_weights(99), requires_grad=True)
    found, _ = run_backward(graph, grad)
    assert torch.equal(found, expected)


def test_weights_without_grad_give_no_graph_but_a_bug() -> None:
    module = family_of(TINY).build(family_of(TINY).parts(SplitConfig(stages=2))[-1])
    assert family_of(TINY).parts(SplitConfig(stages=2))[-1].name == ENDS
    install_weights(module, family_of(TINY).initial_weights(0))
    with pytest.raises(BugError, match="requires_grad"):
        run_embedding(module, TOKENS, seed=None)

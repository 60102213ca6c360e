"""Experts token by token: the layer's formula, what it has room for, what it counts, whatever computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.ids import ENDS
from swarm.models.balance import weighed
from swarm.models.experts import STEERED, TALLY, TOLD, Experts
from swarm.models.family import PartModule
from swarm.models.gpt import FeedForward
from swarm.models.gpt_config import BalanceConfig, GptConfig
from swarm.models.layout import install_weights
from swarm.models.passes import run_backward, run_forward
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.accumulate import length_of
from swarm.planning.costs import palm_part_flops
from tests.harness.rigs.models import MODEL

MIXED = MODEL.model_copy(update={"layers": 4, "experts": 4, "top_k": 2, "balance": BalanceConfig(kind="bias")})
ROWS, LENGTH = 3, 16


def with_experts(**changes: Any) -> GptConfig:
    return MIXED.model_copy(update=changes)


def layer(model: GptConfig, seed: int = 0) -> Experts:
    """One layer's experts, whose router prefers some."""
    made = Experts(model, 1, lambda: FeedForward(model))
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(p.shape, generator=generator) / 3 for name, p in made.named_parameters()}
    install_weights(made, weights | {"crowding": torch.zeros(2)} if model.capacity else weights, requires_grad=True)
    return made


def states(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, LENGTH, MIXED.dim, generator=torch.Generator().manual_seed(seed))


def token_by_token(experts: Experts, model: GptConfig, x: Tensor, room: int) -> tuple[Tensor, list[int], int]:
    """The same written out: outputs, how many tokens chose each expert, how many choices found no room."""
    rows, chosen, full = [], [0] * model.experts, 0
    for token in x.view(-1, x.shape[-1]):
        likely = experts.router(token).softmax(-1)
        ranked = likely if experts.bias is None else likely + experts.bias
        row = torch.zeros_like(token)
        for number in sorted(ranked.topk(model.top_k).indices.tolist()):
            chosen[number] += 1
            if chosen[number] > room:
                full += 1
                continue
            row = row + experts.experts[str(number)](token) * likely[number]
        rows.append(row)
    return torch.stack(rows).view(x.shape), chosen, full


@pytest.mark.parametrize("capacity", [0.0, 1.0, 1.25])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("limited", [True, False])
def test_layer_is_what_each_token_makes_of_its_experts(top_k: int, capacity: float, limited: bool) -> None:
    model = with_experts(top_k=top_k, capacity=capacity)
    experts, x, back = layer(model), states().requires_grad_(), states(2)
    room = model.room(ROWS * LENGTH) if limited else ROWS * LENGTH
    expected, chosen, full = token_by_token(experts, model, x, room)
    found = experts(x, limited, 0.0)
    torch.testing.assert_close(found, expected)
    assert (full > 0) is (limited and capacity > 0), "the router prefers some"
    named = {name: p for name, p in experts.named_parameters() if name not in ("bias", "crowding")}
    wanted = torch.autograd.grad(expected, [x, *named.values()], back, materialize_grads=True)
    tallies = [p for p in (experts.bias, experts.crowding) if p is not None]
    got = torch.autograd.grad(found, [x, *named.values(), *tallies], back)
    for one, other in zip(got, wanted, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    counts = [(tally / TALLY).tolist() for tally in got[len(wanted) :]]
    assert counts == [chosen, *([[full, top_k * ROWS * LENGTH]] if capacity else [])]


def test_expert_that_nobody_chose_has_a_gradient_of_zeros() -> None:
    experts = layer(with_experts(top_k=1))
    with torch.no_grad():
        experts.bias.copy_(torch.tensor([0.0, 0.0, -9.0, 0.0]))  # type: ignore[union-attr]
    found = torch.autograd.grad(experts(states(), True, 0.0).sum(), list(experts.experts["2"].parameters()))
    assert all(not gradient.any() for gradient in found)


Passed = tuple[Tensor, Tensor, dict[str, Tensor]]


def passed(part: PartModule, x: Tensor, back: Tensor, *, defers: bool = False) -> Passed:
    with weighed(40):
        output, graph = run_forward(part, x, seed=5, graph=True, defers=defers)
    assert graph is not None
    gradient, found = run_backward(graph, back)
    assert gradient is not None
    return output, gradient, dict(found)


@pytest.mark.parametrize("kind", ["aux", "bias", "none"])
def test_whatever_computes_a_stage_gives_the_same_bits(kind: str) -> None:
    family = family_of(with_experts(balance=BalanceConfig(kind=kind, weight=0.5)))
    weights = family.initial_weights(0)
    whole, first, second = (
        family.build(spec)
        for stages in (1, 2)
        for spec in family.parts(SplitConfig(stages=stages))
        if spec.name != ENDS
    )
    for part in (whole, first, second):
        install_weights(part, weights, requires_grad=True)
    x, back = states(), states(2)
    output, gradient, found = passed(whole, x, back)
    between, _ = run_forward(first, x, seed=5, graph=False)
    cut, middle, late = passed(second, between, back)
    _, begun, early = passed(first, x, middle)
    whole.activation_checkpointing = True
    for other in (passed(whole, x, back), (cut, begun, early | late), passed(whole, x, back, defers=True)):
        assert torch.equal(other[0], output)
        assert torch.equal(other[1], gradient)
        assert other[2].keys() == found.keys()
        assert all(torch.equal(other[2][name], found[name]) for name in found)


def test_balance_loss_is_felt_by_the_router_as_much_as_it_weighs() -> None:
    model = with_experts(top_k=1, balance=BalanceConfig(weight=0.5))
    experts, x, back = layer(model), states(), states(2)
    weight = experts.router.weight

    def of_router(much: float) -> Tensor:
        (found,) = torch.autograd.grad(experts(x, False, much), [weight], back)
        return found

    scores = x.view(-1, model.dim) @ weight.T
    share = torch.nn.functional.one_hot((scores.softmax(-1) + experts_bias(experts)).argmax(-1), 4).float().mean(0)
    (alone,) = torch.autograd.grad(20 * 4 * (share * scores.softmax(-1).mean(0)).sum(), [weight])
    torch.testing.assert_close(of_router(20.0) - of_router(0.0), alone, rtol=1e-3, atol=1e-5)


def experts_bias(experts: Experts) -> Tensor:
    return torch.zeros(4) if experts.bias is None else experts.bias.detach()


def test_tallies_are_part_of_the_state_and_change_no_norm() -> None:
    family = family_of(MIXED)
    spec = family.parts(SplitConfig(stages=2))[1]
    part = family.build(spec)
    layout = family.layout(part)
    ends = {name.partition("3")[2] for name in layout.steered | layout.told}
    assert (ends, len(layout.steered), len(layout.told)) == ({STEERED, TOLD}, 1, 1)
    assert not (layout.steered | layout.told) & (layout.decayed | layout.matrices | layout.buffers)
    install_weights(part, family.initial_weights(0), requires_grad=True)
    _, _, found = passed(part, states(), states(2))
    without = [(name, gradient) for name, gradient in found.items() if name not in layout.steered | layout.told]
    assert length_of([*found.items()]) == pytest.approx(length_of(without), rel=1e-15)
    assert len(without) == len(found) - 2


def test_cost_counts_all_experts_to_hold_and_those_of_a_token_to_compute() -> None:
    dense, mixed = (family_of(model) for model in (MODEL.model_copy(update={"layers": 4}), MIXED))
    spec = mixed.whole
    held = sum(slot.elements for slot in mixed.layout(mixed.build(spec)).slots)
    cost, plain = mixed.cost(spec, LENGTH), dense.cost(spec, LENGTH)
    feed_forward, router = 3 * MIXED.dim * MIXED.feed_forward_dim, 4 * MIXED.dim
    assert cost.parameters == held
    assert cost.forward_flops - plain.forward_flops == 2 * 2 * (feed_forward + router)
    assert cost.idle == 2 * 2 * feed_forward
    assert palm_part_flops(MIXED, spec, LENGTH) < 6 * cost.parameters
    assert mixed.used_share("blocks.1.feed_forward.experts.0.up.weight", torch.empty(0)) == 0.5

"""Models of one base as one: what a merge is, and what is learnt of how much each tensor weighs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from swarm.models import merging
from swarm.models.family import PartModule
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.merging import TextRows, learn, learning_bytes, linear, weighed
from swarm.models.registry import family_of

FAMILY = family_of(GptConfig(vocab_size=300, dim=16, layers=2, heads=2, context=8))
Models = list[dict[str, Tensor]]


def text(seed: int, low: int, high: int) -> TextRows:
    tokens = torch.randint(low, high, (24, 9), generator=torch.Generator().manual_seed(seed))
    return TextRows(tokens[:, :-1], tokens[:, 1:])


TEXTS = (text(1, 0, 16), text(2, 16, 32))


def trained(begin: dict[str, Tensor], on: TextRows) -> dict[str, Tensor]:
    """Return the weights after some steps on a text."""
    model = whole(begin, requires_grad=True)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10):
        adam.zero_grad()
        on.loss(model).backward()
        adam.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole(weights: dict[str, Tensor], **how: bool) -> PartModule:
    model = FAMILY.build(FAMILY.whole)
    install_weights(model, {name: tensor.clone() for name, tensor in weights.items()}, **how)
    return model


@pytest.fixture(scope="module")
def models() -> Models:
    """A base, and what two sites made of it."""
    base = FAMILY.initial_weights(0)
    return [base, *(trained(base, one) for one in TEXTS)]


@pytest.mark.parametrize("site", [0, 1])
def test_site_with_all_the_weight_is_itself_to_the_bit(models: Models, site: int) -> None:
    models[1 + site]["norm.weight"][0] = -0.0
    found = weighed(models, linear(models[0], [float(site == number) for number in range(2)]))
    assert found.keys() == models[0].keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.int32), models[1 + site][name].view(torch.int32))


def test_linear_merge_is_the_mean_by_preference(models: Models) -> None:
    for name, tensor in weighed(models, linear(models[0], [0.7, 0.3])).items():
        base, first, second = (one[name] for one in models)
        assert torch.allclose(tensor, base + 0.7 * (first - base) + 0.3 * (second - base), atol=1e-6)


def test_what_is_learnt_descends_along_the_gradient_of_the_functional_merge(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through autograd with respect to the scales, where the product adds along each site's change."""
    seen: list[Tensor] = []
    gradient = merging._gradient

    def spied(*asked: object) -> Tensor:
        seen.append(gradient(*asked))  # type: ignore[arg-type]
        return seen[-1]

    one_row = [one.take(slice(0, 1)) for one in TEXTS]
    monkeypatch.setattr(merging, "_gradient", spied)
    learn(whole(models[0]), models, [0.4, 0.6], one_row, lambda step: None)
    scales = torch.tensor([0.4, 0.6])[:, None].repeat(1, len(models[0])).requires_grad_()
    base, *sites = models
    tensors = {
        name: base[name] + sum(scales[row, column] * (site[name] - base[name]) for row, site in enumerate(sites))
        for column, name in enumerate(base)
    }
    model = whole(base)
    total = torch.zeros(())
    for weight, rows in zip((0.4, 0.6), one_row, strict=True):
        logits = functional_call(_Logits(model), {f"part.{name}": one for name, one in tensors.items()}, rows.inputs)
        total = total + weight * torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten())
    (expected,) = torch.autograd.grad(total, scales)
    assert len(seen) == merging.STEPS
    assert torch.allclose(seen[0], expected, rtol=1e-4, atol=1e-6)


class _Logits(torch.nn.Module):
    def __init__(self, part: PartModule) -> None:
        super().__init__()
        self.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        return self.part.logits(self.part(tokens))


@pytest.mark.parametrize("preference", [(0.3, 0.7), (0.7, 0.3)])
def test_learnt_merge_has_a_lower_loss_by_preference_than_the_linear_one(
    models: Models, preference: tuple[float, float]
) -> None:
    def loss(shares: merging.Shares) -> float:
        model = whole(weighed(models, shares))
        return sum(weight * one.loss(model).item() for weight, one in zip(preference, TEXTS, strict=True))

    steps: list[int] = []
    found = learn(whole(models[0]), models, preference, TEXTS, steps.append)
    assert steps == list(range(merging.STEPS))
    assert found.keys() == models[0].keys()
    assert all(sum(shares) == pytest.approx(1.0) for shares in found.values())
    assert loss(found) < loss(linear(models[0], preference))
    assert learn(whole(models[0]), models, preference, TEXTS, steps.append) == found


def test_learning_holds_base_sites_the_merge_and_its_gradient() -> None:
    assert learning_bytes(1000, 2) == 5 * 4000

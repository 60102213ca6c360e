"""The loss of large vocabularies: what is cut into pieces, that it stays the loss, and that no more logits exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peers.presets import load_preset, preset_names
from swarm.config import parse_manifest
from swarm.errors import BugError
from swarm.models import loss
from swarm.models.family import PartModule
from swarm.models.layout import install_weights
from swarm.models.loss import LOGITS_AT_ONCE, pieces
from swarm.models.packing import packed
from swarm.models.passes import run_backward, run_head, run_loss
from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, SplitConfig
from tests.harness.rigs.foreign import foreign_model
from tests.harness.rigs.models import MODEL

ROWS, TOKENS = 3, 12
FOREIGN = ("llama:tied", "gemma2", "cohere", "opt:projected", "bloom", "lfm2")
"""A tied head, soft caps, a scaled one, one behind a projection, and two that make masks of their own."""


def ends_of(model: ModelConfig) -> tuple[PartModule, torch.Tensor, torch.Tensor]:
    """The private ends of a model, hidden states and targets for them."""
    family = family_of(model)
    spec = family.parts(SplitConfig(stages=2))[-1]
    module, generator = family.build(spec), torch.Generator().manual_seed(0)
    install_weights(module, family.initial_weights(0, spec), requires_grad=True)
    boundary = family.boundary(ROWS, TOKENS)
    hidden = torch.randn(boundary.shape, generator=generator).to(getattr(torch, boundary.dtype))
    targets = torch.randint(0, model.vocab_size, (ROWS, TOKENS), generator=generator)
    targets[0, :5] = -1
    return module, hidden, targets


def at_once(monkeypatch: pytest.MonkeyPatch, model: ModelConfig, tokens: int) -> None:
    """Have the logits of so many tokens at a time."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", tokens * model.vocab_size + 1)


def largest(module: PartModule, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the head is given at a time, from now on."""
    seen: list[int] = []
    logits = module.logits

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0] * hidden.shape[1])
        return logits(hidden)

    monkeypatch.setattr(module, "logits", counting)
    return seen


def far(found: Any, expected: Any) -> float:
    """The largest difference of two results of :func:`run_head`, in parts of the largest number."""
    assert found[1] == expected[1]
    pairs = [(found[2], expected[2]), *((a, b) for (_, a), (_, b) in zip(found[3], expected[3], strict=True))]
    assert [name for name, _ in found[3]] == [name for name, _ in expected[3]]
    assert all(a.dtype == b.dtype for a, b in pairs)
    worst = max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)
    return max(worst, abs(found[0] / expected[0] - 1))


# --- what is cut -----------------------------------------------------------------------------------------------------


def manifests() -> Iterator[Any]:
    yield parse_manifest({"tokenizer": {"digest": "0" * 64}}, "the defaults")
    for name in preset_names():
        yield parse_manifest(load_preset(name) | {"tokenizer": {"digest": "0" * 64}}, name)


def test_runs_of_presets_and_defaults_are_not_cut() -> None:
    for manifest in manifests():
        model = manifest.model
        assert len(pieces(manifest.batch.microbatch_size, model.context, model.vocab_size)) == 1


@pytest.mark.parametrize(
    ("rows", "sequence", "vocab_size", "count"),
    [(2, 1024, 50_257, 4), (8, 2048, 128_256, 64), (1, 1, 1 << 26, 1), (64, 512, 8_192, 8), (3, 100, 1 << 24, 150)],
)
def test_pieces_are_every_token_once_and_no_more_than_fit(
    rows: int, sequence: int, vocab_size: int, count: int
) -> None:
    seen, cut = torch.zeros(rows, sequence, dtype=torch.int64), pieces(rows, sequence, vocab_size)
    for piece in cut:
        assert seen[piece].numel() * vocab_size <= max(LOGITS_AT_ONCE, vocab_size)
        seen[piece] += 1
    assert (seen == 1).all()
    assert len(cut) == count


# --- that it stays the loss ------------------------------------------------------------------------------------------


def test_what_fits_at_once_has_the_bits_of_a_plain_cross_entropy() -> None:
    module, hidden, targets = ends_of(MODEL)
    inputs = hidden.clone().requires_grad_()
    labels = targets.masked_fill(targets < 0, -100).reshape(-1)
    total = F.cross_entropy(module.logits(inputs).view(-1, MODEL.vocab_size), labels, reduction="sum")
    parameters = module.parameters_of("head")
    expected = torch.autograd.grad(total, (inputs, *parameters.values()))
    loss_sum, counted, grad, gradients = run_head(module, hidden, targets)
    assert (loss_sum, counted) == (total.item(), ROWS * TOKENS - 5)
    assert torch.equal(grad, expected[0])
    assert all(torch.equal(a, b) for (_, a), b in zip(gradients, expected[1:], strict=True))


@pytest.mark.parametrize("name", ["gpt", *FOREIGN])
@pytest.mark.parametrize("tokens", [24, 5, 1])
def test_loss_in_pieces_is_that_of_all_logits_by_the_models_own_head(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    model = MODEL if name == "gpt" else foreign_model(name)
    module, hidden, targets = ends_of(model)
    expected = run_head(module, hidden, targets)
    at_once(monkeypatch, model, tokens)
    seen = largest(module, monkeypatch)
    found = run_head(module, hidden, targets)
    assert sum(seen) == ROWS * TOKENS
    assert max(seen) <= tokens, "and no more logits than that at a time"
    assert far(found, expected) < 2e-6
    again = run_head(module, hidden, targets)
    assert again[0] == found[0]
    assert torch.equal(again[2], found[2])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again[3], found[3], strict=True))


def test_gradient_of_a_head_in_bfloat16_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODEL.model_copy(update={"compute": "bfloat16"})
    (module, *_), (exact, *_) = ends_of(model), ends_of(MODEL)
    rounded = {name: parameter.detach().float() for name, parameter in module.named_parameters()}
    install_weights(exact, rounded, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    hidden = (1 + torch.randn(8, 64, MODEL.dim, generator=generator)).bfloat16()
    targets = torch.randint(0, MODEL.vocab_size, (8, 64), generator=generator)

    def gradient(of: PartModule, hidden: torch.Tensor) -> torch.Tensor:
        return dict(run_head(of, hidden, targets)[3])["head.weight"]

    expected = gradient(exact, hidden.float())
    at_once(monkeypatch, model, 1)
    found = gradient(module, hidden)
    assert found.dtype == torch.bfloat16
    error = torch.linalg.vector_norm(found.float() - expected) / torch.linalg.vector_norm(expected)
    assert error < 2**-7, "512 sums rounded to bfloat16 would be off by 0.17"


@pytest.mark.parametrize("name", ["gpt", "gemma2", "falcon:alibi"])
def test_last_stage_with_head_cuts_its_loss_in_packed_rows_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = MODEL if name == "gpt" else foreign_model(name, tie_word_embeddings=False)
    family = family_of(model)
    spec = family.parts(SplitConfig(stages=2, ends="hosted"))[-1]
    module = family.build(spec)
    install_weights(module, family.initial_weights(0, spec), requires_grad=True)
    _, hidden, targets = ends_of(model)
    positions = torch.tensor([[at for length in (5, 7) for at in range(length)]] * ROWS)

    def computed() -> Any:
        with packed(positions):
            loss_sum, counted, graph = run_loss(module, hidden, targets, seed=1, graph=True)
            assert run_loss(module, hidden, targets, seed=1, graph=False)[0] == pytest.approx(loss_sum, rel=1e-6)
        assert graph is not None
        return loss_sum, counted, *run_backward(graph, None)

    expected = computed()
    at_once(monkeypatch, model, 5)
    seen = largest(module, monkeypatch)
    assert far(computed(), expected) < 2e-6
    assert max(seen) == 4, "three stretches of four tokens are a row"


def test_evaluation_holds_no_more_logits_either(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(MODEL)
    module = family.build(family.whole)
    install_weights(module, family.initial_weights(0))
    tokens = torch.arange(36).view(3, 12) * 7 % MODEL.vocab_size
    total, counted = module.evaluate(tokens, tokens)
    at_once(monkeypatch, MODEL, 5)
    seen = largest(module, monkeypatch)
    assert module.evaluate(tokens, tokens) == (pytest.approx(total, rel=1e-6), counted)
    assert max(seen) <= 5


def test_head_that_cannot_be_run_for_some_tokens_alone_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hidden, targets = ends_of(MODEL)
    module.head_by_token = False
    at_once(monkeypatch, MODEL, 1)
    seen = largest(module, monkeypatch)
    run_head(module, hidden, targets)
    assert seen == [ROWS * TOKENS]


def test_loss_in_pieces_scales_with_what_comes_back_and_is_for_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hidden, targets = ends_of(MODEL)
    at_once(monkeypatch, MODEL, 4)
    inputs = hidden.clone().requires_grad_()
    total, _ = module.loss(inputs, targets)
    (grad,) = torch.autograd.grad(2 * total, inputs, retain_graph=True)
    assert torch.equal(grad, 2 * run_head(module, hidden, targets)[2])
    with pytest.raises(BugError, match="second backward"):
        torch.autograd.grad(total, inputs)

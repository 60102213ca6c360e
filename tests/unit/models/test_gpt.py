from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from swarm.errors import BugError
from swarm.models.dropout import keep_mask
from swarm.models.family import PartModule
from swarm.models.gpt import Rotary
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import ALIGNMENT, FlatLayout, install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from tests.harness.rigs.models import MODEL

CPU = torch.device("cpu")


def gpt(model: GptConfig = MODEL) -> PartModule:
    family = family_of(model)
    module = family.build(family.whole)
    install_weights(module, family.initial_weights(0))
    return module


def test_gpt_is_causal() -> None:
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 9] = 77
    model = gpt()
    difference = (model.logits(model(tokens)) - model.logits(model(changed))).abs().amax(-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_rotary_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(MODEL)
    vector = torch.randn((1, 1, 1, 8), generator=torch.Generator().manual_seed(0)).expand(1, 1, 16, 8)
    scores = (rotary(vector) @ rotary(vector).transpose(-1, -2))[0, 0]
    for distance in range(4):
        line = scores.diagonal(distance)
        assert torch.allclose(line, line[0].expand_as(line), atol=1e-5)


def test_loss_is_a_sum_in_float32_over_targets_that_count() -> None:
    model = gpt()
    tokens = torch.arange(16).view(1, 16)
    targets = tokens + 1
    targets[0, 4:] = -100
    total, count = model.evaluate(tokens, targets)
    expected = F.cross_entropy(model.logits(model(tokens))[0, :4], targets[0, :4], reduction="sum")
    assert count == 4
    assert total == pytest.approx(expected.item(), rel=1e-6)


def test_generate_repeats_with_its_seed_and_keeps_to_top_k() -> None:
    model, prompt = gpt(), torch.arange(20)
    first, again, other = (model.generate(prompt, 12, seed=seed) for seed in (1, 1, 2))
    assert first.shape == (12,)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    greedy = model.generate(prompt, 6, seed=1, temperature=0.0)
    assert torch.equal(greedy, model.generate(prompt, 6, seed=9, top_k=1))


def test_part_without_ends_says_so() -> None:
    stage = family_of(MODEL).build(family_of(MODEL).parts(SplitConfig(stages=1))[0])
    with pytest.raises(BugError, match="no embedding"):
        stage.embed(torch.zeros((1, 1), dtype=torch.int64))
    with pytest.raises(BugError, match="no head"):
        stage.logits(torch.zeros((1, 1, 32)))


def test_keep_mask_has_the_asked_rate_and_no_pattern() -> None:
    shape = torch.Size((500, 400))
    mask = keep_mask(shape, 0.25, key=12345, device=CPU)
    assert mask.float().mean().item() == pytest.approx(0.75, abs=5e-3)
    assert mask.float().mean(0).std() < 0.03
    other = keep_mask(shape, 0.25, key=12345 + (1 << 32), device=CPU)
    assert (mask == other).float().mean().item() == pytest.approx(0.625, abs=5e-3)


def test_keep_mask_bits_are_what_they_always_were() -> None:
    mask = keep_mask(torch.Size((16,)), 0.5, key=7, device=CPU)
    assert "".join(str(int(bit)) for bit in mask) == "0100011000111111"


def test_layout_aligns_every_parameter_and_covers_the_vector() -> None:
    layout = FlatLayout.from_shapes([("a", (3,)), ("b", (5, 5)), ("c", (4, 4))], {"c"})
    assert [slot.offset for slot in layout.slots] == [0, 16, 48]
    assert layout.elements == 64
    assert layout.elements % ALIGNMENT == 0
    assert layout.decay_runs() == ((0, 48, False), (48, 64, True))
    assert FlatLayout.from_shapes(layout.shapes) == layout, "what decays is no part of a state"

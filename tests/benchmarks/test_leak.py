"""The attacks of the benchmark ``leak``: they read what they must, and no more than they should know."""

from __future__ import annotations

import pytest
import torch

from swarm.ids import ENDS
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from tests.benchmarks._leak_views import fit, nearest, targets_of

MODEL = GptConfig(vocab_size=300, dim=16, layers=1, heads=2, context=16)
FAMILY = family_of(MODEL)
SPEC = next(spec for spec in FAMILY.parts(SplitConfig(stages=1, ends="private")) if spec.name == ENDS)


@pytest.mark.parametrize(("guessed", "share"), [(1, 1.0), (2, 0.0)])
def test_targets_are_read_off_the_last_gradient_by_who_knows_the_head(guessed: int, share: float) -> None:
    ends, theirs = FAMILY.build(SPEC), FAMILY.build(SPEC)
    install_weights(ends, FAMILY.initial_weights(1, SPEC), requires_grad=True)
    install_weights(theirs, FAMILY.initial_weights(guessed, SPEC))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 64, MODEL.dim, generator=generator).requires_grad_()
    targets = torch.randint(MODEL.vocab_size, (1, 64), generator=generator)
    total, _ = ends.loss(hidden, targets)
    (gradient,) = torch.autograd.grad(total, hidden)
    found = targets_of(theirs, hidden[0].detach(), gradient[0])
    assert (found == targets[0]).float().mean().item() == pytest.approx(share, abs=0.05)


def test_decoder_and_nearest_row_find_what_is_there_to_be_found() -> None:
    table = FAMILY.initial_weights(1, SPEC)["embedding.weight"] / 0.02
    tokens = torch.randint(MODEL.vocab_size, (500,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(nearest(table[tokens], table), tokens)
    found = fit(table[tokens], tokens, MODEL.vocab_size)(table[tokens]).argmax(1)
    assert (found == tokens).float().mean() > 0.95

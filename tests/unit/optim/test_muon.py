"""Muon: what torch's does, but with the same bits from every library of matrix products."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim import muon
from swarm.optim.muon import Muon, orthogonal
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import StepNumbers, Vectors, stepped
from tests.harness.rigs.models import MODEL

GOLDEN = "16b995b49a1f987c"
"""Of :func:`orthogonal`, on every machine. A change of this value is a change of every such run's history."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def exact(rows: int, columns: int) -> Tensor:
    """Numbers over several magnitudes, made of exact operations."""
    index = torch.arange(rows * columns, dtype=torch.int64)
    mixed = ((index + 1) * 2654435761) % (1 << 32)
    values = torch.ldexp((mixed % (1 << 24)).float() - float(1 << 23), -(mixed >> 24) % 12 - 20)
    return values.view(rows, columns)


def digest_of(matrix: Tensor) -> str:
    return hashlib.sha256(matrix.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.usefixtures("threads")
def test_orthogonal_has_the_same_bits_from_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = exact(96, 160)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert digest_of(orthogonal(matrix)) == GOLDEN

    products = []

    def backwards(one: Tensor, other: Tensor) -> Tensor:
        """numpy's own sums, from the last to the first."""
        products.append(one.shape)
        return torch.from_numpy(np.einsum("ij,jk->ik", one.numpy()[:, ::-1], other.numpy()[::-1], optimize=False))

    monkeypatch.setattr(torch.Tensor, "__matmul__", backwards)
    assert digest_of(orthogonal(matrix)) == GOLDEN
    assert len(products) == 3 * muon.ITERATIONS, "the other library was not used"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (33, 33), (3, 16, 9), (1, 64)])
def test_orthogonal_keeps_the_spaces_and_levels_the_singular_values(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-9
    found = orthogonal(matrix)
    assert found.shape == matrix.shape
    u, s, vh = torch.linalg.svd(found.double(), full_matrices=False)
    assert ((s > 0.3) & (s < 1.3)).all()
    expected = torch.linalg.svd(matrix.double(), full_matrices=False)
    spaces = (expected.U @ expected.Vh).flatten(), (u @ vh).flatten()
    assert torch.nn.functional.cosine_similarity(*spaces, dim=0) > 0.97


def test_orthogonal_of_nothing_is_nothing_and_of_what_is_not_finite_a_bug() -> None:
    assert orthogonal(torch.zeros(4, 5)).abs().max() == 0
    with pytest.raises(BugError, match="not finite"):
        orthogonal(torch.full((4, 5), float("nan")))


def test_steps_are_torchs_muon_and_adamw_for_the_rest() -> None:
    config = OptimizerConfig(name="muon", weight_decay=0.1)
    layout = FlatLayout.from_shapes([("norm", (5,)), ("matrix", (24, 40))], {"matrix"})
    layout = FlatLayout(layout.slots, layout.elements, layout.decayed, matrices=frozenset({"matrix"}))
    start = torch.linspace(-1, 1, layout.elements)
    reference = torch.nn.Parameter(layout.views(start)["matrix"].clone())
    theirs = torch.optim.Muon([reference], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    state: Vectors = (start.clone(), torch.zeros_like(start), torch.zeros_like(start))
    rest = muon.AdamW(config)
    beside: Vectors = state
    for step in range(1, 12):
        mean = torch.randn(layout.elements, generator=torch.Generator().manual_seed(step))
        numbers = StepNumbers(step=step, lr=0.02, clip=0.5)
        state = stepped(Muon(config).plan(state, mean, layout, numbers), state)
        beside = stepped(rest.plan(beside, mean, layout, numbers), beside)
        reference.grad = layout.views(mean)["matrix"] * 0.5
        theirs.step()
    moved = layout.views(state[0])["matrix"] - layout.views(start)["matrix"]
    expected = reference.detach() - layout.views(start)["matrix"]
    assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.995  # theirs: bfloat16
    assert 0.97 < moved.norm() / expected.norm() < 1.03
    for one, other in zip(state, beside, strict=True):
        assert torch.equal(layout.views(one)["norm"], layout.views(other)["norm"])
    assert layout.views(state[2])["matrix"].abs().max() == 0


def test_matrices_of_a_part_are_those_of_its_layers() -> None:
    family = family_of(MODEL)
    stage, *_, ends = family.parts(SplitConfig(stages=2))
    assert family.layout(family.build(ends)).matrices == frozenset()
    found = family.layout(family.build(stage))
    assert found.matrices == found.decayed
    assert found.matrices

"""Four bits a weight: the nearest of 16 values, the same bytes everywhere."""

from __future__ import annotations

import pytest
import torch

from swarm.models.nf4 import BLOCK, VALUES, quantise, sizes


def test_every_weight_becomes_the_nearest_value_times_its_blocks_scale() -> None:
    weights = torch.randn((5, 39), generator=torch.Generator().manual_seed(0))  # the last block is not full
    stored = quantise(weights)
    flat = torch.nn.functional.pad(weights.reshape(-1), (0, -weights.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(1).bfloat16().float()[:, None]
    candidates = scales[:, :, None] * torch.tensor(VALUES)
    nearest = candidates.expand(*flat.shape, -1).gather(2, (candidates - flat[:, :, None]).abs().argmin(2)[..., None])
    assert torch.equal(stored.dense(torch.float32), nearest.reshape(-1)[: weights.numel()].view(weights.shape))
    assert sizes(weights.numel()) == (stored.packed.numel(), stored.scales.numel()) == (128, 4)


def test_what_is_stored_is_stored_again_as_the_same_bytes() -> None:
    weights = torch.randn((64, 64), generator=torch.Generator().manual_seed(1)).bfloat16()
    once = quantise(weights)
    again = quantise(once.dense(torch.float32))
    assert torch.equal(once.packed, again.packed)
    assert torch.equal(once.scales, again.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_the_largest_stays_what_it_is(dtype: torch.dtype) -> None:
    weights = torch.zeros(3 * BLOCK)
    weights[BLOCK] = -2.0
    assert torch.equal(quantise(weights).dense(dtype), weights.to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantise(torch.tensor([1.0, bad]))

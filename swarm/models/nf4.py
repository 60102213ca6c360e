"""Weights in four bits: NormalFloat (Dettmers et al., arXiv 2305.14314, §3 and appendix E), in plain torch.

Blocks of 64 weights share one scale, the largest magnitude in bfloat16; each weight is the nearest of 16 fixed values
times that. 4.25 bits a weight. Element by element and in float32, so that every machine gets the same bytes from the
same weights, and the same weights from the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 64

VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, zero among them."""


@dataclass(frozen=True, slots=True)
class Nf4:
    """A quantised tensor: two weights a byte, the first in the high half, and a bfloat16 scale for each block. Blocks
    run over the tensor's elements in order; the last one may be filled up with zeros."""

    packed: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, rounded to ``dtype``. Takes 4 bytes a weight more while it works."""
        pairs = torch.nn.functional.embedding(self.packed.int(), _pairs(self.packed.device))
        values = pairs.view(-1, BLOCK).mul_(self.scales.float()[:, None]).view(-1)
        return values[: torch.Size(self.shape).numel()].view(self.shape).to(dtype)

    def to(self, device: torch.device) -> Nf4:
        """Return the same on a device."""
        return Nf4(self.packed.to(device), self.scales.to(device), self.shape)


def sizes(elements: int) -> tuple[int, int]:
    """Return how many bytes the packed weights of so many elements take, and how many scales there are."""
    blocks = -(-elements // BLOCK)
    return blocks * BLOCK // 2, blocks


def quantise(weights: Tensor) -> Nf4:
    """Return these weights in four bits. Raises ValueError where one is not finite."""
    flat = weights.detach().reshape(-1).float()
    if not bool(flat.isfinite().all()):
        raise ValueError("weights that are not finite")
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).bfloat16()
    # A block of zeros has no scale: its weights are all the code of zero. What rounding the scale down left above 1
    # is nearest to 1.
    unit = blocks / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(unit.view(-1), _midpoints(flat.device)).to(torch.uint8)
    return Nf4((codes[0::2] << 4) | codes[1::2], scales, tuple(weights.shape))


@lru_cache(maxsize=8)
def _midpoints(device: torch.device) -> Tensor:
    values = torch.tensor(VALUES, device=device)
    return (values[1:] + values[:-1]) / 2


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """The two weights of every byte."""
    values = torch.tensor(VALUES, device=device)
    codes = torch.arange(256, device=device)
    return torch.stack((values[codes >> 4], values[codes & 15]), 1)

"""Whether a codec makes the same bytes of a tensor on a device as of the same tensor on the CPU.

A replica computes on what another one sent, and encodes again what it no longer has: the bytes may not depend on where.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from swarm.compression.codec import Codec, EncodeContext
from swarm.compression.registry import CODECS
from tests.benchmarks._stage import normal
from tests.benchmarks._stage_checks import Answers, Check

SHAPES = ((0,), (1,), (3,), (255,), (257,), (2, 3, 5), (7, 129, 33), (1, 65_537))
"""Odd ones: nothing, less than a block of int8, a block more or less one, more than it works on at a time."""

_EXTREMES = (0.0, -0.0, 1e-40, -6e-8, 6.2e-5, 65_504.0, 65_519.9, 65_520.0, -1e30, 3.39e38, -3.4e38)
"""Zeros, values that are subnormal in float32 and in float16, the edges of what float16 holds, and of bfloat16."""

_CONTEXT = EncodeContext(step=1, direction="forward")


def codec_checks(device: torch.device) -> list[Check]:
    """One of each codec and each dtype that it is given: floats in float32 and bfloat16, token ids in int64."""
    found = []
    for codec in CODECS.values():
        for dtype in (torch.int64,) if codec.name == "int32" else (torch.float32, torch.bfloat16):
            name = f"codec_{codec.name}_from_{str(dtype).removeprefix('torch.')}"
            found.append(Check((name,), partial(_answer, name, codec, dtype, device)))
    return found


def same_bytes(codec: Codec, tensor: Tensor, device: torch.device) -> bool:
    """Return whether a CPU tensor gives the bytes there that it gives here."""
    return bytes(codec.encode(tensor, _CONTEXT)) == bytes(codec.encode(tensor.to(device), _CONTEXT))


def samples(dtype: torch.dtype) -> list[Tensor]:
    """Tensors of all :data:`SHAPES`, one that is not contiguous, and one of extreme values."""
    found = [normal(shape, seed) for seed, shape in enumerate(SHAPES, start=1)]
    found += [normal((33, 65), 0).t(), torch.tensor(_EXTREMES), torch.cat((torch.tensor(_EXTREMES), normal((300,), 0)))]
    if dtype == torch.int64:
        return [(tensor.clamp(-8, 8) * 1000).long() for tensor in found]
    narrow = [tensor.to(dtype) for tensor in found]
    return [tensor.where(tensor.isfinite(), tensor.new_tensor(1.0)) for tensor in narrow]  # what rounds to infinity


def _answer(name: str, codec: Codec, dtype: torch.dtype, device: torch.device) -> Answers:
    return {name: all(same_bytes(codec, tensor, device) for tensor in samples(dtype))}

"""Initial weights: each tensor a function of (seed, name) alone, so the same for every cut of the model.

Drawn by numpy's ziggurat (table look-ups and multiplications), not by torch, whose normal sampler uses a different
algorithm where AVX2 is present. Peers still download them rather than trust that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from swarm.models.gpt import GPT
from swarm.models.spec import ModelConfig

_STD = 0.02
_RESIDUAL = (".attention.output.weight", ".feed_forward.down.weight")


def initial_weights(model: ModelConfig, seed: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Float32 CPU weights by name: of the whole model, or of ``names`` only.

    Norms are 1; matrices normal with deviation 0.02, those that write to the residual stream divided by √(2·layers)
    (GPT-2, Radford et al. 2019, §2.3).
    """
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in GPT(model).named_parameters()}
    chosen = shapes if names is None else {name: shapes[name] for name in names}
    return {name: _draw(model, seed, name, shape) for name, shape in chosen.items()}


def _draw(model: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    std = _STD / math.sqrt(2 * model.layers) if name.endswith(_RESIDUAL) else _STD
    values = np.random.Generator(np.random.PCG64(key)).standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return torch.from_numpy(values)

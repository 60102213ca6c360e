"""Cut a model into parts, build one part, and compute its initial weights.

Each initial tensor is a function of (seed, name) alone, so every cut of the model has the same weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, StateError
from swarm.ids import ENDS, stage_part
from swarm.models.gpt import GPT, Ends, Piece, Stage
from swarm.models.spec import ModelConfig, PartSpec, SplitConfig, TensorSpec


def split_model(model: ModelConfig, split: SplitConfig) -> tuple[PartSpec, ...]:
    """All parts of a run: the stages in order, and last, when ends are private, ``ends``.

    Raises ConfigError when the layers do not fit the stages.
    """
    hosted, parts, first = split.ends == "hosted", [], 0
    for stage, count in enumerate(_layers_per_stage(model, split)):
        parts.append(
            PartSpec(
                name=stage_part(stage),
                first_layer=first,
                last_layer=first + count,
                embedding=hosted and stage == 0,
                head=hosted and stage == split.stages - 1,
            )
        )
        first += count
    if not hosted:
        parts.append(PartSpec(name=ENDS, first_layer=0, last_layer=0, embedding=True, head=True))
    return tuple(parts)


def build_part(spec: PartSpec, model: ModelConfig) -> Piece:
    """The module of one part (:class:`Ends` or :class:`Stage`), its parameters on the meta device: costs no memory.

    Give it weights with :func:`install_weights` before use.
    """
    with torch.device("meta"):
        return Ends(model) if spec.name == ENDS else Stage(model, spec)


def install_weights(module: nn.Module, weights: Mapping[str, Tensor], *, requires_grad: bool = False) -> None:
    """Make every parameter of ``module`` the tensor of its name: itself where the dtypes agree, else a rounded copy.

    The parameters are new objects, so graphs made before keep what they were made with. Also moves the module's
    buffers to the weights' device. Raises StateError, with nothing changed, for a missing name or a wrong shape.
    """
    old = dict(module.named_parameters())
    for name, parameter in old.items():
        tensor = weights.get(name)
        if tensor is None or tensor.shape != parameter.shape:
            found = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise StateError(f"{name}: expected shape {tuple(parameter.shape)}, found {found}; is it the same model?")
    for name, parameter in old.items():
        owner, _, leaf = name.rpartition(".")
        fresh = nn.Parameter(weights[name].detach().to(parameter.dtype), requires_grad=requires_grad)
        setattr(module.get_submodule(owner), leaf, fresh)
    device = next(iter(weights.values())).device
    if any(buffer.device != device for buffer in module.buffers()):
        module.to(device)


def boundary_spec(model: ModelConfig, microbatch_size: int, sequence: int, dtype: str) -> TensorSpec:
    """What crosses every boundary between parts, forward and backward: (B, T, D)."""
    return TensorSpec((microbatch_size, sequence, model.dim), dtype)


def token_spec(microbatch_size: int, sequence: int) -> TensorSpec:
    """What hosted ends receive as tokens and as targets: int64 (B, T)."""
    return TensorSpec((microbatch_size, sequence), "int64")


def _layers_per_stage(model: ModelConfig, split: SplitConfig) -> tuple[int, ...]:
    even, more = divmod(model.layers, split.stages)
    counts = split.layers_per_stage or tuple(even + (stage < more) for stage in range(split.stages))
    if len(counts) != split.stages or sum(counts) != model.layers or min(counts) < 1:
        allowed = f"{split.stages} positive numbers that add up to model.layers = {model.layers}"
        raise ConfigError("split.layers_per_stage", counts, allowed, "Change stages, layers or layers_per_stage.")
    return counts


# --- initial weights -------------------------------------------------------------------------------------------------
# Drawn by numpy's ziggurat (table look-ups and multiplications), not by torch, whose normal sampler uses a different
# algorithm where AVX2 is present. Peers still download them rather than trust that.


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

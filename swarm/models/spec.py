"""What a model is made of and how it is cut: the manifest's ``[model]`` and ``[split]``, and the parts that follow.

Shapes: B microbatch size, T context length, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from swarm.ids import PartName
from swarm.schema import Section

DType = Literal["float32", "bfloat16"]


class ModelConfig(Section):
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, no biases, untied head."""

    vocab_size: Annotated[int, Field(ge=257, le=1 << 20)] = 2048
    dim: Annotated[int, Field(ge=16, le=1 << 15)] = 160
    layers: Annotated[int, Field(ge=1, le=512)] = 4
    heads: Annotated[int, Field(ge=1, le=256)] = 4
    kv_heads: Annotated[int, Field(ge=1, le=256)] | None = None
    ffn_dim: Annotated[int, Field(ge=16, le=1 << 17)] | None = None
    context: Annotated[int, Field(ge=8, le=1 << 17)] = 128
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    compute: DType = "float32"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: ``kv_heads``, or as many as queries."""
        return self.kv_heads or self.heads

    @property
    def feed_forward_dim(self) -> int:
        """Inner width of a feed-forward: ``ffn_dim``, or 8/3 of D rounded up to a multiple of 64, which gives SwiGLU's
        three matrices the size of a classic feed-forward's two (Shazeer, arXiv 2002.05202)."""
        return self.ffn_dim or -(-8 * self.dim // (3 * 64)) * 64


class SplitConfig(Section):
    """How the blocks are cut into stages and where the ends live.

    ``layers_per_stage`` gives the number of blocks of each stage; without it they are spread as evenly as they go,
    earlier stages taking the remainder.
    """

    stages: Annotated[int, Field(ge=1, le=512)] = 2
    layers_per_stage: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    ends: Literal["private", "hosted"] = "private"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype a tensor must have; ``dtype`` is a torch dtype's name without the module."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One part of a cut model: blocks ``first_layer`` up to, not including, ``last_layer``, and perhaps ends."""

    name: PartName
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool

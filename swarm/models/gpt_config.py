"""The manifest's ``[model]`` of our own transformer. Imports no torch.

Shapes: T context length, D model width, V vocabulary.
"""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from pydantic import Field

from swarm.errors import ConfigError
from swarm.models.lora_config import LoraConfig
from swarm.models.spec import DType
from swarm.schema import Section

LINEAR = ("query", "key", "value", "output", "gate", "up", "down")
"""What the linear modules of its layers are called: those that may have adapters."""


class GptConfig(Section):
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, no biases, untied head.

    ``family`` is the default one and left out of what is written, so that manifests that do not name it keep their id.
    """

    family: Annotated[Literal["gpt"], Field(exclude=True)] = "gpt"
    """The kind of model, which defines the other keys."""
    vocab_size: Annotated[int, Field(ge=257, le=1 << 20)] = 2048
    """Number of tokens; a tokenizer made for the run has as many."""
    dim: Annotated[int, Field(ge=16, le=1 << 15)] = 160
    """Width of the model."""
    layers: Annotated[int, Field(ge=1, le=512)] = 4
    """Blocks."""
    heads: Annotated[int, Field(ge=1, le=256)] = 4
    """Attention heads; each gets an even share of ``dim``."""
    kv_heads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Heads of keys and values, a divisor of ``heads``; left out: as many as those."""
    ffn_dim: Annotated[int, Field(ge=16, le=1 << 17)] | None = None
    """Inner width of a feed-forward; left out: 8/3 of ``dim``, rounded up to a multiple of 64."""
    context: Annotated[int, Field(ge=8, le=1 << 17)] = 128
    """Tokens in a row of text."""
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    """Base of the rotary positions."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """What the norms add under the root."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction dropped in training."""
    compute: DType = "float32"
    """Data type of the blocks; a CPU without AVX-512 multiplies bfloat16 up to 50 times slower."""
    share: Annotated[Literal["none", "stages"], Field(exclude_if=lambda share: share == "none")] = "none"
    """``stages``: all stages have the same layers, so that any host serves any of them; ``none``: each has its own."""
    delink_at: Annotated[int, Field(ge=0, lt=10**9, exclude_if=operator.not_)] = 0
    """Step with whose close stages share nothing any more: each goes on by itself from what they shared; 0: never."""
    lora: Annotated[LoraConfig | None, Field(exclude_if=lambda value: value is None)] = None

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

    def check(self) -> None:
        """Check the relations between the keys. Raises ConfigError."""
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ConfigError(
                "model.heads",
                self.heads,
                f"a number that cuts model.dim = {self.dim} into even head sizes",
                "Change model.heads or model.dim.",
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(
                "model.kv_heads",
                self.kv_heads,
                f"a divisor of model.heads = {self.heads}",
                "Change it or leave it out.",
            )
        if self.share == "none" and self.delink_at:
            remedy = 'Set model.share = "stages", or leave it out.'
            raise ConfigError("model.delink_at", self.delink_at, 'none with model.share = "none"', remedy)
        if self.share != "none" and self.lora is not None:
            why = "adapters are of the layers of one stage"
            raise ConfigError("model.share", self.share, '"none" with model.lora', "Leave it out.", why=why)
        targets = () if self.lora is None else self.lora.targets
        if targets and not any(name.rpartition(".")[2] in LINEAR for name in targets):
            remedy = "Name some of them, or leave it out for all."
            raise ConfigError("model.lora.targets", ", ".join(targets), ", ".join(LINEAR), remedy)

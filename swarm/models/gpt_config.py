"""The manifest's ``[model]`` of our own transformer. Imports no torch.

Shapes: T context length, D model width, V vocabulary.
"""

from __future__ import annotations

import math
import operator
from typing import Annotated, Literal

from pydantic import Field

from swarm.errors import ConfigError
from swarm.models.lora_config import LoraConfig
from swarm.models.spec import DType
from swarm.schema import Section

LINEAR = ("query", "key", "value", "output", "gate", "up", "down")
"""What the linear modules of its layers are called: those that may have adapters."""


class BalanceConfig(Section):
    """``[model.balance]``: what keeps the experts of a layer evenly used."""

    kind: Literal["aux", "bias", "none"] = "aux"
    """``aux``: a loss beside the model's own; ``bias``: each step makes experts that got less than the mean likelier,
    the others less, and no loss pulls at the weights; ``none``: nothing."""
    weight: Annotated[float, Field(ge=0, le=1000)] = 0.01
    """``aux``: how much the loss weighs against the model's own, in each layer with experts."""
    rate: Annotated[float, Field(gt=0, le=1)] = 0.001
    """``bias``: how much likelier a step makes an expert, as a probability."""


STANDARD = BalanceConfig()


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
    experts: Annotated[int, Field(ge=0, le=256, exclude_if=operator.not_)] = 0
    """Experts in place of one feed-forward, each as wide as that: every token goes to some of them; 0: none."""
    top_k: Annotated[int, Field(ge=1, le=256, exclude_if=lambda value: value == 1)] = 1
    """Experts that a token goes to."""
    expert_every: Annotated[int, Field(ge=1, le=512, exclude_if=lambda value: value == 2)] = 2
    """Every so many blocks one has experts; 1: all have."""
    capacity: Annotated[float, Field(ge=0, le=256, exclude_if=lambda value: value == 1.25)] = 1.25
    """Times its even share of a microbatch's tokens that an expert takes in training; further ones pass the layer
    unchanged. 0: it takes all."""
    balance: Annotated[BalanceConfig, Field(exclude_if=lambda value: value == STANDARD)] = STANDARD
    sparsity: Annotated[float, Field(ge=0, le=0.99, exclude_if=operator.not_)] = 0.0
    """Share of the weights of the blocks' matrices that are always 0, and nobody trains, sends or keeps; 0: none."""
    lora: Annotated[LoraConfig | None, Field(exclude_if=lambda value: value is None)] = None

    @property
    def steering(self) -> float:
        """Return by how much a step steers what chooses experts, where it does; else 0."""
        return self.balance.rate if self.experts and self.balance.kind == "bias" else 0.0

    @property
    def balance_weight(self) -> float:
        """Return what the balance loss of a layer with experts weighs; 0 where there is none."""
        return self.balance.weight if self.experts and self.balance.kind == "aux" else 0.0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer of the whole model, counted from 0, has experts."""
        return self.experts > 0 and (layer + 1) % self.expert_every == 0

    def room(self, tokens: int) -> int:
        """Return how many of a microbatch's tokens one expert takes in training."""
        even = self.capacity * self.top_k * tokens / self.experts
        return min(tokens, math.ceil(even)) if self.capacity else tokens

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
        if self.sparsity and (self.lora is not None or self.share != "none"):
            key, why = "model.share", "which weights there are differs from layer to layer"
            if self.lora is not None:
                key, why = "model.lora", "adapters are beside whole matrices"
            raise ConfigError("model.sparsity", self.sparsity, f"0 with {key}", f"Leave it out, or {key}.", why=why)
        self._check_experts()
        targets = () if self.lora is None else self.lora.targets
        if targets and not any(name.rpartition(".")[2] in LINEAR for name in targets):
            remedy = "Name some of them, or leave it out for all."
            raise ConfigError("model.lora.targets", ", ".join(targets), ", ".join(LINEAR), remedy)

    def _check_experts(self) -> None:
        if not self.experts:
            for key in ("top_k", "expert_every", "capacity", "balance"):
                if (value := getattr(self, key)) != type(self).model_fields[key].default:
                    said = value.kind if isinstance(value, BalanceConfig) else value
                    raise ConfigError(f"model.{key}", said, "nothing where no layer has experts",
                                      "Set model.experts = 8, or leave it out.")  # fmt: skip
            return
        rules: tuple[tuple[str, object, bool, str, str], ...] = (
            ("experts", self.experts, self.experts > 1, "2 and more, or 0 for none", "one expert is a feed-forward"),
            ("top_k", self.top_k, self.top_k <= self.experts, f"at most model.experts = {self.experts}", ""),
            ("expert_every", self.expert_every, self.expert_every <= self.layers,
             f"at most model.layers = {self.layers}", "no layer would have experts"),
            ("capacity", self.capacity, not 0 < self.capacity < 1, "1 and more, or 0 for no limit",
             "below 1 tokens would pass a layer unchanged though its experts are evenly used"),
            ("lora", self.experts, self.lora is None, "no adapters in a model with experts",
             "adapters of single experts have no form outside of swarm"),
        )  # fmt: skip
        for key, value, fits, allowed, why in rules:
            if not fits:
                raise ConfigError(f"model.{key}", value, allowed, "Correct it or leave it out.", why=why)

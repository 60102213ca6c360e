"""One transformer block: causal attention with rotary positions, then SwiGLU, each behind an RMSNorm.

Shapes: B microbatch, T sequence, D model width, H heads, K key/value heads, E head width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.models.dropout import dropout
from swarm.models.spec import ModelConfig

_AFTER_ATTENTION, _AFTER_FEED_FORWARD = 0, 1


def compute_dtype(model: ModelConfig) -> torch.dtype:
    """The dtype of the blocks' matrices and of everything that flows between blocks."""
    return torch.bfloat16 if model.compute == "bfloat16" else torch.float32


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), computed in float32 whatever comes in."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D) in the dtype of ``x``."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Rotary(nn.Module):
    """Rotary position tables (Su et al., arXiv 2104.09864): float32, in no state dict, always right.

    A module that is made on the meta device or moved with ``to_empty`` has garbage in its non-persistent buffers, and
    ``to(bfloat16)`` would round them; so the tables are computed anew after every move.
    """

    cosine: Tensor  # (T, E/2)
    sine: Tensor  # (T, E/2)

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self._context, self._width, self._theta = model.context, model.head_dim, model.rope_theta
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self._rebuild(torch.device("cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Rotate (B, H, T, E) by position; same shape and dtype."""
        length = x.shape[-2]
        cosine, sine = self.cosine[:length], self.sine[:length]
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return rotated.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._rebuild(self.cosine.device)
        return self

    def _rebuild(self, device: torch.device) -> None:
        exponent = torch.arange(0, self._width, 2, dtype=torch.float64, device="cpu") / self._width
        position = torch.arange(self._context, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, self._theta**-exponent)
        self.cosine, self.sine = angle.cos().float().to(device), angle.sin().float().to(device)


class Attention(nn.Module):
    """Causal self-attention; with fewer key/value heads than heads, groups of queries share them (GQA)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        dtype, narrow = compute_dtype(model), model.key_value_heads * model.head_dim
        self.heads, self.key_value_heads = model.heads, model.key_value_heads
        self.query = nn.Linear(model.dim, model.dim, bias=False, dtype=dtype)
        self.key = nn.Linear(model.dim, narrow, bias=False, dtype=dtype)
        self.value = nn.Linear(model.dim, narrow, bias=False, dtype=dtype)
        self.output = nn.Linear(model.dim, model.dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        query = rotary(_split_heads(self.query(x), self.heads))  # (B, H, T, E)
        key = rotary(_split_heads(self.key(x), self.key_value_heads))  # (B, K, T, E)
        value = _split_heads(self.value(x), self.key_value_heads)
        shared = self.key_value_heads != self.heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(x.shape))
        return output


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        dtype, inner = compute_dtype(model), model.feed_forward_dim
        self.gate = nn.Linear(model.dim, inner, bias=False, dtype=dtype)
        self.up = nn.Linear(model.dim, inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, model.dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))  # inner: (B, T, F)
        return output


class Block(nn.Module):
    """Layer ``layer`` of the whole model, counted over all stages."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.dropout = layer, model.dropout
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.feed_forward_norm = RMSNorm(model.dim, model.norm_eps)
        self.feed_forward = FeedForward(model)

    def forward(self, x: Tensor, rotary: Rotary, seed: int | None) -> Tensor:
        """(B, T, D) → (B, T, D). ``seed`` keys the dropout; None drops nothing."""
        attended = self.attention(self.attention_norm(x), rotary)
        x = x + dropout(attended, self.dropout, seed=seed, layer=self.layer, place=_AFTER_ATTENTION)
        fed = self.feed_forward(self.feed_forward_norm(x))
        return x + dropout(fed, self.dropout, seed=seed, layer=self.layer, place=_AFTER_FEED_FORWARD)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)

"""Our own transformer, in the pieces that peers hold: stages and private ends. The whole model is one stage with both.

A stage is a run of blocks (causal attention with rotary positions, then SwiGLU, each behind an RMSNorm); the ends are
embedding, final norm and head. Read :class:`Stage` and :class:`Ends` first; the layers follow them. Some blocks may
have several feed-forwards, of which a token passes some (:mod:`swarm.models.experts`).

Shapes: B microbatch, T sequence, D model width, V vocabulary; in a block H heads, K key/value heads, E head width, F
feed-forward width. Parameter names are those of the whole model in every piece, so the pieces' states together are the
whole model's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.errors import BugError
from swarm.models.balance import targets_counted
from swarm.models.dropout import dropout
from swarm.models.experts import STEERED, TOLD, Experts
from swarm.models.family import PartModule, Work
from swarm.models.gpt_config import GptConfig
from swarm.models.packing import packed_mask, packed_positions
from swarm.models.spec import PartSpec

_EMBEDDING = -1
_EMBEDDING_NAME, _HEAD_NAMES = "embedding.", ("norm.", "head.")


class Piece(PartModule):
    """The common base of stages and ends: perhaps an embedding, perhaps a final norm and a head.

    The embedding table and the norms stay float32 also when ``compute`` is bfloat16: a table's gradient is a sum over
    many tokens, which eight bits of mantissa would swallow.
    """

    def __init__(self, model: GptConfig, *, embedding: bool, head: bool) -> None:
        super().__init__(model)
        self.model = model
        self.compute_dtype = compute_dtype(model)
        self.embedding = _table(model.vocab_size, model.dim) if embedding else None
        self.norm = RMSNorm(model.dim, model.norm_eps) if head else None
        self.head = nn.Linear(model.dim, model.vocab_size, bias=False, dtype=self.compute_dtype) if head else None

    def embed(self, tokens: Tensor, seed: int | None = None) -> Tensor:
        """int64 (B, T) → hidden (B, T, D) in the compute dtype. Raises BugError where there is no embedding."""
        if self.embedding is None:
            raise BugError("this part has no embedding")
        hidden: Tensor = self.embedding(tokens)
        hidden = dropout(hidden, self.model.dropout, seed=seed, layer=_EMBEDDING, place=0)
        return hidden.to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → float32 (B, T, V). Raises BugError where there is no head."""
        if self.norm is None or self.head is None:
            raise BugError("this part has no head")
        scores: Tensor = self.head(self.norm(hidden.to(self.compute_dtype)))
        return scores.float()

    def parameters_of(self, work: Work) -> dict[str, nn.Parameter]:
        """See :meth:`~swarm.models.family.PartModule.parameters_of`."""
        if work == "embed":
            return {name: p for name, p in self.named_parameters() if name.startswith(_EMBEDDING_NAME)}
        return {name: p for name, p in self.named_parameters() if name.startswith(_HEAD_NAMES) == (work == "head")}


class Ends(Piece):
    """Embedding, final norm and head: what a trainer keeps when ends are private. Use ``embed`` and ``loss``."""

    def __init__(self, model: GptConfig) -> None:
        super().__init__(model, embedding=True, head=True)


class Stage(Piece):
    """The blocks of one stage; with hosted ends the first also has the embedding, the last norm and head."""

    def __init__(self, model: GptConfig, spec: PartSpec) -> None:
        super().__init__(model, embedding=spec.embedding, head=spec.head)
        layers = range(spec.first_layer, spec.last_layer)
        self.blocks = nn.ModuleDict({str(i): Block(model, i, elsewhere=spec.expert_shards > 0) for i in layers})
        self.asks = spec.expert_shards > 0 and any(map(model.has_experts, layers))
        self.rotary = Rotary(model)
        self.steered, self.told = (
            frozenset(name for name, _ in self.named_parameters() if name.endswith(end)) for end in (STEERED, TOLD)
        )

    def forward(self, x: Tensor, seed: int | None = None) -> Tensor:
        """Hidden (B, T, D), or int64 tokens (B, T) where the embedding is, → hidden (B, T, D) before norm and head.

        ``seed`` keys the dropout (:func:`~swarm.models.dropout.dropout_seed`); None drops nothing.
        """
        hidden = x.to(self.compute_dtype) if self.embedding is None else self.embed(x, seed)
        weight = self.model.balance_weight * targets_counted() if torch.is_grad_enabled() else 0.0
        for block in self.blocks.values():
            hidden = self.through(block, partial(block, rotary=self.rotary, seed=seed, weight=weight), hidden)
        return hidden


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding (rows, width) without values: drawing random ones on the meta device imports torch's compiler,
    which takes a second and leaves a directory behind."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, dtype=torch.float32))


# --- one transformer block -------------------------------------------------------------------------------------------


_AFTER_ATTENTION, _AFTER_FEED_FORWARD = 0, 1


def compute_dtype(model: GptConfig) -> torch.dtype:
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

    def __init__(self, model: GptConfig) -> None:
        super().__init__()
        self._context, self._width, self._theta = model.context, model.head_dim, model.rope_theta
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self._rebuild(torch.device("cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Rotate (B, H, T, E) by position, in packed rows by that in the document; same shape and dtype."""
        length, positions = x.shape[-2], packed_positions()
        if positions is None:
            cosine, sine = self.cosine[:length], self.sine[:length]
        else:
            cosine, sine = self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1)
        cosine, sine = cosine.to(x.device), sine.to(x.device)
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
    """Causal self-attention, in packed rows inside each document; with fewer key/value heads than heads, groups of
    queries share them (GQA). How many heads there are its matrices say: a strip has some of them."""

    def __init__(self, model: GptConfig) -> None:
        super().__init__()
        dtype, narrow = compute_dtype(model), model.key_value_heads * model.head_dim
        self.head_dim = model.head_dim
        self.query = nn.Linear(model.dim, model.dim, bias=False, dtype=dtype)
        self.key = nn.Linear(model.dim, narrow, bias=False, dtype=dtype)
        self.value = nn.Linear(model.dim, narrow, bias=False, dtype=dtype)
        self.output = nn.Linear(model.dim, model.dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        query = rotary(_split_heads(self.query(x), self.head_dim))  # (B, H, T, E)
        key = rotary(_split_heads(self.key(x), self.head_dim))  # (B, K, T, E)
        value = _split_heads(self.value(x), self.head_dim)
        shared, mask = key.shape[1] != query.shape[1], packed_mask()
        mask = None if mask is None else mask.to(x.device)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=shared)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: GptConfig) -> None:
        super().__init__()
        dtype, inner = compute_dtype(model), model.feed_forward_dim
        self.gate = nn.Linear(model.dim, inner, bias=False, dtype=dtype)
        self.up = nn.Linear(model.dim, inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, model.dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, D)."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))  # inner: (…, F)
        return output


class Block(nn.Module):
    """Layer ``layer`` of the whole model, counted over all stages; its experts, where it has some, may be
    ``elsewhere``."""

    def __init__(self, model: GptConfig, layer: int, *, elsewhere: bool = False) -> None:
        super().__init__()
        self.layer, self.dropout = layer, model.dropout
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.feed_forward_norm = RMSNorm(model.dim, model.norm_eps)
        make = partial(FeedForward, model)
        mixed = model.has_experts(layer)
        self.feed_forward = Experts(model, layer, None if elsewhere else make) if mixed else make()

    def forward(self, x: Tensor, rotary: Rotary, seed: int | None, weight: float) -> Tensor:
        """(B, T, D) → (B, T, D). ``seed`` keys the dropout; None drops nothing, and has experts take all tokens.
        ``weight`` is that of the experts' balance loss."""
        attended = self.attention(self.attention_norm(x), rotary)
        x = x + dropout(attended, self.dropout, seed=seed, layer=self.layer, place=_AFTER_ATTENTION)
        normed, layer = self.feed_forward_norm(x), self.feed_forward
        fed = layer(normed, seed is not None, weight) if isinstance(layer, Experts) else layer(normed)
        return x + dropout(fed, self.dropout, seed=seed, layer=self.layer, place=_AFTER_FEED_FORWARD)


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)

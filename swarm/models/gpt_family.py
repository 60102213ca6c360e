"""Our own transformer as a family: how its parts are built, its first weights, what it costs, its form elsewhere.

Each initial tensor is a function of (seed, name) alone, so every cut of the model has the same weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.ids import ENDS
from swarm.models.family import ModelFamily, PartCost, PartModule
from swarm.models.gpt import Ends, Stage
from swarm.models.gpt_config import GptConfig
from swarm.models.spec import PartSpec, TensorSpec
from swarm.models.strips import COLUMNS, ROWS, TensorPlan


class GptFamily(ModelFamily):
    """See :class:`~swarm.models.family.ModelFamily`."""

    def __init__(self, model: GptConfig) -> None:
        super().__init__(model)
        self._model = model

    @property
    def described(self) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        model = self._model
        blocks = f"{model.layers} block{'' if model.layers == 1 else 's'}"
        until = f" to the end of step {model.delink_at}" if model.delink_at else ""
        shared = "" if model.share == "none" else f", the same in all stages{until}"
        return f"{blocks} of width {model.dim}, context {model.context}, computed in {model.compute}{shared}"

    def build(self, spec: PartSpec) -> PartModule:
        """See :class:`~swarm.models.family.ModelFamily`: :class:`~swarm.models.gpt.Ends` or
        :class:`~swarm.models.gpt.Stage`."""
        with torch.device("meta"):
            return Ends(self._model) if spec.name == ENDS else Stage(self._model, spec)

    def boundary(self, rows: int, sequence: int) -> TensorSpec:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return TensorSpec((rows, sequence, self._model.dim), self._model.compute)

    def initial_weights(self, seed: int, spec: PartSpec | None = None, files: Path | None = None) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`. Norms are 1; matrices normal with deviation 0.02, those that
        write to the residual stream divided by √(2·layers) (GPT-2, Radford et al. 2019, §2.3)."""
        shapes = {name: tuple(p.shape) for name, p in self.build(spec or self.whole).named_parameters()}
        return {name: _draw(self._model, seed, name, shape) for name, shape in shapes.items()}

    def tensor_plan(self) -> TensorPlan:
        """See :class:`~swarm.models.family.ModelFamily`: attention by heads, feed-forward by inner columns."""
        return TensorPlan(_STYLES, self._model.heads, self._model.key_value_heads)

    def cost(self, spec: PartSpec, sequence: int) -> PartCost:
        """See :class:`~swarm.models.family.ModelFamily`.

        The forward is its matrices, and causal attention over half of ``sequence`` on average (scores and mixing:
        2 · 2 · D · T/2). Norms, rotary and activations are left out: below 1 % from D = 512 on.
        """
        model, layers = self._model, spec.last_layer - spec.first_layer
        narrow = model.key_value_heads * model.head_dim
        block = 2 * model.dim * (model.dim + narrow) + 3 * model.dim * model.feed_forward_dim
        table = model.vocab_size * model.dim
        matrices = layers * block + spec.head * table
        return PartCost(
            parameters=layers * (block + 2 * model.dim) + spec.embedding * table + spec.head * (table + model.dim),
            forward_flops=2 * matrices + layers * 2 * model.dim * sequence,
        )

    def export_config(self) -> dict[str, Any]:
        """See :class:`~swarm.models.family.ModelFamily`: it is a Llama, with rotary halves, grouped keys and values,
        SwiGLU, no biases and an untied head. Keys that version 4 of transformers knows too."""
        model = self._model
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "intermediate_size": model.feed_forward_dim,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.key_value_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": model.context,
            "rope_theta": model.rope_theta,
            "rms_norm_eps": model.norm_eps,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": _STD,
        }

    def export_weights(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`: the same tensors under a Llama's names."""
        return {_llama_name(name): tensor for name, tensor in weights.items()}

    def exported_module(self, path: str) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return _llama_name(path + ".weight").removesuffix(".weight")


# --- initial weights -------------------------------------------------------------------------------------------------
# Drawn by numpy's ziggurat (table look-ups and multiplications), not by torch, whose normal sampler uses a different
# algorithm where AVX2 is present. Peers still download them rather than trust that.


_STD = 0.02
_RESIDUAL = (".attention.output.weight", ".feed_forward.down.weight")


def _draw(model: GptConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    std = _STD / math.sqrt(2 * model.layers) if name.endswith(_RESIDUAL) else _STD
    values = np.random.Generator(np.random.PCG64(key)).standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return torch.from_numpy(values)


_STYLES = {
    "blocks.*.attention.query": COLUMNS,
    "blocks.*.attention.key": COLUMNS,
    "blocks.*.attention.value": COLUMNS,
    "blocks.*.attention.output": ROWS,
    "blocks.*.feed_forward.gate": COLUMNS,
    "blocks.*.feed_forward.up": COLUMNS,
    "blocks.*.feed_forward.down": ROWS,
}

# --- a Llama's names -------------------------------------------------------------------------------------------------


_LLAMA_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def _llama_name(name: str) -> str:
    """Return what a Llama calls the parameter of this name."""
    module, _, leaf = name.rpartition(".")
    if module in _LLAMA_ENDS:
        return f"{_LLAMA_ENDS[module]}.{leaf}"
    _, number, inner = module.split(".", 2)
    return f"model.layers.{number}.{_LLAMA_LAYER[inner]}.{leaf}"

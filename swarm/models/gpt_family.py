"""Our own transformer as a family: how its parts are built, its first weights, what it costs, its form elsewhere.

Each initial tensor is a function of (seed, name) alone, so every cut of the model has the same weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm.ids import ENDS
from swarm.models.experts import STEERED, TOLD, GptShard
from swarm.models.family import ModelFamily, PartCost, PartModule
from swarm.models.gpt import Ends, FeedForward, Stage
from swarm.models.gpt_config import LINEAR, GptConfig
from swarm.models.sparse import make_sparse, spread, survivors
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
        mixed = sum(map(model.has_experts, range(model.layers)))
        experts = f", {mixed} of them with {model.experts} experts, {model.top_k} a token" if mixed else ""
        width = f"width {model.dim}" + (f", {1 - model.sparsity:.3g} of their weights" if model.sparsity else "")
        return f"{blocks} of {width}{experts}, context {model.context}, computed in {model.compute}{shared}"

    @property
    def mixing(self) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        model = self._model
        if not model.experts:
            return ""
        kept = {
            "aux": f"a loss of each layer, of weight {model.balance.weight:g}, keeps experts evenly used",
            "bias": f"each step makes experts that got too little {model.balance.rate:g} likelier",
            "none": "nothing keeps experts evenly used",
        }[model.balance.kind]
        room = f"{model.capacity:g} times its even share" if model.capacity else "all tokens"
        return f"{kept}; in training each takes {room} of a microbatch"

    @property
    def balances(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self._model.balance_weight > 0

    @property
    def mixture(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self._model.experts > 0

    @property
    def experts(self) -> int:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self._model.experts

    def expert_layers(self, spec: PartSpec) -> tuple[int, ...]:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return tuple(filter(self._model.has_experts, range(spec.first_layer, spec.last_layer)))

    def build(self, spec: PartSpec) -> PartModule:
        """See :class:`~swarm.models.family.ModelFamily`: :class:`~swarm.models.gpt.Ends` or
        :class:`~swarm.models.gpt.Stage`, or :class:`~swarm.models.experts.GptShard`."""
        part = self.dense(spec)
        if self._model.sparsity:
            for path, module in part.named_modules():
                if _is_sparse(name := f"{path}.weight"):
                    make_sparse(module, name, self._model.sparsity)
        return part

    def dense(self, spec: PartSpec) -> PartModule:
        """See :class:`~swarm.models.family.ModelFamily`."""
        with torch.device("meta"):
            if spec.shard is not None:
                return GptShard(self._model, spec, partial(FeedForward, self._model))
            return Ends(self._model) if spec.name == ENDS else Stage(self._model, spec)

    def boundary(self, rows: int, sequence: int) -> TensorSpec:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return TensorSpec((rows, sequence, self._model.dim), self._model.compute)

    def initial_weights(self, seed: int, spec: PartSpec | None = None, files: Path | None = None) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`. Norms are 1, tallies 0; matrices normal with deviation 0.02,
        those that write to the residual stream divided by √(2·layers) (GPT-2, Radford et al. 2019, §2.3), and all of
        which few weights are left larger, so that what they answer is as large."""
        shapes = {name: tuple(p.shape) for name, p in self.build(spec or self.whole).named_parameters()}
        return {name: _draw(self._model, seed, name, shape) for name, shape in shapes.items()}

    def tensor_plan(self) -> TensorPlan:
        """See :class:`~swarm.models.family.ModelFamily`: attention by heads, feed-forward by inner columns;
        sparse matrices stay whole."""
        return (
            TensorPlan(why_whole="its matrices are sparse")
            if self._model.sparsity
            else TensorPlan(_STYLES, self._model.heads, self._model.key_value_heads)
        )

    def cost(self, spec: PartSpec, sequence: int) -> PartCost:
        """See :class:`~swarm.models.family.ModelFamily`.

        The forward is its matrices, sparse ones as if whole, those of as many experts as a token passes, and causal
        attention over half of ``sequence`` on average (scores and mixing: 2 · 2 · D · T/2). Norms, rotary and
        activations are left out: below 1 % from D = 512 on.
        """
        model, layers, mixed = self._model, spec.last_layer - spec.first_layer, len(self.expert_layers(spec))
        here = len(spec.experts_of(model.experts))
        share = here / max(1, model.experts)  # of those that a token passes, on average
        if spec.shard is not None:
            feed_forward = 3 * model.dim * model.feed_forward_dim
            held, used = mixed * here * feed_forward, round(mixed * model.top_k * share * feed_forward)
            return PartCost(parameters=held, idle=held - used, forward_flops=2 * used)
        table, ends = model.vocab_size * model.dim, spec.head * model.dim
        tallies = mixed * (model.experts * (model.steering > 0) + 2 * (model.capacity > 0))
        top = round(model.top_k * share)
        held, used = (self._in_matrices(layers, mixed, each, model.sparsity) for each in (here, top))
        passed = self._in_matrices(layers, mixed, top, 0.0)
        return PartCost(
            parameters=held + layers * 2 * model.dim + tallies + (spec.embedding + spec.head) * table + ends,
            idle=held - used,
            forward_flops=2 * (passed + spec.head * table) + layers * 2 * model.dim * sequence,
        )

    def _in_matrices(self, layers: int, mixed: int, experts: int, sparsity: float) -> int:
        """Count the weights of the matrices of so many layers, of which some have so many experts each."""
        model = self._model
        narrow, inner = model.key_value_heads * model.head_dim, model.feed_forward_dim
        of_dim, of_inner = survivors(model.dim, sparsity), survivors(inner, sparsity)
        attention, feed_forward = 2 * of_dim * (model.dim + narrow), 2 * inner * of_dim + model.dim * of_inner
        router = model.experts * model.dim
        return layers * attention + (layers - mixed) * feed_forward + mixed * (experts * feed_forward + router)

    def used_share(self, name: str, parameter: Tensor) -> float:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self._model.top_k / self._model.experts if _EXPERT in name else 1.0

    def export_config(self) -> dict[str, Any]:
        """See :class:`~swarm.models.family.ModelFamily`: it is a Llama, with rotary halves, grouped keys and values,
        SwiGLU, no biases and an untied head; with experts an ERNIE 4.5, whose router chooses by probability and bias.
        Keys that version 4 of transformers knows too."""
        model = self._model
        return {
            **(_ERNIE | _ernie_experts(model) if model.experts else _LLAMA),
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
            "tie_word_embeddings": False,
            "initializer_range": _STD,
        }

    def export_weights(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`: the same tensors under a Llama's names; of an ERNIE, whose
        rotary pairs are neighbours, queries and keys in another order. Sparse matrices are whole, with zeros."""
        if self._model.sparsity:
            wide, inner = self._model.dim, self._model.feed_forward_dim
            weights = {
                name: spread(name, one, inner if name.endswith(".down.weight") else wide) if _is_sparse(name) else one
                for name, one in weights.items()
            }
        if not self._model.experts:
            return {_llama_name(name): tensor for name, tensor in weights.items()}
        mixed = self.expert_layers(spec) if spec.shard is None else ()
        sent = {f"blocks.{layer}{STEERED}": torch.zeros(self._model.experts) for layer in mixed}
        sent |= {name: tensor for name, tensor in weights.items() if not name.endswith(TOLD)}
        return {_ernie_name(name): _as_ernie(self._model, name, tensor) for name, tensor in sent.items()}

    def exported_module(self, path: str) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return _llama_name(path + ".weight").removesuffix(".weight")


# --- initial weights -------------------------------------------------------------------------------------------------
# Drawn by numpy's ziggurat (table look-ups and multiplications), not by torch, whose normal sampler uses a different
# algorithm where AVX2 is present. Peers still download them rather than trust that.


_STD = 0.02
_RESIDUAL = (".attention.output.weight", ".down.weight")
_EXPERT = ".feed_forward.experts."


def _is_sparse(name: str) -> bool:
    """Return whether a parameter is a matrix of which a sparse model has some weights alone."""
    return name.split(".")[-2] in LINEAR


def _draw(model: GptConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith((STEERED, TOLD)):
        return torch.zeros(shape, dtype=torch.float32)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    std = _STD / math.sqrt(2 * model.layers) if name.endswith(_RESIDUAL) else _STD
    if model.sparsity and _is_sparse(name):
        std /= math.sqrt(1.0 - model.sparsity)
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
    "blocks.*.feed_forward.experts": "moe_tp_experts",
}

# --- a Llama's names -------------------------------------------------------------------------------------------------


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
}
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


# --- an ERNIE's ------------------------------------------------------------------------------------------------------


_ERNIE = {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "use_bias": False}


def _ernie_experts(model: GptConfig) -> dict[str, Any]:
    """Return what a config says of experts. Probabilities of those that a token passes are divided by their sum, but by
    no less than ``moe_norm_min``: with 1, which no sum exceeds, they are weighed as here."""
    return {
        "moe_intermediate_size": model.feed_forward_dim,
        "moe_k": model.top_k,
        "moe_num_experts": model.experts,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": model.layers - 1,
        "moe_layer_interval": model.expert_every,
        "moe_norm_min": 1.0,
    }


def _ernie_name(name: str) -> str:
    """Return what an ERNIE calls the parameter of this name."""
    layer, _, inner = name.partition(".feed_forward.")
    if inner == "bias":
        return f"model.layers.{layer.split('.')[1]}.mlp.moe_statics.e_score_correction_bias"
    if inner == "router.weight":
        return f"model.layers.{layer.split('.')[1]}.mlp.gate.weight"
    if not inner.startswith("experts."):
        return _llama_name(name)
    _, number, rest = inner.split(".", 2)
    return _llama_name(f"{layer}.feed_forward.{rest}").replace(".mlp.", f".mlp.experts.{number}.")


def _as_ernie(model: GptConfig, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as an ERNIE has it. Its heads rotate neighbours, ours the halves of a head."""
    if name.endswith(STEERED):
        return tensor.unsqueeze(0)
    if not name.endswith((".attention.query.weight", ".attention.key.weight")):
        return tensor
    halves = tensor.view(-1, 2, model.head_dim // 2, model.dim)
    return halves.transpose(1, 2).reshape(tensor.shape)

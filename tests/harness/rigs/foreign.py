"""The rig of ``swarm.models.hf``: small models of all architectures that may be cut, and of some that may not.

A name is an architecture, and behind a colon what is special about this one. Widths are small; kinds of layers, experts
and ties are those of the real ones.
"""

from __future__ import annotations

from typing import Any

from swarm.models.hf.hf_config import HfConfig, canonical
from swarm.models.spec import DType

CONTEXT = 16
_COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_OLD = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
_LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "topk_group": 1,
}  # fmt: skip
_HEAD = {"head_dim": 8}

SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": _HEAD,
    "gemma2": _HEAD | _SLIDING | {"query_pre_attn_scalar": 8},
    "gpt2": _OLD,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 4, "n_head": 4},
    "qwen3_moe": _HEAD | _EXPERTS | {"moe_intermediate_size": 16},
    "deepseek_v3": _LATENT | {"n_group": 2},
}
"""Eight that are unlike each other."""

ALL: dict[str, dict[str, Any]] = SMALL | {
    "llama:tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen2:sliding": {"use_sliding_window": True} | _SLIDING,
    "gemma": _HEAD,
    "gemma3_text": _HEAD | _SLIDING | {"query_pre_attn_scalar": 8},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 5},
    "gptj": _OLD | {"rotary_dim": 8},
    "gpt_bigcode": _OLD,
    "codegen": _OLD | {"rotary_dim": 4, "n_ctx": 64},
    "olmo": {},
    "olmo2": {},
    "olmo3": _SLIDING,
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "smollm3": {"no_rope_layer_interval": 2},
    "cohere": {},
    "cohere2": _HEAD | _SLIDING,
    "stablelm": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon:parallel": {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
    "falcon:alibi": {"alibi": True, "new_decoder_architecture": False},
    "starcoder2": {"sliding_window": 5},
    "mpt": {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    "opt:projected": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": True},
    "glm": _HEAD,
    "glm4": _HEAD,
    "nemotron": {},
    "helium": _HEAD,
    "arcee": {},
    "seed_oss": _HEAD,
    "exaone4": _SLIDING,
    "apertus": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": _HEAD,
    "xglm": {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48},
    "biogpt": {},
    "persimmon": {},
    "mixtral": _LOCAL_EXPERTS | {"sliding_window": None},
    "qwen2_moe": _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "olmoe": _EXPERTS,
    "granitemoe": _LOCAL_EXPERTS,
    "deepseek_v2": _LATENT | {"n_group": 1, "topk_method": "greedy"},
    "gpt_oss": _HEAD | _LOCAL_EXPERTS | _SLIDING,
    "llama4_text": _HEAD | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
}
"""All that may be cut, and packed."""

LEAKING: dict[str, dict[str, Any]] = {
    "jamba": {"mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "qwen3_next": _LINEAR | _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR,
}
"""May be cut, and not packed."""

REFUSED: dict[str, dict[str, Any]] = {
    "gemma3n_text": _HEAD | _SLIDING | {
        "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "laurel_rank": 4,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": None,
    },
    "gemma4_text": _HEAD | _SLIDING | {
        "global_head_dim": 8, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
    },
    "rwkv": {"attention_hidden_size": 32},
    "zamba2": {
        "num_mem_blocks": 1, "mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
}  # fmt: skip
"""May not be cut."""


def foreign_model(name: str, *, compute: DType = "float32", **changes: Any) -> HfConfig:
    """Return the ``[model]`` of one of them, which begins with random weights. Builds it on the meta device.

    Raises ConfigError where it cannot be cut.
    """
    from peers.foreign_model import ForeignModel

    config = canonical(foreign_config(name, **changes))
    found = ForeignModel(directory=None, source=name.partition(":")[0], revision="", config=config)  # type: ignore[arg-type]
    return found.model(scratch=True, context=CONTEXT, compute=compute)


def foreign_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return its config.json, as transformers writes it."""
    from transformers import CONFIG_MAPPING

    kind = name.partition(":")[0]
    special = (ALL | LEAKING | REFUSED)[name]
    config: dict[str, Any] = CONFIG_MAPPING[kind](**(_COMMON | special | changes)).to_dict()
    return config

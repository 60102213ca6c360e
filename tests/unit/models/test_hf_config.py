"""A config.json comes with an invite: what is refused of it before transformers builds anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.models.hf.hf_config import MAX_CONFIG_BYTES, HfConfig, canonical, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 96, "max_position_embeddings": 64, "rope_theta": 5e8, "eos_token_id": [1, 2],
}  # fmt: skip


def model(**changes: Any) -> HfConfig:
    fields: dict[str, Any] = {"layers": 4, "width": 32, "vocab_size": 96, "context": 16, "architecture": "llama"}
    return HfConfig(family="hf", **(fields | {"config": canonical(LLAMA)} | changes))


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}


def test_config_as_people_have_it_is_taken() -> None:
    model().check()
    assert json.loads(canonical(LLAMA | {"_name_or_path": "/home/somebody"})) == LLAMA


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "model_type = 'bert'"),
        ({"model_type": None}, "model_type = None"),
        ({"model_type": "zamba2"}, "its layers share weights"),
        ({"auto_map": {"AutoModelForCausalLM": "their_code.Model"}}, "names code to be downloaded"),
        ({"text_config": {"auto_map": {"a": "b"}}}, "names code to be downloaded"),
        ({"quantization_config": {"bits": 4}}, "cannot be trained"),
        ({"attn_implementation": "somebody/kernels"}, "the run sets it"),
        ({"_attn_implementation": "kernels-community/flash"}, "the run sets it"),
        ({"experts_implementation": "somebody/kernels"}, "the run sets it"),
        ({"use_kernels": True}, "asks for code"),
        ({"output_router_logits": True}, "none is known of llama"),
        ({"model_type": "deepseek_v3", "output_router_logits": True}, "none is known of deepseek_v3"),
        ({"model_type": "mixtral", "output_router_logits": "yes"}, "false, or true for"),
        ({"model_type": "mixtral", "router_aux_loss_coef": -0.1}, "a number from 0 to 1000"),
        ({"model_type": "mixtral", "router_aux_loss_coef": None}, "a number from 0 to 1000"),
        ({"model_type": "mixtral", "router_aux_loss_coef": [1]}, "a number from 0 to 1000"),
        ({"is_encoder_decoder": True}, "a decoder alone"),
        ({"num_hidden_layers": 513}, "from 1 to 512"),
        ({"num_hidden_layers": 0}, "from 1 to 512"),
        ({"hidden_size": 1 << 17}, "from 1 to 65536"),
        ({"num_experts": 5000}, "from 1 to 4096"),
        ({"vocab_size": 1 << 21}, "from 1 to 1048576"),
        ({"max_position_embeddings": 1 << 25}, "from 1 to 16777216"),
        ({"model_type": "gptj", "n_positions": 1 << 20}, "positions times positions"),
        ({"intermediate_size": 1 << 40}, "at most 1048576"),
        ({"conv": {"width": 1 << 40}}, r"conv\.width"),
        ({"rms_norm_eps": 1e300}, "a usual size"),
        ({"rope_theta": float("nan")}, "a usual size"),
        ({"hidden_act": "a" * 2000}, "at most 1024 characters"),
        ({"layer_types": ["x"] * 2000}, "2000 entries"),
        ({"deep": nested(12)}, "at most 8 levels"),
        ({"k" * 200: 1}, "keys of at most 128"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"] * 1000, 1 << 19]]}, "at most 512 layers"),
        ({"model_type": "gpt_neo", "attention_types": [["global", "many"]]}, "at most 512 layers"),
    ],
)
def test_config_that_asks_for_too_much_or_for_code_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(json.dumps(LLAMA | changes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected JSON"),
        ("[1]", "a JSON object"),
        ("[" * 100_000, "JSON"),
        (json.dumps(LLAMA | {"x": ["y" * 1000] * 600}), f"at most {MAX_CONFIG_BYTES} bytes"),
    ],
)
def test_text_that_is_no_config_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "qwen3"}, "the config's model_type llama"),
        ({"config": json.dumps(LLAMA)}, "canonical JSON"),
        ({"context": 65}, "at most 64"),
    ],
)
def test_run_says_what_its_config_says(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(**changes).check()

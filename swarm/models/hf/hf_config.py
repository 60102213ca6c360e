"""The manifest's ``[model]`` of a model of ``transformers``: its config.json as text, and what is read off it.

A manifest comes with an invite, so a config is foreign: it is checked here before ``transformers``, which builds what a
config says, is imported. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from swarm.errors import ConfigError
from swarm.models.lora_config import LoraConfig
from swarm.models.spec import DType
from swarm.parsing import parse_json
from swarm.schema import Section

MAX_CONFIG_BYTES = 1 << 19

ARCHITECTURES = frozenset({
    "apertus", "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5",
    "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "jamba", "lfm2", "llama",
    "llama4_text", "mamba", "mamba2", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
    "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "recurrent_gemma", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
})  # fmt: skip
"""``model_type`` of configs that may be built. All of them were tried: a part of them gives the bits of the whole."""

REFUSED: Mapping[str, str] = {
    "gemma3n_text": "its layers are given, with the hidden state, what depends on the text",
    "gemma4_text": "its layers are given, with the hidden state, what depends on the text",
    "rwkv": "it changes its own weights when it computes without training",
    "zamba2": "its layers share weights",
}
"""Those that cannot be cut, and why."""

LEAK_WHEN_PACKED = frozenset({"jamba", "lfm2", "mamba", "mamba2", "qwen3_5_text", "qwen3_next", "recurrent_gemma"})
"""Their layers carry a state from token to token, also from one packed document into the next."""

NOT_ADAPTED = frozenset({"jamba", "mamba"})
"""Their layers multiply by the weights of linear modules without calling these, so that an adapter would do nothing."""

SHARED_OUT = frozenset({
    "deepseek_v2", "deepseek_v3", "granitemoe", "jamba", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
})  # fmt: skip
"""Mixtures whose experts can be held in shards. All were tried against the whole model."""

NOT_SHARED_OUT: Mapping[str, str] = {
    "gpt_oss": "its experts have no number for a choice of none",
    "llama4_text": "its experts are given all rows, and not which of these go to whom",
}
"""Those whose experts cannot, and why."""

BALANCED = frozenset({
    "gpt_oss", "granitemoe", "jamba", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
})  # fmt: skip
"""Mixtures whose authors add a balance loss where a config says ``output_router_logits``: see
:mod:`swarm.models.balance`."""

_QUADRATIC = frozenset({"codegen", "gpt_bigcode", "gpt_neo", "gptj", "mpt"})
"""Build a table of positions × positions."""

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length", "seq_length")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
USED_EXPERT_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_BOUNDS: tuple[tuple[tuple[str, ...], int], ...] = (
    (LAYER_KEYS, 512),
    (_WIDTH, 1 << 16),
    (POSITION_KEYS, 1 << 24),
    (EXPERT_KEYS, 4096),
    (("vocab_size",), 1 << 20),
)
MAX_NUMBER = 1 << 20
"""Of any other whole number that sizes something; what counts bases of angles and the like may be larger."""
MAX_BALANCE = 1000
"""Of the balance loss's weight. Models are trained with .001 to .02."""
_NO_SIZE = re.compile(r"theta|base|positions?|seed|seq_len|max_length|factor|token_id|_ctx$|context_length")
_UNLIMITED = frozenset({"time_step_limit"})
"""Keys under which infinity means: no limit."""
_MAX_QUADRATIC, _MAX_DEPTH, _MAX_ITEMS, _MAX_TEXT = 1 << 13, 8, 1024, 1024

_FORBIDDEN = {
    "auto_map": "it names code to be downloaded and run",
    "quantization_config": "weights that are stored quantized cannot be trained",
    "trust_remote_code": "it asks for foreign code to be run",
    "attn_implementation": "it may name code to be downloaded; the run sets it",
    "_attn_implementation": "it may name code to be downloaded; the run sets it",
    "_attn_implementation_internal": "it may name code to be downloaded; the run sets it",
    "experts_implementation": "it may name code to be downloaded; the run sets it",
    "_experts_implementation": "it may name code to be downloaded; the run sets it",
    "use_kernels": "it asks for code to be downloaded",
}
DROPPED = ("_name_or_path", "_commit_hash")
"""Keys that say where a copy lay: they are left out of a manifest. All others are kept as they are, for the export."""


class HfConfig(Section):
    """A model of ``transformers``, whole or cut. The numbers are what ``config`` says,
    which is checked when a part is built."""

    family: Literal["hf"]
    """The kind of model, which defines the other keys."""
    source: Annotated[str, StringConstraints(max_length=200, pattern=r"^[A-Za-z0-9._/-]*$")] = ""
    """Where the model's files were found, for people."""
    revision: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40})?$")] = ""
    """Commit at which they were found, for people."""
    architecture: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
    """The config's ``model_type``."""
    layers: Annotated[int, Field(ge=1, le=512)]
    """Blocks."""
    width: Annotated[int, Field(ge=8, le=1 << 16)]
    """Width of what travels between stages."""
    vocab_size: Annotated[int, Field(ge=2, le=1 << 20)]
    """Number of tokens."""
    context: Annotated[int, Field(ge=8, le=1 << 17)]
    """Tokens in a row of text: at most those that the model has positions for."""
    scratch: bool = False
    """Begin with random weights, not with those of the files."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Implementation of attention that the family runs with."""
    experts_implementation: Annotated[
        Literal["grouped_mm", "eager"], Field(exclude_if=lambda value: value == "grouped_mm")
    ] = "grouped_mm"
    """Implementation of a mixture's experts that the family runs with: ``grouped_mm`` multiplies by all at once,
    ``eager`` by one after the other."""
    compute: DType = "float32"
    """Data type of the blocks."""
    config: Annotated[str, StringConstraints(max_length=MAX_CONFIG_BYTES)]
    """The model's config.json, as canonical JSON."""
    lora: Annotated[LoraConfig | None, Field(exclude_if=lambda value: value is None)] = None

    @property
    def balanced(self) -> bool:
        """Return whether the config asks for the balance loss of a mixture's experts."""
        return json.loads(self.config).get("output_router_logits") is True

    @property
    def has_experts(self) -> bool:
        """Return whether it is a mixture."""
        return any(number > 1 for number in numbers_of(json.loads(self.config), EXPERT_KEYS))

    def check(self) -> None:
        """Check the config and that the other keys are those that it gives. Raises ConfigError."""
        theirs = read_config(self.config)
        if theirs.get("model_type") != self.architecture:
            raise _refused(
                "model.architecture", self.architecture, f"the config's model_type {theirs.get('model_type')}"
            )
        if self.lora is not None and self.architecture in NOT_ADAPTED:
            why = "its layers use the weights of linear modules without calling them, where an adapter would be"
            remedy = "Train all of its weights, or take another model."
            raise ConfigError("model.lora", self.architecture, "another kind of model", remedy, why=why)
        if self.experts_implementation != "grouped_mm" and not self.has_experts:
            raise ConfigError("model.experts_implementation", self.experts_implementation,
                              "nothing where the model has no experts", "Leave it out.")  # fmt: skip
        if self.config != canonical(theirs):
            raise _refused("model.config", self.config[:80], "canonical JSON: sorted keys and no spaces")
        largest = max((n for n in numbers_of(theirs, POSITION_KEYS)), default=self.context)
        if self.context > largest:
            allowed = f"at most {largest}, as many positions as the model has"
            raise ConfigError("model.context", self.context, allowed, f"Ask for fewer tokens in a row: {largest}.")


def canonical(config: Mapping[str, Any]) -> str:
    """Return a config as it stands in a manifest."""
    kept = {key: value for key, value in config.items() if key not in DROPPED}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def read_config(text: str) -> dict[str, Any]:
    """Parse and check the text of a foreign config.json. Raises ConfigError that names the key and what is wrong."""
    if len(text.encode("utf-8", "replace")) > MAX_CONFIG_BYTES:
        raise _refused("model.config", text[:40], f"at most {MAX_CONFIG_BYTES} bytes")
    try:
        config = parse_json(text)
    except ValueError as error:
        raise _refused("model.config", text[:80], "JSON", why=str(error)) from None
    if not isinstance(config, dict):
        raise _refused("model.config", text[:80], "a JSON object, as in a config.json")
    check_config(config)
    return config


def check_config(config: Mapping[str, Any]) -> None:
    """Check what a foreign config.json says, before anything is built from it. Raises ConfigError."""
    for path, key, value in _walk(config):
        if key in _FORBIDDEN and value not in (None, False, "sdpa", "eager"):
            raise _refused(f"model.config: {path}", value, "nothing", why=_FORBIDDEN[key])
        _check_value(path, key, value)
    kind = config.get("model_type")
    if kind in REFUSED:
        raise _refused("model_type", kind, "a model whose layers can be parted", why=REFUSED[str(kind)])
    if kind not in ARCHITECTURES:
        raise _refused("model_type", kind, f"one of {', '.join(sorted(ARCHITECTURES))}")
    if config.get("is_encoder_decoder"):
        raise _refused("is_encoder_decoder", True, "a decoder alone")
    _check_balance(config, str(kind))
    kinds = config.get("attention_types")
    if kinds is not None and _layers_said(kinds) > _BOUNDS[0][1]:
        raise _refused("attention_types", "…", f"[[kinds, how often], …] for at most {_BOUNDS[0][1]} layers")
    if kind in _QUADRATIC:
        for number in numbers_of(config, POSITION_KEYS):
            if number > _MAX_QUADRATIC:
                allowed = f"at most {_MAX_QUADRATIC}: {kind} makes a table of positions times positions"
                raise _refused("positions", number, allowed)


def _check_balance(config: Mapping[str, Any], kind: str) -> None:
    asked = config.get("output_router_logits")
    if asked not in (None, False) and (asked is not True or kind not in BALANCED):
        why = f"it asks for a balance loss, and none is known of {kind}"
        allowed = f"false, or true for {', '.join(sorted(BALANCED))}"
        raise _refused("output_router_logits", asked, allowed, why="" if kind in BALANCED else why)
    weight = config.get("router_aux_loss_coef", 0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_BALANCE:
        raise _refused("router_aux_loss_coef", weight, f"a number from 0 to {MAX_BALANCE}")


def numbers_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[int]:
    """Return the whole numbers that a config gives under any of these keys."""
    return [value for _, key, value in _walk(config) if key in keys and isinstance(value, int)]


def _layers_said(kinds: Any) -> float:
    """Return how many layers ``attention_types`` stands for; infinitely many where it is something else."""
    try:
        return sum(len(names) * int(often) for names, often in kinds)
    except (TypeError, ValueError):
        return math.inf


def _check_value(path: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        most = next((bound for keys, bound in _BOUNDS if key in keys), None)
        if most is not None and not 0 < value <= most:
            raise _refused(f"model.config: {path}", value, f"from 1 to {most}")
        if isinstance(value, int) and abs(value) > MAX_NUMBER and most is None and not _NO_SIZE.search(key):
            raise _refused(f"model.config: {path}", value, f"at most {MAX_NUMBER}")
        if math.isnan(value) or (abs(value) > 1e18 and not (math.isinf(value) and key in _UNLIMITED)):
            raise _refused(f"model.config: {path}", value, "a number of a usual size")
    elif isinstance(value, str) and len(value) > _MAX_TEXT:
        raise _refused(f"model.config: {path}", value[:40] + "…", f"at most {_MAX_TEXT} characters")
    elif isinstance(value, list | dict) and len(value) > _MAX_ITEMS:
        raise _refused(f"model.config: {path}", f"{len(value)} entries", f"at most {_MAX_ITEMS}")


def _walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Every value of a decoded JSON document: its path, the last key on it, itself."""
    if depth > _MAX_DEPTH:
        raise _refused(f"model.config: {path}", "…", f"at most {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if len(key) > 128:
                raise _refused("model.config", key[:40] + "…", "keys of at most 128 characters")
            at = f"{path}.{key}" if path else key
            yield at, key, inner
            yield from _walk(inner, at, depth + 1)
    elif isinstance(value, list):
        key = path.rpartition(".")[2]
        for inner in value[: _MAX_ITEMS + 1]:
            yield path, key, inner
            yield from _walk(inner, path, depth + 1)


def _refused(key: str, value: object, allowed: str, *, why: str = "") -> ConfigError:
    return ConfigError(key, value, allowed, "Check its config.json.", why=why)

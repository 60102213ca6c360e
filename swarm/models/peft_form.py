"""The adapters of a part in the form that peft keeps them in, beside the model of ``transformers`` that they belong to.

peft calls a module by its path in that model, below ``base_model.model``, and names every adapted module in its config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from swarm.models.lora import LoraFamily, stands_upright
from swarm.models.spec import PartSpec

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter_tensors(family: LoraFamily, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a part's adapters, given its state by name, as peft's file has them. Raises ConfigError where the family
    has no form in transformers."""
    found: dict[str, Tensor] = {}
    for path in family.adapted(family.build(spec)):
        module = f"base_model.model.{family.exported_module(path)}"
        found[f"{module}.lora_A.weight"] = weights[f"{path}.lora_a"].contiguous()
        found[f"{module}.lora_B.weight"] = weights[f"{path}.lora_b"].contiguous()
    return found


def adapter_config(family: LoraFamily, parts: Sequence[PartSpec], *, base: str, revision: str) -> dict[str, Any]:
    """Return what peft reads beside the weights. ``base`` is what transformers loads the model by, or
    stands for it; ``revision`` is "" where it has none."""
    targets, upright = list[str](), False
    for spec in parts:
        part = family.build(spec)
        for path in family.adapted(part):
            targets.append(family.exported_module(path))
            upright = upright or stands_upright(part.get_submodule(path))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": family.lora.rank,
        "lora_alpha": family.lora.alpha,
        "lora_dropout": family.lora.dropout,
        "target_modules": sorted(targets),
        "fan_in_fan_out": upright,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }

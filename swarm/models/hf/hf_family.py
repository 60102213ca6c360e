"""Causal language models of ``transformers`` as a family: how parts are built, where their weights come from, the cost.

See :mod:`.part` for how a model is cut. What needs transformers imports it inside: a joiner that only reads an invite
does without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, StateError, install_command
from swarm.models.family import ModelFamily, PartCost, PartModule
from swarm.models.hf.hf_config import (
    EXPERT_KEYS,
    LEAK_WHEN_PACKED,
    NOT_SHARED_OUT,
    SHARED_OUT,
    USED_EXPERT_KEYS,
    HfConfig,
)
from swarm.models.layout import state_of
from swarm.models.spec import PartSpec, TensorSpec
from swarm.models.strips import TensorPlan

if TYPE_CHECKING:
    from swarm.models.hf.anatomy import Anatomy
    from swarm.models.hf.experts import HfShard
    from swarm.models.hf.part import HfPart


class HfFamily(ModelFamily):
    """See :class:`~swarm.models.family.ModelFamily`."""

    def __init__(self, model: HfConfig) -> None:
        super().__init__(model)
        self._model = model

    @property
    def described(self) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        model = self._model
        begins = "random weights" if model.scratch else f"the weights of {model.source or 'its files'}"
        at = f"@{model.revision[:12]}" if model.revision and not model.scratch else ""
        layers = f"{model.layers} layer{'' if model.layers == 1 else 's'} of width {model.width}"
        return f"{model.architecture}, {layers}, context {model.context}, in {model.compute}, from {begins}{at}"

    @property
    def packs(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self._model.architecture not in LEAK_WHEN_PACKED

    @property
    def balances(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self._model.balanced

    @property
    def mixture(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return _expert_share(self._model.config) < 1.0

    @property
    def experts(self) -> int:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return _experts(self._model.config)[0] if self._model.has_experts else 0

    @property
    def uncut_experts(self) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        model = self._model
        if not self.experts or model.architecture not in SHARED_OUT:
            untried = "nobody has tried it with models of its kind"
            return super().uncut_experts or NOT_SHARED_OUT.get(model.architecture, untried)
        needs = 'shards compute one expert after the other, so it needs [model] experts_implementation = "eager"'
        return "" if model.experts_implementation == "eager" else needs

    def expert_layers(self, spec: PartSpec) -> tuple[int, ...]:
        """See :class:`~swarm.models.family.ModelFamily`."""
        layers = _expert_layers(_in_float32(self._model).model_dump_json())
        return tuple(number for number in layers if spec.first_layer <= number < spec.last_layer)

    def cut(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`. Of a whole stage's stacks a shard has each expert's own."""
        return {name: _of_stack(name, weights) for name in state_of(self.build(spec))}

    def joined(self, stage: Mapping[str, Tensor], shards: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`."""
        stacks: dict[str, dict[int, Tensor]] = {}
        for name, tensor in (item for shard in shards for item in shard.items()):
            stack, number = _in_stack(name)
            stacks.setdefault(stack, {})[number] = tensor
        return {**stage, **{name: torch.stack([each[at] for at in sorted(each)]) for name, each in stacks.items()}}

    def build(self, spec: PartSpec) -> PartModule:
        """See :class:`~swarm.models.family.ModelFamily`. Raises ConfigError also where transformers is not installed,
        cannot build the config, or finds another model in it than ``[model]`` says."""
        return self._part(spec, self._model) if spec.shard is None else self._shard(spec)

    def boundary(self, rows: int, sequence: int) -> TensorSpec:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return TensorSpec((rows, sequence, self._model.width), self._model.compute)

    def initial_weights(self, seed: int, spec: PartSpec | None = None, files: Path | None = None) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`: from the model's files, or as its own code draws them."""
        if spec is not None and spec.expert_shards:
            return self.cut(spec, self.initial_weights(seed, replace(spec, expert_shards=0, shard=None), files))
        part = self._part(spec or self.whole, _in_float32(self._model))
        if self._model.scratch:
            return _drawn(part, seed)
        if files is None:
            remedy = "Name the directory where they are."
            raise StateError(f"the weights of {self._model.source or 'the model'} are not on this machine. {remedy}")
        from swarm.models.hf.files import load_part

        return load_part(part, files)

    def warm_up(self) -> None:
        """See :class:`~swarm.models.family.ModelFamily`."""
        require_transformers()
        from swarm.models.hf.skeleton import skeleton

        anatomy_of(self._model)
        skeleton(self._model)

    def tensor_plan(self) -> TensorPlan:
        """See :class:`~swarm.models.family.ModelFamily`: what transformers says of the family, whatever the config
        does."""
        require_transformers()
        from swarm.models.hf.skeleton import their_config

        text = their_config(self._model.config).get_text_config()
        above, heads = anatomy_of(self._model).path.removesuffix("layers"), getattr(text, "num_attention_heads", 0)
        styles = {f"model.{above}{path}": style for path, style in (type(text).base_model_tp_plan or {}).items()}
        return TensorPlan(styles, heads, getattr(text, "num_key_value_heads", None) or heads)

    def cost(self, spec: PartSpec, sequence: int) -> PartCost:
        """See :class:`~swarm.models.family.ModelFamily`.

        The forward is its matrices, those of experts by the share that a token uses, and causal attention over half of
        ``sequence``. The shapes are those of a build without weights: a second or two for the first part of a model.
        """
        part = self.build(spec)
        used, idle, tables = 0.0, 0.0, _tables(part)
        for name, parameter in part.named_parameters():
            if parameter.ndim >= 2 and name not in tables:
                share = self.used_share(name, parameter)
                used, idle = used + parameter.numel() * share, idle + parameter.numel() * (1 - share)
        if spec.head and not any(n.startswith("model.lm_head") for n, _ in part.named_parameters()):
            used += self._model.width * self._model.vocab_size  # tied to the table
        layers = spec.last_layer - spec.first_layer if spec.shard is None else 0
        attention = layers * 2 * self._model.width * sequence
        elements = sum(tensor.numel() for tensor in state_of(part).values())
        return PartCost(parameters=elements, forward_flops=int(2 * used) + attention, idle=round(idle))

    def used_share(self, name: str, parameter: Tensor) -> float:
        """See :class:`~swarm.models.family.ModelFamily`."""
        of_experts = parameter.ndim == 3 or ".experts." in name
        return _expert_share(self._model.config) if of_experts else 1.0

    # --- export --------------------------------------------------------------------------------------------------

    def export_config(self) -> dict[str, Any]:
        """See :class:`~swarm.models.family.ModelFamily`: what the run was founded with."""
        config: dict[str, Any] = json.loads(self._model.config)
        return config

    def export_weights(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`."""
        from swarm.models.hf.files import stored_names

        return stored_names(self._part(spec, _in_float32(self._model)), weights)

    def exported_module(self, path: str) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return path.removeprefix("model.")

    def _shard(self, spec: PartSpec) -> HfShard:
        from swarm.models.hf.experts import HfShard
        from swarm.models.hf.skeleton import skeleton

        return HfShard(self._model, spec, skeleton(self._model), anatomy_of(self._model))

    def _part(self, spec: PartSpec, model: HfConfig) -> HfPart:
        require_transformers()
        from swarm.models.hf.part import HfPart
        from swarm.models.hf.skeleton import skeleton

        anatomy = anatomy_of(model)
        return HfPart(model, spec, skeleton(model), anatomy)


def anatomy_of(model: HfConfig) -> Anatomy:
    """Return where the model can be cut; found once in a process. Raises ConfigError as :meth:`HfFamily.build`."""
    return _anatomy(_in_float32(model).model_dump_json())


@lru_cache(maxsize=8)
def _anatomy(dumped: str) -> Anatomy:
    from swarm.models.hf.anatomy import find_anatomy
    from swarm.models.hf.skeleton import skeleton

    model = HfConfig.model_validate_json(dumped)
    model.check()
    whole: Any = skeleton(model)
    anatomy, text = find_anatomy(whole), whole.config.get_text_config()
    found = {"layers": anatomy.count, "width": text.hidden_size, "vocab_size": text.vocab_size}
    for key, value in found.items():
        if getattr(model, key) != value:
            why = f"the config gives {value}"
            raise ConfigError(f"model.{key}", getattr(model, key), str(value), "Found the run again.", why=why)
    return anatomy


@lru_cache(maxsize=8)
def _expert_layers(dumped: str) -> tuple[int, ...]:
    """The layers that have experts."""
    from swarm.models.hf.experts import experts_in
    from swarm.models.hf.skeleton import skeleton

    model = HfConfig.model_validate_json(dumped)
    anatomy = anatomy_of(model)
    return tuple(number for number, *_ in experts_in(skeleton(model), anatomy, 0, anatomy.count))


def _in_stack(name: str) -> tuple[str, int]:
    """Return the name of the stack that an expert's tensor is one of, and the expert's number."""
    above, number, leaf = name.rsplit(".", 2)
    return f"{above}.{leaf}", int(number)


def _of_stack(name: str, weights: Mapping[str, Tensor]) -> Tensor:
    if name in weights:
        return weights[name]
    stack, number = _in_stack(name)
    return weights[stack][number]


def _in_float32(model: HfConfig) -> HfConfig:
    """Return the model in the dtype of master weights and files, whatever it is computed in and with; experts one after
    the other cannot be followed without data."""
    return model.model_copy(update={"compute": "float32", "lora": None, "experts_implementation": "grouped_mm"})


def require_transformers() -> None:
    """Raise ConfigError that says how to install it where transformers cannot be imported."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        why = f"this model needs transformers, which cannot be imported: {error}"
        raise ConfigError(
            "model.family", "hf", "an installation with the extra hf", f"Install it: {install_command('hf')}", why=why
        ) from None


# --- random weights --------------------------------------------------------------------------------------------------


def _drawn(part: HfPart, seed: int) -> dict[str, Tensor]:
    """Initial weights as the model's own code draws them, each module's by a seed of its own: every cut gets the same.

    They may differ between machines in their last bits. Peers download them.
    """
    names = {id(module): name for name, module in part.model.named_modules()}
    with torch.random.fork_rng(devices=[]):
        for module in list(part.model.modules()):
            if not _materialise(module):
                continue
            torch.manual_seed(_seed(seed, names[id(module)]))
            with torch.no_grad():
                part.model._init_weights(module)
    part.tie()
    return {name: tensor.detach().contiguous() for name, tensor in state_of(part).items()}


def _materialise(module: nn.Module) -> bool:
    """Give a module's own parameters data, where they have none; returns whether one had none."""
    without = {name: p for name, p in module._parameters.items() if p is not None and p.device.type == "meta"}
    for name, parameter in without.items():
        module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
    return bool(without)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


# --- cost ------------------------------------------------------------------------------------------------------------


def _tables(part: nn.Module) -> set[str]:
    tables = {id(module.weight) for module in part.modules() if isinstance(module, nn.Embedding)}
    return {name for name, parameter in part.named_parameters() if id(parameter) in tables}


@lru_cache(maxsize=8)
def _experts(text: str) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token uses; 0 of what is not said."""
    config = json.loads(text)
    experts, used = (
        next((int(config[key]) for key in keys if isinstance(config.get(key), int)), 0)
        for keys in (EXPERT_KEYS, USED_EXPERT_KEYS)
    )
    return experts, used


def _expert_share(text: str) -> float:
    """The share of the experts that a token uses."""
    experts, used = _experts(text)
    return min(1.0, used / experts) if experts and used else 1.0

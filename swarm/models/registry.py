"""The families of models there are, by the name that a manifest's ``[model]`` gives as ``family``.

A new one is a line in :data:`FAMILIES`, and its config in the union :data:`AnyModel`. Its code, which needs torch, is
imported where a model of it is first met: a manifest's keys are checked without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ValidationError
from pydantic_core import InitErrorDetails

from swarm.models.gpt_config import GptConfig
from swarm.models.hf.hf_config import HfConfig
from swarm.models.lora_config import LoraConfig
from swarm.models.spec import ModelConfig
from swarm.schema import Section

if TYPE_CHECKING:
    from swarm.models.family import ModelFamily


@dataclass(frozen=True, slots=True)
class RegisteredFamily:
    """A family: what its ``[model]`` may say, and the module and class of what follows from it."""

    config: type[Section]
    module: str
    name: str

    def of(self, model: ModelConfig) -> ModelFamily:
        """Return what follows from a model's config. The first time it imports torch."""
        found: ModelFamily = getattr(import_module(self.module), self.name)(model)
        return found


FAMILIES: Mapping[str, RegisteredFamily] = MappingProxyType(
    {
        "gpt": RegisteredFamily(GptConfig, "swarm.models.gpt_family", "GptFamily"),
        "hf": RegisteredFamily(HfConfig, "swarm.models.hf.hf_family", "HfFamily"),
    }
)

DEFAULT = "gpt"
"""The family of a ``[model]`` that names none."""


def family_of(model: ModelConfig) -> ModelFamily:
    """Return what follows from a model's config."""
    family, lora = FAMILIES[model.family].of(model), lora_of(model)
    if lora is None:
        return family
    from swarm.models.lora import LoraFamily

    return LoraFamily(model, family, lora)


def lora_of(model: ModelConfig) -> LoraConfig | None:
    """Return the adapters that are trained in place of the model's weights; None where these are."""
    lora: LoraConfig | None = getattr(model, "lora", None)  # a family that has no such key has no adapters
    return lora


def shares(model: ModelConfig) -> bool:
    """Return whether a run of this model begins with stages that share their layers."""
    return getattr(model, "share", "none") != "none"  # a family that has no such key shares none


def delinked_at(model: ModelConfig) -> int:
    """Return the step with whose close stages share nothing any more; 0 where they never do, or never stop."""
    step: int = getattr(model, "delink_at", 0)
    return step


def expert_interval(model: ModelConfig) -> int:
    """Return every how many layers one has experts of our own (:mod:`swarm.models.experts`), so that parts of the model
    may have tallies; 0 where none has."""
    every: int = getattr(model, "expert_every", 0)  # a family that has no such key has none
    return every if getattr(model, "experts", 0) else 0


def steering(model: ModelConfig) -> float:
    """Return by how much a step steers what chooses the model's experts; 0 where none does."""
    rate: float = getattr(model, "steering", 0.0)
    return rate


def sparsity(model: ModelConfig) -> float:
    """Return the share of weights of the model's layers that there are none of."""
    share: float = getattr(model, "sparsity", 0.0)  # a family that has no such key has all
    return share


# --- the manifest's [model] ------------------------------------------------------------------------------------------


def config_type(table: Mapping[str, Any]) -> type[Section]:
    """Return what a ``[model]`` may say. Raises pydantic's ValidationError for a family that there is not."""
    name = table.get("family", DEFAULT)
    if not isinstance(name, str) or name not in FAMILIES:
        unknown = InitErrorDetails(
            type="literal_error", loc=("family",), input=name, ctx={"expected": " or ".join(map(repr, FAMILIES))}
        )
        raise ValidationError.from_exception_data("model", [unknown])
    return FAMILIES[name].config


def _read(table: object) -> object:
    """Read ``[model]`` as its family does; leave what is no table to the union."""
    return config_type(table).model_validate(table) if isinstance(table, dict) else table


AnyModel = Annotated[GptConfig | HfConfig, BeforeValidator(_read)]
"""The union of all families' configs, which ``family`` tells apart; our own where it is left out."""

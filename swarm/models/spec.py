"""Cut a model of any family: the manifest's ``[split]``, the resulting parts, and the tensors between them.

Shapes: B microbatch size, T context length, V vocabulary.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field, StringConstraints

from swarm.columns import MAX_VARIANTS, columns, stage_parts, takes
from swarm.errors import ConfigError
from swarm.ids import ENDS, PartName, variant_of
from swarm.schema import HistogramField, OrganisationName, Section

DType = Literal["float32", "bfloat16"]

MAX_STRIPS = 64

DOMAIN = r"^[a-z0-9][a-z0-9-]{0,30}$"


class ModelConfig(Protocol):
    """The common fields of any family's ``[model]``; all others are the family's own.

    ``family`` is its name in the registry, ``layers`` the number of layers to cut into stages, ``vocab_size`` that of
    token ids, ``context`` that of tokens in a row.
    """

    @property
    def family(self) -> str:
        """Name of the family."""

    @property
    def layers(self) -> int:
        """Layers to cut into stages."""

    @property
    def vocab_size(self) -> int:
        """V: token ids are below it."""

    @property
    def context(self) -> int:
        """T: tokens in a row."""

    @property
    def compute(self) -> DType:
        """Return what its parts compute in; their weights are float32."""

    def check(self) -> None:
        """Raise ConfigError where the keys do not fit each other. Without torch."""


class SplitConfig(Section):
    """``[split]``: the cut of the blocks into stages, and the holders of the ends."""

    stages: Annotated[int, Field(ge=1, le=512)] = 2
    """Number of stages: at most the model's layers."""
    layers_per_stage: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Blocks of each stage; left out: spread evenly, and earlier stages take the remainder."""
    ends: Literal["private", "hosted"] = "private"
    """``private``: every trainer holds embedding and head; ``hosted``: the first and the last stage do."""
    routes: Annotated[Literal["any", "organisation"], Field(exclude_if=lambda routes: routes == "any")] = "any"
    """Whom microbatches pass: ``any`` host, or those of the trainer's ``organisation`` alone, as invites name it."""
    tensor: Annotated[int, Field(ge=1, le=MAX_STRIPS, exclude_if=lambda number: number == 1)] = 1
    """Into how many strips each host computes attention and feed-forward, whose answers it adds in order: a multiple of
    the devices of any host. 1: as many as it has devices."""
    variants: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_VARIANTS)], ...], Field(max_length=512, exclude_if=operator.not_)
    ] = ()
    """Experts of each stage, which begin alike: a microbatch passes one of them, and only that one learns from it.
    Left out: every stage has one."""
    route_by: Annotated[Literal["text", "domain"] | None, Field(exclude_if=operator.not_)] = None
    """How a microbatch finds its experts: ``text`` by what is in it, ``domain`` by what its trainer joined with. The
    one numbered c passes variant c modulo V of a stage that has V."""
    domains: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=DOMAIN)], ...],
        Field(max_length=MAX_VARIANTS, exclude_if=operator.not_),
    ] = ()
    """Names of what trainers bring with ``route_by = "domain"``, in the order of variants."""
    own: Annotated[
        dict[Annotated[str, StringConstraints(pattern=DOMAIN)], OrganisationName],
        Field(max_length=MAX_VARIANTS, exclude_if=operator.not_),
    ] = {}
    """Domains whose experts one organisation keeps to itself, as ``legal = "acme"``: its peers alone hold them, feed
    them, or can have their weights. While none of its hosts is there, these experts wait and the others train on."""
    centres: Annotated[tuple[HistogramField, ...], Field(max_length=MAX_VARIANTS, exclude_if=operator.not_)] = ()
    """How often tokens are in the text of each choice, by bins that their ids are hashed into: text goes to the
    nearest. The founder learns them."""

    @property
    def parts(self) -> tuple[PartName, ...]:
        """All parts: the stages in order, and last, when they are private, the ends."""
        stages = stage_parts(self.stages, self.variants)
        return stages if self.ends == "hosted" else (*stages, ENDS)

    @property
    def choices(self) -> int:
        """Return how many ways there are for a microbatch, by its text or its trainer's domain."""
        return len(self.domains or self.centres) or 1

    def passing(self, part: PartName) -> tuple[str, ...]:
        """Return the domains, or the kinds of text by number, whose microbatches pass a variant of a stage; of a part
        that all pass none."""
        names = self.domains or tuple(f"kind {number}" for number in range(len(self.centres)))
        return tuple(n for choice, n in enumerate(names) if takes(part, choice)) if variant_of(part)[1] > 1 else ()

    @property
    def owners(self) -> dict[PartName, str]:
        """Return the organisation of each variant that one keeps to itself: all that pass it are of its domains."""
        found = {part: {self.own.get(name, "") for name in self.passing(part)} for part in self.parts}
        return {part: org for part, each in found.items() if len(each) == 1 and (org := min(each))}

    @property
    def own_routes(self) -> bool:
        """Return whether microbatches stay in the organisation of their trainer."""
        return self.routes == "organisation"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype a tensor must have; ``dtype`` is a torch dtype's name without the module."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One part of a cut model: layers ``first_layer`` up to, not including, ``last_layer``, and perhaps ends.
    ``tensor`` is the run's: :attr:`SplitConfig.tensor`.

    Where the experts of the layers are in so many ``expert_shards``, a stage has the rest of its layers. A part with
    the number of a ``shard`` has these experts of all its layers, and nothing else."""

    name: PartName
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool
    tensor: int = 1
    expert_shards: int = 0
    shard: int | None = None

    def experts_of(self, number: int) -> range:
        """Return which of so many experts a layer of this part has: none, where they are elsewhere."""
        if not self.expert_shards:
            return range(number)
        if self.shard is None:
            return range(0)
        each = number // self.expert_shards
        return range(self.shard * each, (self.shard + 1) * each)


def token_spec(microbatch_size: int, sequence: int) -> TensorSpec:
    """Return the spec of the tokens and of the targets that hosted ends receive: int64 (B, T)."""
    return TensorSpec((microbatch_size, sequence), "int64")


def split_layers(layers: int, split: SplitConfig) -> tuple[PartSpec, ...]:
    """All parts of a model with so many layers, in the order of :attr:`SplitConfig.parts`.

    Raises ConfigError when the layers do not fit the stages.
    """
    hosted, parts, first = split.ends == "hosted", [], 0
    for names, count in zip(columns(split.parts), _layers_per_stage(layers, split), strict=True):
        parts += [
            PartSpec(
                name=name,
                first_layer=first,
                last_layer=first + count,
                embedding=hosted and first == 0,
                head=hosted and first + count == layers,
                tensor=split.tensor,
            )
            for name in names
        ]
        first += count
    if not hosted:
        parts.append(PartSpec(name=ENDS, first_layer=0, last_layer=0, embedding=True, head=True))
    return tuple(parts)


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the sizes of stages that are as alike as they go, the larger ones first."""
    each, more = divmod(layers, stages)
    return (each + 1,) * more + (each,) * (stages - more)


def _layers_per_stage(layers: int, split: SplitConfig) -> tuple[int, ...]:
    if split.stages > layers:
        raise ConfigError(
            "split.stages", split.stages, f"at most model.layers = {layers}", "Use fewer stages or more layers."
        )
    counts = split.layers_per_stage or even_stages(layers, split.stages)
    if len(counts) != split.stages or sum(counts) != layers:
        raise ConfigError(
            "split.layers_per_stage",
            counts,
            f"{split.stages} numbers that add up to model.layers = {layers}",
            "Correct it or leave it out.",
        )
    return counts

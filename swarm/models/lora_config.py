"""The manifest's ``[model.lora]``: a run that trains adapters beside frozen weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from swarm.schema import DigestField, PartField, Section

BaseDType = Literal["bfloat16", "nf4", "float32"]

TargetField = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,200}$")]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., arXiv 2106.09685): y = W·x + alpha/rank · B·(A·x), of which A and B are trained.

    ``targets`` are the names of the layers' linear modules that get one, as ``q_proj`` or more of their path; none: all
    of them. ``base`` is what the frozen weights are stored in: with ``nf4`` (Dettmers et al., arXiv 2305.14314, §3) the
    matrices of the layers take 4.25 bits a weight, all other tables are bfloat16. ``digests`` are the stored bytes of
    each part's frozen weights, which its founder fills in: they never change, so whoever has them needs no others.
    ``dropout`` is the fraction of x that A does not see in training; it is left out of what is written where it is 0,
    so that manifests without it keep their id.
    """

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    targets: Annotated[tuple[TargetField, ...], Field(max_length=4096)] = ()
    dropout: Annotated[float, Field(ge=0, lt=1, exclude_if=lambda value: value == 0.0)] = 0.0
    base: BaseDType = "bfloat16"
    digests: Annotated[Mapping[PartField, DigestField], Field(max_length=1024, exclude_if=lambda value: not value)] = {}

    @property
    def scale(self) -> float:
        """What an adapter's answer is multiplied by."""
        return self.alpha / self.rank

    def chooses(self, module: str) -> bool:
        """Return whether the module of this path gets an adapter."""
        return not self.targets or any(module == name or module.endswith(f".{name}") for name in self.targets)

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

    ``nf4`` is that of Dettmers et al., arXiv 2305.14314, §3. Frozen weights never change, so anyone who has them needs
    no others. ``dropout`` is left out of what is written where it is 0, so that manifests without it keep their id.
    """

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the adapters that are trained in place of the weights."""
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """An adapter's weight is this over the rank."""
    targets: Annotated[tuple[TargetField, ...], Field(max_length=4096)] = ()
    """Names of the layers' linear modules that get an adapter, such as ``q_proj`` or more of their path; none: all of
    them."""
    dropout: Annotated[float, Field(ge=0, lt=1, exclude_if=lambda value: value == 0.0)] = 0.0
    """Fraction of what goes into an adapter that it does not see in training; the layer beside it sees all."""
    base: BaseDType = "bfloat16"
    """What frozen weights are kept in; with ``nf4`` the layers' matrices take 4.25 bits a weight, other tables are
    bfloat16."""
    digests: Annotated[Mapping[PartField, DigestField], Field(max_length=1024, exclude_if=lambda value: not value)] = {}
    """Digests of each part's frozen weights, stored; the founder fills them in."""

    @property
    def scale(self) -> float:
        """Return what an adapter's answer is multiplied by."""
        return self.alpha / self.rank

    def chooses(self, module: str) -> bool:
        """Return whether the module of this path gets an adapter."""
        return not self.targets or any(module == name or module.endswith(f".{name}") for name in self.targets)

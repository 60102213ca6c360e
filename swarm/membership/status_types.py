"""The terms in which a member says where it stands. Plain data, for anyone who shows it: imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Phase = Literal["starting", "waiting", "syncing", "ready", "draining", "ended"]
ENDED = "the run was ended with step"
"""How the reason begins with which the peers of a run leave together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of memory by kind (:data:`swarm.planning.costs.MemoryKind`): ``predicted`` at most in a step, ``measured``
    now, of graphs their number times what one is predicted to have. ``resident`` is the whole process's, ``allocated``
    what torch has on its GPU; None without one."""

    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    resident: int
    allocated: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a peer's device computed in a step: ``flops_per_s`` by PaLM's count, and ``mfu``, the share of its peak;
    None for a device whose peak is not known, as a CPU's."""

    flops_per_s: float
    mfu: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReport:
    """One variant of a stage: the domains, or ``kinds`` of text, that it is for, how many ``hosts`` hold it, and how
    many of the newest step's microbatches ``passed`` it, ``of`` all."""

    part: str
    kinds: tuple[str, ...]
    hosts: int
    passed: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTurnout:
    """How many replicas of a part were live when ``step`` closed, took part in its averaging, and have something in the
    result. ``why`` says by name why others have not, and who was lost; ``alone``: there was nobody to average with."""

    part: str
    step: int
    live: int
    participating: int
    averaged: int
    why: Mapping[str, str]
    alone: bool

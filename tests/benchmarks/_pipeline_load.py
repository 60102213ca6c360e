"""What all candidates of the benchmark ``pipeline`` compute: sizes, blocks, ready-made tensors, and the window."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor

from swarm.models.gpt import Stage
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec, SplitConfig
from swarm.state.snapshot import Snapshot, initial_snapshot
from tests.benchmarks._stage import Size, normal

SIZES = {
    size.name: size
    for size in (
        Size(name="tiny", dim=32, heads=2, blocks=2, sequence=16, microbatch=2),
        Size(name="small", dim=256, heads=4, blocks=4, sequence=128, microbatch=8),
        Size(name="medium", dim=512, heads=8, blocks=4, sequence=256, microbatch=4),
    )
}
"""One block a stage."""
SEED = 0
_GRADIENT_SCALE = 1e-3


def model_of(size: Size) -> GptConfig:
    """The blocks, computed in float32."""
    return size.model("float32")


def part_of(size: Size, stage: int) -> tuple[PartSpec, Snapshot]:
    """One of the stages, one block each, and its initial state."""
    model = model_of(size)
    spec = family_of(model).parts(SplitConfig(stages=size.blocks))[stage]
    layout = family_of(model).layout(family_of(model).build(spec))
    weights = family_of(model).initial_weights(SEED, spec)
    return spec, initial_snapshot(spec.name, layout, weights)


def blocks_of(size: Size, stages: int, stage: int) -> Stage:
    """The blocks of one of ``stages`` stages as a bare module; with one stage all of them."""
    model = model_of(size)
    family = family_of(model)
    spec = family.parts(SplitConfig(stages=stages))[stage]
    module = family.build(spec)
    install_weights(module, family.initial_weights(SEED, spec), requires_grad=True)
    assert isinstance(module, Stage)
    return module


def activation_of(size: Size) -> Tensor:
    """The ready-made output of an embedding, (B, T, D)."""
    return normal(size.shape, 1)


def gradient_of(size: Size) -> Tensor:
    """The ready-made gradient of the last stage's output, (B, T, D)."""
    return normal(size.shape, 2) * _GRADIENT_SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One round: how long to warm up and to measure, in seconds, and whose CPU to note, role → process ids."""

    warmup_s: float
    seconds: float
    pids: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Window:
    """When whole microbatches ended, and what processes used meanwhile."""

    order: Order
    ended: list[float] = field(default_factory=list)
    opened: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)

    def open(self) -> None:
        """The warm-up is over."""
        self._before = cpu_seconds(self.order.pids)
        self.opened = time.monotonic()

    def note(self) -> None:
        """A microbatch has just ended."""
        self.ended.append(time.monotonic())

    def close(self) -> dict[str, float]:
        """What happened between :meth:`open` and now: seconds, microbatches, CPU seconds by role."""
        closed, after = time.monotonic(), cpu_seconds(self.order.pids)
        counted = sum(self.opened <= moment <= closed for moment in self.ended)
        cpu = {f"cpu {role}": after[role] - self._before[role] for role in after}
        return {"seconds": closed - self.opened, "microbatches": counted} | cpu


def cpu_seconds(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """User and system seconds so far, summed over each role's processes."""
    return {role: sum(_cpu_seconds(pid) for pid in numbers) for role, numbers in pids.items()}


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def threads(count: int) -> None:
    """How many threads one torch operation may use, in this process."""
    torch.set_num_threads(count)

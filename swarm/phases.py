"""A piece of work for a device, in phases that different threads may do.

A generator that yields where a phase ends: what the work takes arrives; it is computed; what came of it leaves; it is
finished. The first and the third wait for the device and for copies, on threads of their own where the device has them.
The second and the fourth run one at a time with everything else that is asked of the device's thread, so what they find
may have changed since the phase before. Work may return from any phase.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Phases = Generator[None, None, T]


class WorkEnd(NamedTuple):
    """How a piece of work ended: with this value."""

    value: Any


def advance(phases: Phases[Any]) -> WorkEnd | None:
    """Do one phase. Return the end of the whole where it was the last. Raises what the work raises."""
    try:
        next(phases)
    except StopIteration as end:
        return WorkEnd(end.value)
    return None


def complete(phases: Phases[T]) -> T:
    """Return what a piece of work returns, all of it done here and now. Raises what it raises."""
    while (end := advance(phases)) is None:
        pass
    value: T = end.value
    return value


class _Runs(Protocol):
    @property
    def torch_device(self) -> torch.device: ...

    async def run(self, fn: Callable[..., T], *args: object) -> T: ...


class OnePhase:
    """What a device without threads for copies makes of work in phases: all of them in one go, one piece after another.
    See :class:`~swarm.device.Device`."""

    lanes = 1

    @property
    def torch_devices(self: _Runs) -> tuple[torch.device, ...]:
        """Return the one that there is."""
        return (self.torch_device,)

    async def run_phases(self: _Runs, phases: Phases[T]) -> T:
        """Do a piece of work; return what it returns."""
        return await self.run(complete, phases)

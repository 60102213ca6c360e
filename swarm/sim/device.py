"""Devices for pretend worlds: work done in the loop, and work that takes a stated time without burning a core.

Both stand where a :class:`swarm.device.DeviceThread` does: callables run one at a time, first in first out. The numbers
are real, of a model so small that they cost nothing; what they would cost on a real device is slept on the clock.
On shared cores a dead replica would free its core for the others, so capacity can be measured no other way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from swarm.clock import Clock
from swarm.device import Device, free_memory
from swarm.errors import BugError, ConfigError
from swarm.phases import OnePhase

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")


WEIGHTS_SHARE = 0.45
"""Of a backward that is for the gradients of weights (measured: .47 of a block of width 768, .37 of 256, on a CPU)."""


class InlineDevice(OnePhase):
    """Runs callables in the event loop, so that a world under a virtual clock repeats itself. Without threads."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._line, self._closed = device, asyncio.Lock(), False

    @property
    def torch_device(self) -> torch.device:
        """See :class:`swarm.device.Device`."""
        return self._device

    def free_memory(self) -> int:
        """See :class:`swarm.device.Device`."""
        return free_memory(self._device)

    def free_host_memory(self) -> int:
        """See :class:`swarm.device.Device`."""
        return free_memory()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See :meth:`swarm.device.DeviceThread.run`. Blocks the loop for as long as ``fn`` takes."""
        async with self._line:
            if self._closed:
                raise RuntimeError("cannot run anything on a closed device")
            return fn(*args, **kwargs)

    def place(self, part: T) -> T:
        """Return the part as it is."""
        return part

    async def close(self) -> None:
        """See :meth:`swarm.device.DeviceThread.close`."""
        self._closed = True


class SimulatedDevice(OnePhase):
    """A device on which work takes ``slowness`` times as long as it says.

    What a callable states with :meth:`spend` is slept while the next one waits in line; what it really took (nothing,
    under a virtual clock) is stretched too. Cancelled, work that has begun still occupies the device to its end.

    Args:
        inner: Does the work.
        clock: Measures it, and is slept on.
        stage_s: Seconds that the methods of a stage's part take here, by name; see :class:`Paced`.
    """

    def __init__(self, inner: Device, clock: Clock, stage_s: Mapping[str, float] | None = None) -> None:
        self._inner, self._clock, self._stage_s = inner, clock, stage_s or {}
        self._line, self._owed = asyncio.Lock(), 0.0
        self._resting: set[asyncio.Task[None]] = set()
        self.slowness = 1.0
        self.busy_s = 0.0
        self.on_busy: list[Callable[[float, float], None]] = []
        """Hear, at the end of each piece of work that took time, when on the clock it began and ended."""

    @property
    def torch_device(self) -> torch.device:
        """See :class:`swarm.device.Device`."""
        return self._inner.torch_device

    def free_memory(self) -> int:
        """See :class:`swarm.device.Device`."""
        return self._inner.free_memory()

    def free_host_memory(self) -> int:
        """See :class:`swarm.device.Device`."""
        return self._inner.free_host_memory()

    def spend(self, seconds: float) -> None:
        """The callable that is running takes so long on this device. From within the callable only."""
        self._owed += seconds

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See :meth:`swarm.device.DeviceThread.run`; ``busy_s`` counts the seconds of the clock that it takes."""
        await self._line.acquire()
        work = asyncio.ensure_future(self._occupy(fn, args, kwargs))
        self._resting.add(work)  # type: ignore[arg-type]
        work.add_done_callback(self._free)
        return await asyncio.shield(work)

    async def _occupy(self, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        began, self._owed = self._clock.monotonic(), 0.0
        try:
            return await self._inner.run(fn, *args, **kwargs)
        finally:
            took = self._clock.monotonic() - began
            rest = self._owed + (self.slowness - 1.0) * (took + self._owed)
            self.busy_s += took + max(0.0, rest)
            if rest > 0:
                await self._clock.sleep(rest)
            if (ended := self._clock.monotonic()) > began:
                for hear in self.on_busy:
                    hear(began, ended)

    def _free(self, work: asyncio.Future[Any]) -> None:
        self._resting.discard(work)
        self._line.release()
        if not work.cancelled():
            work.exception()  # anyone who asked has it, or is gone

    def place(self, part: T) -> T:
        """Return the part with methods that take their time."""
        return cast(T, Paced(part, self, self._stage_s)) if self._stage_s else part

    async def close(self) -> None:
        """See :meth:`swarm.device.DeviceThread.close`."""
        for work in tuple(self._resting):
            work.cancel()
        await asyncio.gather(*self._resting, return_exceptions=True)
        await self._inner.close()


class Paced:
    """A stage's or the ends' part whose methods take stated seconds of a simulated device; what is composed of them,
    as a recomputation, takes their sum.

    Wrap what a :class:`~swarm.pipeline.compute.StageCompute` is given: ``seconds`` are by method name, as ``{"forward":
    0.1, "forward_loss": 0.1, "backward": 0.2}``; everything else is the part's own, cost free. What a backward takes is
    also what its halves take, of which WEIGHTS_SHARE is the weights'. Raises ConfigError for a name that the part does
    not have.
    """

    def __init__(self, part: Any, device: SimulatedDevice, seconds: Mapping[str, float]) -> None:
        for name, cost in seconds.items():
            if not callable(getattr(part, name, None)):
                raise ConfigError("seconds", name, f"a method of {type(part).__name__}", "Correct the name.")
            if cost < 0:
                raise BugError(f"{name} cannot take {cost} s")
        whole = seconds.get("backward", 0.0)
        halves = {"backward_input": (1.0 - WEIGHTS_SHARE) * whole, "backward_weights": WEIGHTS_SHARE * whole}
        self._part, self._paced_on, self._seconds = part, device, halves | dict(seconds)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        cost = self._seconds.get(name)
        if cost is None:
            return value

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._paced_on.spend(cost)
            return value(*args, **kwargs)

        return timed

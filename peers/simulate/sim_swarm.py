"""A whole swarm in a virtual world: time jumps, links and devices are as described, peers stop as processes stop.

    swarm = SimSwarm(tmp_path, hosts=4, links=Links.parse({"default": {"latency_ms": 20}}), stage_s={"forward": 0.1})
    run_world(swarm.run())

Every peer's events go to its ``events.jsonl`` as in a real run, so the checkers of
:mod:`peers.chaos.invariants.check` read them. The same seed gives the same events, times included.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from peers.simulate.local_swarm import LocalPeer, LocalSwarm
from swarm.clock import Clock
from swarm.device import Device
from swarm.errors import BugError
from swarm.ids import PeerId
from swarm.sim.device import InlineDevice, SimulatedDevice
from swarm.sim.links import Links, Traffic
from swarm.sim.loop import LoopClock, SimLoop, as_peer
from swarm.sim.network import SimEndpoint, SimNetwork


class SimSwarm(LocalSwarm):
    """A :class:`LocalSwarm` for :func:`swarm.sim.loop.run_world`.

    With ``may_fail`` a peer that ends with an error, its ``outcome``, ends only itself.
    ``stage_s`` are seconds that a stage's part takes, by method: forward, forward_loss and backward.
    """

    records = True

    def __init__(
        self,
        root: Path,
        *,
        links: Links | None = None,
        may_fail: bool = False,
        stage_s: Mapping[str, float] | None = None,
        **shape: Any,
    ) -> None:
        super().__init__(root, **shape)
        self.network = SimNetwork(LoopClock(), traffic=Traffic(links))
        self.clocks: dict[str, LoopClock] = {}
        self.devices: dict[str, SimulatedDevice] = {}
        self._stage_s, self._may_fail = stage_s, may_fail
        self._killed: dict[str, asyncio.Event] = {}
        self._inner: dict[str, asyncio.Task[None]] = {}

    def _clock(self, name: str) -> Clock:
        clock = LoopClock()
        if name:
            self.clocks[name] = clock
        return clock

    def _device(self, name: str) -> Device:
        self.devices[name] = SimulatedDevice(InlineDevice(torch.device("cpu")), LoopClock(), self._stage_s)
        return self.devices[name]

    async def _add(self, name: str, *args: Any, **more: Any) -> PeerId:
        peer = await super()._add(name, *args, **more)
        self.network.names[peer] = name
        self._killed[name] = asyncio.Event()
        return peer

    async def run(self, *, timeout_s: float = 36_000.0) -> None:
        """See :meth:`LocalSwarm.run`; ``timeout_s`` is virtual."""
        await super().run(timeout_s=timeout_s)

    async def _bury(self) -> None:
        """End what was killed: only now does it run once more, to be cancelled."""
        for name in list(self._inner):
            if self._killed[name].is_set() or _loop().is_frozen(name):
                await self._end(name)

    async def _end(self, name: str) -> None:
        self._inner[name].cancel()
        _loop().thaw(name)
        await asyncio.wait([self._inner[name]])

    async def forget(self, name: str) -> None:
        """A peer that was killed is buried, and nothing is known of it any more, nor anything left on its disk."""
        await self._end(name)
        peer = self.peers.pop(name)
        await peer.around.device.close()
        shutil.rmtree(peer.settings.home)
        for known in (self.devices, self.clocks, self._inner, self._killed):
            known.pop(name)

    def kill(self, name: str) -> None:
        """As kill -9: not one instruction more. Links break at once."""
        if (recorder := self.peers[name].recorder) is not None:
            recorder.close()
        self.peers[name].events.listeners.clear()
        self._stop(name)
        self.network.leave(self._endpoint_of(name))
        self._killed[name].set()

    def pause(self, name: str) -> None:
        """As SIGSTOP: it stands still, its links stay up."""
        self._stop(name)

    def resume(self, name: str) -> None:
        """As SIGCONT."""
        self._endpoint_of(name).stopped.clear()
        _loop().thaw(name)

    def is_dead(self, name: str) -> bool:
        """Return whether it was killed."""
        return self._killed[name].is_set()

    def _stop(self, name: str) -> None:
        _loop().freeze(name)
        self._endpoint_of(name).stopped.set()

    def _endpoint_of(self, name: str) -> SimEndpoint:
        endpoint = self.peers[name].endpoint
        if not isinstance(endpoint, SimEndpoint):
            raise BugError(f"{name} is on no simulated network")
        return endpoint

    def _start(self, peer: LocalPeer, *, may_fail: bool = False) -> None:
        name = peer.settings.name

        async def live() -> None:
            try:
                await peer.run()
            except Exception:
                if not (may_fail or self._may_fail):
                    raise
            finally:
                await peer.endpoint.close()

        async def watch() -> None:
            inner = asyncio.get_running_loop().create_task(live(), name=name, context=as_peer(name))
            inner.add_done_callback(_retrieve)
            self._inner[name] = inner
            death = asyncio.ensure_future(self._killed[name].wait())
            try:
                await asyncio.wait([inner, death], return_when=asyncio.FIRST_COMPLETED)
                if inner.done():
                    inner.result()
            finally:
                death.cancel()
                if not self._killed[name].is_set() and not inner.done():
                    inner.cancel()
                    if not _loop().is_frozen(name):
                        await asyncio.wait([inner])

        peer.task = self._group.create_task(watch(), name=f"watch {name}", context=as_peer(""))


def _retrieve(task: asyncio.Task[None]) -> None:
    """Its error is in ``outcome``; one that nobody asks for is logged when the task is collected, at any moment."""
    if not task.cancelled():
        task.exception()


def _loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimLoop):
        raise BugError("a SimSwarm runs in run_world()")
    return loop

"""Members of one run in one process: a trainer with a host of every stage (``swarm join --role all``).

They are members like any others, and whoever joins later sees no difference. They share the device and the orders to
leave, call each other without the network, and name each other in the roster: one vote, one death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, KeysView
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from peers.orders import Orders
from peers.settings import PeerSettings
from swarm.config import Manifest
from swarm.consensus.roster import tail
from swarm.device import Device, Seat, TakingTurns
from swarm.errors import ConfigError, Ending
from swarm.ids import PeerId
from swarm.membership.parts import check_takes_turns
from swarm.network.endpoint import LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.optim.swapped_part import Home
from swarm.schema import MAX_BESIDE

Hosts = Callable[[int], AbstractContextManager[PeerSettings]]
"""Gives the settings of the host of a stage, whose place is held while the context is open."""
Live = Callable[[PeerSettings], Coroutine[Any, Any, int]]
"""Runs a peer to its end; returns its exit code."""


class Household:
    """What the members of a process share. Of a peer that is alone in its process there is nobody to share it with."""

    def __init__(self, orders: Orders, hosts: Hosts | None = None) -> None:
        """With ``hosts`` there is one of each stage, from :meth:`begin` on."""
        self.orders, self._hosts = orders, hosts
        self._device: Device | None = None
        self._turns = TakingTurns()
        self.home: Home | None = None
        """Where stages are that take turns on the device; None: all stay there."""
        self._there: dict[PeerId, LibP2PEndpoint] = {}
        self._peers: tuple[PeerId, ...] = ()
        self._living: list[asyncio.Task[int]] = []
        self._places = ExitStack()

    def device(self, settings: PeerSettings, open_one: Callable[[], Device]) -> Device:
        """Return the device of all, as this one has it; the first who asks opens it."""
        if self._device is None:
            self._device, on_disk = open_one(), settings.options.state == "disk"
            if self._hosts is not None and (on_disk or self._device.torch_device.type != "cpu"):
                self.home = Home(directory=settings.home / "state" if on_disk else None)
        if self.home is None or settings.role != "stage":
            return self._device
        return Seat(self._device, self._turns, settings.name)

    @property
    def siblings(self) -> KeysView[PeerId]:
        """Return the members that are there, now and whenever one looks."""
        return self._there.keys()

    def beside(self, me: PeerId) -> tuple[str, ...]:
        """Return by what the roster is told that the others are on this machine."""
        return tuple(tail(peer) for peer in self._peers if peer != me)

    def enter(self, endpoint: LibP2PEndpoint) -> None:
        """A member can be called."""
        for other in self._there.values():
            endpoint.meet(other)
        self._there[endpoint.peer] = endpoint

    def leave(self, endpoint: LibP2PEndpoint) -> None:
        """It cannot be called any more."""
        self._there.pop(endpoint.peer, None)
        for other in self._there.values():
            endpoint.part(other)

    def begin(self, me: PeerId, manifest: Manifest, live: Live) -> None:
        """The trainer, ``me``, enters the run: have the hosts ``live`` beside it. Nothing where there are none to be,
        or they live. After :meth:`check`. Raises ConfigError for a place that is taken."""
        if self._hosts is None:
            return
        hosts, self._hosts = self._hosts, None
        settings = [self._places.enter_context(hosts(stage)) for stage in range(manifest.split.stages)]
        self._peers = (me, *(load_or_create(one.identity).peer for one in settings))
        self._living = [asyncio.create_task(self.live(one, live), name=one.name) for one in settings]

    def check(self, manifest: Manifest) -> None:
        """Raises ConfigError for a run of which one machine cannot hold all parts."""
        if self._hosts is None:
            return
        if (stages := manifest.split.stages) > MAX_BESIDE:
            remedy = "Join as trainer, and with others as stage hosts; or found a run with fewer stages."
            raise ConfigError("--role", "all", f"for a run of {MAX_BESIDE} stages at most", remedy,
                              why=f"this one has {stages}")  # fmt: skip
        if manifest.split.variants:
            raise ConfigError("--role", "all", "for a run whose stages have no variants",
                              "Join as trainer, and with others as hosts of each variant.",
                              why="a machine has one host of each stage, and so one variant")  # fmt: skip
        if self.home is not None:
            check_takes_turns(manifest)

    async def live(self, settings: PeerSettings, live: Live) -> int:
        """Have a member ``live``; returns its exit code. The others leave with one that ends with an error and was not
        told to: without its part they compute nothing here."""
        code = await live(settings)
        if code and self._living and not self.orders.given:
            self.orders.by_notice(f"{settings.name}, of this process, has ended", None, Ending.FAILED)
        return code

    async def ended(self) -> list[int]:
        """Return the exit codes of the hosts, once all have ended."""
        return list(await asyncio.gather(*self._living))

    async def close(self) -> None:
        """Give back what was shared. After :meth:`ended`; ends who lives."""
        for one in self._living:
            one.cancel()
        await asyncio.gather(*self._living, return_exceptions=True)
        self._places.close()
        if self._device is not None:
            await self._device.close()

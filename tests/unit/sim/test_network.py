"""What the network in memory does with peers that are stopped, killed or doubled."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import DeadlineMissed, PeerError, Unreachable
from swarm.ids import PeerId, RunId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.schema import Empty
from swarm.sim.loop import LoopClock, SimLoop, as_peer, run_world
from swarm.sim.network import SimEndpoint, SimNetwork

RUN = RunId("a" * 64)


LONG = Rpc("sleep/1/long", Empty, Empty)


class Sleeper:
    """Answers after ten seconds; counts what began, ended and was cancelled."""

    def __init__(self) -> None:
        self.began, self.ended = 0, 0

    def methods(self) -> list[AnyMethod]:
        return [LONG.handled(self._on_sleep)]

    async def _on_sleep(self, caller: PeerId, body: Empty) -> Empty:
        self.began += 1
        try:
            await asyncio.sleep(10.0)
            return Empty()
        finally:
            self.ended += 1


async def peer(network: SimNetwork, name: str, service: Sleeper | None = None, *, twin: bool = False) -> SimEndpoint:
    """A peer, all of whose code runs in its own context."""

    async def live() -> SimEndpoint:
        endpoint = network.endpoint(name, twin=twin)
        await endpoint.enter(RUN)
        if service is not None:
            endpoint.mount(service)
        return endpoint

    return await asyncio.get_running_loop().create_task(live(), context=as_peer(name))


async def sleep(caller: SimEndpoint, target: str, timeout_s: float = 60.0) -> Empty:
    """Ask for ten seconds."""
    return (await caller.call(PeerId(target), LONG, Empty(), timeout_s=timeout_s))[0]


def loop() -> SimLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, SimLoop)
    return running


def test_handlers_of_a_killed_caller_end_and_give_back_their_places() -> None:
    async def main() -> None:
        network, service = SimNetwork(LoopClock()), Sleeper()
        caller, server = await peer(network, "a"), await peer(network, "b", service)
        calls = [loop().create_task(sleep(caller, "b"), context=as_peer("a")) for _ in range(3)]
        await asyncio.sleep(1.0)
        loop().freeze("a")
        network.kill(caller.peer)
        await asyncio.sleep(1.0)
        assert (service.began, service.ended) == (3, 3)
        again = await peer(network, "a2")
        await sleep(again, "b")
        assert network.is_open(server)
        loop().thaw("a")
        await asyncio.gather(*calls, return_exceptions=True)

    run_world(main())


def test_stopped_server_holds_nobody_up_beyond_the_deadline() -> None:
    async def main() -> None:
        network, service = SimNetwork(LoopClock()), Sleeper()
        caller, server = await peer(network, "a"), await peer(network, "b", service)
        call = asyncio.create_task(sleep(caller, "b", timeout_s=15.0))
        await asyncio.sleep(5.0)
        loop().freeze("b")
        server.stopped.set()
        with pytest.raises(DeadlineMissed):
            await call
        assert loop().time() == 15.0
        assert service.ended == 0
        server.stopped.clear()
        loop().thaw("b")
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert service.ended == 1

    run_world(main())


def test_call_cancelled_before_it_began_gives_back_its_place() -> None:
    async def main() -> None:
        network, service = SimNetwork(LoopClock()), Sleeper()
        caller, _ = await peer(network, "a"), await peer(network, "b", service)
        for _ in range(1000):
            call = asyncio.create_task(sleep(caller, "b"))
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await sleep(caller, "b") == Empty()

    run_world(main())


def test_twins_both_call_and_the_newer_is_called() -> None:
    async def main() -> None:
        network, old, new = SimNetwork(LoopClock()), Sleeper(), Sleeper()
        first = await peer(network, "t", old)
        second = await peer(network, "t", new, twin=True)
        other = await peer(network, "o", Sleeper())
        await sleep(other, "t")
        assert (old.began, new.began) == (0, 1)
        await asyncio.gather(sleep(first, "o"), sleep(second, "o"))
        await first.close()
        with pytest.raises(Unreachable):
            await sleep(first, "o")
        await sleep(second, "o")
        await second.close()
        with pytest.raises(PeerError):
            await sleep(other, "t")

    run_world(main())


def test_twin_that_is_left_is_called_again() -> None:
    async def main() -> None:
        network, old, new = SimNetwork(LoopClock()), Sleeper(), Sleeper()
        await peer(network, "t", old)
        second = await peer(network, "t", new, twin=True)
        other = await peer(network, "o", Sleeper())
        await second.close()
        await sleep(other, "t")
        assert (old.began, new.began) == (1, 0)

    run_world(main())

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swarm.averaging.gossip.mixing import Held, MixingContext
from swarm.averaging.gossip.pushing import PUSH, YIELD, Pushing, PushRequest, PushSum
from swarm.averaging.gossip.versions import Version
from swarm.errors import DeadlineMissed, PeerError
from swarm.events import Event, Mixed
from swarm.ids import PeerId, RunId, stage_part
from swarm.network.protocols import Rpc
from swarm.sim.loop import LoopClock
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.averaging import InlineDevice

PART, STEP, ELEMENTS = stage_part(0), 3, 4


class FakePart:
    """A vector that is trained by hand."""

    def __init__(self, value: float) -> None:
        self.params, self.leg = torch.full((ELEMENTS,), value), 0

    @property
    def version(self) -> Version:
        return Version(STEP, self.leg, self.params)

    def mix(self, mine: Version, mean: torch.Tensor) -> bool:
        self.params = self.params + (mean - mine.params)
        return True


class Deaf:
    """An endpoint to which the answer to each of the given calls never comes."""

    def __init__(self, inner: SimEndpoint) -> None:
        self.inner, self.lost = inner, list[Rpc[Any, Any]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def call(self, target: PeerId, rpc: Rpc[Any, Any], *args: Any, **options: Any) -> Any:
        answer = await self.inner.call(target, rpc, *args, **options)
        if rpc in self.lost:
            self.lost.remove(rpc)
            raise DeadlineMissed("the answer was lost", peer=target)
        return answer


class World:
    """Replicas that push."""

    def __init__(self, *values: float) -> None:
        self.network = network = SimNetwork(LoopClock())
        self.peers = [PeerId(f"peer{number}") for number in range(len(values))]
        self.parts = dict(zip(self.peers, map(FakePart, values), strict=True))
        self.deaf = {peer: Deaf(network.endpoint(peer)) for peer in self.peers}
        self.pushing = {peer: self._pushing(peer) for peer in self.peers}
        self.events: list[Mixed] = []

    def _pushing(self, peer: PeerId) -> Pushing:
        endpoint: Any = self.deaf[peer]
        context = MixingContext(
            endpoint=endpoint, device=InlineDevice(), clock=LoopClock(), events=self, held=lambda: self._held(peer)
        )
        pushing = Pushing(context, PushSum(), seed=0, reach=1e3)
        self.deaf[peer].inner.mount(pushing)
        return pushing

    def _held(self, peer: PeerId) -> Held:
        return PART, self.parts[peer], self.peers

    async def leg(self, *peers: PeerId) -> None:
        for peer in peers or self.peers:
            self.parts[peer].leg += 1
            async with asyncio.TaskGroup() as beside:
                await self.pushing[peer].mix(beside, *self._held(peer))

    @property
    def values(self) -> list[float]:
        return [float(self.parts[peer].params[0]) for peer in self.peers]

    def emit(self, event: Event) -> None:
        assert isinstance(event, Mixed)
        self.events.append(event)


async def world_of(*values: float) -> World:
    """Replicas that hold these, and have entered the run."""
    world = World(*values)
    for deaf in world.deaf.values():
        await deaf.inner.enter(RunId("5a" * 32))
    return world


async def many_legs(world: World) -> None:
    for _ in range(24):
        await world.leg()


@pytest.mark.parametrize("values", [(1.0, 3.0), (0.0, 3.0, 6.0), (1.0, 2.0, 3.0, 4.0, 10.0)])
async def test_all_come_to_the_mean(values: Sequence[float]) -> None:
    await many_legs(world := await world_of(*values))
    assert world.values == pytest.approx([sum(values) / len(values)] * len(values), abs=1e-2)
    assert not any(event.left_out for event in world.events)


@pytest.mark.parametrize("lost", [PUSH, YIELD])
async def test_answer_that_is_lost_neither_makes_mass_nor_takes_it(lost: Rpc[Any, Any]) -> None:
    world = await world_of(1.0, 3.0, 8.0)
    await world.leg()
    world.deaf[world.peers[0]].lost.append(lost)
    await many_legs(world)
    assert not world.deaf[world.peers[0]].lost, "the fault did not fire"
    assert world.values == pytest.approx([4.0] * 3, abs=1e-2)
    reasons = [reason for event in world.events for reason in event.left_out.values()]
    assert reasons == ["deadline: the answer was lost", "deadline: has been late since an earlier leg: not waited for"]
    again = sum(event.own == "pushed again" for event in world.events)
    assert again == (lost == PUSH)


async def test_target_that_hangs_costs_one_deadline_once_and_what_is_meant_for_it_is_not_lost() -> None:
    world = await world_of(1.0, 3.0, 8.0)
    stopped, others = world.peers[2], world.peers[:2]

    async def legs(count: int, *peers: PeerId) -> None:
        for _ in range(count):
            for peer in peers:
                world.parts[peer].leg += 1
                await world.pushing[peer].mix(beside, *world._held(peer))
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as beside:
        await legs(2, *world.peers)
        world.network.hold(stopped)
        began = len(world.events)
        await legs(12, *others)
        hanging = world.events[began:]
        world.network.release(stopped)
        await legs(24, *world.peers)
    waited = [event.seconds for event in hanging if event.seconds > 0]
    assert waited == pytest.approx([1.0, 1.0]), "one deadline of one second for each of the two"
    assert {event.own for event in hanging if event.left_out} == {"pushed", "kept"}
    assert not any(event.left_out for event in world.events[-12:])
    assert world.values == pytest.approx([4.0] * 3, abs=1e-2)


async def refusal(payload: torch.Tensor, part: str = PART, step: int = STEP, weight: float = 0.5) -> str:
    """Why mass is refused, which then has changed nothing."""
    world = await world_of(1.0, 1.0)
    body = PushRequest(part=part, step=step, number=1, weight=weight)
    sender = world.deaf[world.peers[1]].inner
    with pytest.raises(PeerError) as raised:
        await sender.call(world.peers[0], PUSH, body, timeout_s=5.0, payload=payload.numpy().data.cast("B"))
    await world.leg(world.peers[0])
    assert world.values[0] == 1.0
    return raised.value.reason


async def test_mass_that_no_honest_peer_sends_is_refused_and_changes_nothing() -> None:
    good = torch.ones(ELEMENTS)
    assert "12 bytes instead of 16" in await refusal(good[:3])
    assert "not finite" in await refusal(torch.tensor([1.0, float("inf"), 1.0, 1.0]))
    assert "farther away" in await refusal(torch.full((ELEMENTS,), 3e38))
    assert "weight 9" in await refusal(good, weight=9.0)
    assert "is open here" in await refusal(good, step=STEP + 1)
    assert "not held here" in await refusal(good, part=stage_part(1))

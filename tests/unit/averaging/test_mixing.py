from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.averaging.gossip.mixing import Mixing, MixingContext, MixingRules, Taking
from swarm.averaging.gossip.patience import FIRST_S
from swarm.averaging.gossip.versions import TAKE, TakeRequest, Version, VersionService, VersionTaken, take
from swarm.averaging.gossip.wait_avoiding import WaitAvoiding
from swarm.averaging.strategies import STRATEGIES
from swarm.errors import PeerError
from swarm.events import Event, Mixed
from swarm.ids import PartName, PeerId, RunId, stage_part
from swarm.network.protocols import Answer, AnyMethod, Incoming
from swarm.sim.loop import LoopClock
from swarm.sim.network import SimEndpoint, SimNetwork
from swarm.sim.wires import Delay

FAR = "violation: weights that are not finite, or farther away than training leads"
RUN = RunId("5a" * 32)
PART, STEP, ELEMENTS = stage_part(0), 3, 4
RULES = MixingRules(strategy=STRATEGIES["everyone"], seed=0, wait_avoiding=WaitAvoiding(1), reach=1e3)


class Inline:
    """No thread."""

    def __init__(self) -> None:
        self.working = False

    async def run(self, fn: Callable[..., Any], *args: object) -> Any:
        self.working = True
        try:
            return fn(*args)
        finally:
            self.working = False


class OnLoop(TorchDispatchMode):
    """Notes what torch computes while the device has nothing to do."""

    VIEW = "aten.detach.default"

    def __init__(self, device: Inline) -> None:
        super().__init__()
        self.device, self.did, self.off_loop = device, list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.working:
            self.off_loop += 1
        elif str(func) != self.VIEW:
            self.did.append(str(func))
        return func(*args, **(kwargs or {}))


class FakePart:
    """Holds a version and what it was mixed with."""

    def __init__(self, leg: int, value: float) -> None:
        self.version = Version(STEP, leg, torch.full((ELEMENTS,), value))
        self.mixed: list[torch.Tensor] = []

    def mix(self, mine: Version, mean: torch.Tensor) -> bool:
        self.mixed.append(mean)
        return mine.step == STEP


class World:
    """Replicas with a part each, of which the first mixes."""

    def __init__(self, *parts: FakePart, strangers: int = 0, delay: Delay | None = None) -> None:
        self.network = SimNetwork(LoopClock(), delay=delay)
        self.parts = parts
        self.peers = [PeerId(f"peer{number}") for number in range(len(parts) + strangers)]
        self.endpoints = [self.network.endpoint(peer) for peer in self.peers]
        self.replicas = self.peers[: len(parts)]
        for endpoint, part in zip(self.endpoints, parts, strict=False):
            endpoint.mount(VersionService(lambda part=part: self._held(part)))  # type: ignore[misc]
        self.events: list[Event] = []
        self.device = Inline()

    def _held(self, part: FakePart) -> tuple[PartName, FakePart, Sequence[PeerId]]:
        return PART, part, self.replicas

    def replace(self, number: int, answer: Callable[[], Answer[VersionTaken]]) -> None:
        """This peer answers as it likes."""

        async def handle(caller: PeerId, body: TakeRequest, incoming: Incoming) -> Answer[VersionTaken]:
            return answer()

        class Liar:
            def methods(self) -> list[AnyMethod]:
                return [TAKE.handled_with_payload(handle)]

        self.endpoints[number] = self.network.endpoint(PeerId(f"peer{number}x"))
        self.replicas[number] = self.endpoints[number].peer
        self.endpoints[number].mount(Liar())

    async def open(self) -> World:
        for endpoint in self.endpoints:
            await endpoint.enter(RUN)
        return self

    async def mix(self) -> Mixed:
        await self.open()
        mixing = self.mixing(sync_every=4)
        running = asyncio.create_task(mixing.run())
        mixing.leg_over()
        await asyncio.sleep(200.0)
        running.cancel()
        (event,) = self.events
        assert isinstance(event, Mixed)
        return event

    async def legs(self, count: int, mixing: Mixing, each_s: float = 2.0) -> list[Mixed]:
        """All train on in step with each other; what came of it."""
        before = len(self.events)
        for _ in range(count):
            for part in self.parts:
                part.version = Version(STEP, part.version.leg + 1, part.version.params)
            mixing.leg_over()
            await asyncio.sleep(each_s)
        return [event for event in self.events[before:] if isinstance(event, Mixed)]

    def mixing(self, sync_every: int) -> Mixing:
        context = MixingContext(
            endpoint=self.endpoints[0],
            device=self.device,
            clock=LoopClock(),
            events=self,
            held=lambda: self._held(self.parts[0]),
        )
        return Mixing(Taking(context, RULES), context.held, sync_every)

    def emit(self, event: Event) -> None:
        self.events.append(event)


async def mixed(
    *parts: FakePart, prepare: Callable[[World], None] = lambda world: None
) -> tuple[Mixed, list[torch.Tensor]]:
    world = World(*parts)
    prepare(world)
    return await world.mix(), parts[0].mixed


async def test_mean_of_a_group_has_one_version_of_each() -> None:
    event, (mean,) = await mixed(FakePart(2, 1.0), FakePart(2, 2.0), FakePart(1, 6.0))
    assert torch.equal(mean, torch.full((ELEMENTS,), 3.0))
    assert (event.members, event.averaged, event.oldest, event.own, event.left_out) == (3, 3, 1, "added", {})
    assert event.bytes_received == 2 * 4 * ELEMENTS


async def test_version_that_is_too_old_is_left_out_with_its_reason() -> None:
    event, (mean,) = await mixed(FakePart(3, 1.0), FakePart(3, 3.0), FakePart(1, 100.0))
    assert torch.equal(mean, torch.full((ELEMENTS,), 2.0))
    assert event.left_out == {PeerId("peer2"): "busy: its newest version is of leg 1"}


async def test_version_with_which_all_began_is_nobodys_contribution() -> None:
    event, means = await mixed(FakePart(1, 1.0), FakePart(0, 100.0))
    assert not means
    assert (event.averaged, event.own, list(event.left_out)) == (1, "alone", ["peer1"])


async def test_who_is_far_behind_takes_the_others_mixture_and_loses_its_own() -> None:
    event, (mean,) = await mixed(FakePart(1, 100.0), FakePart(3, 1.0), FakePart(3, 3.0))
    assert torch.equal(mean, torch.full((ELEMENTS,), 2.0))
    assert (event.own, event.averaged) == ("too old", 2)


async def test_leg_that_one_alone_claims_makes_nobody_too_old() -> None:
    event, (mean,) = await mixed(FakePart(2, 1.0), FakePart(2, 3.0), FakePart(2**52, 2.0))
    assert torch.equal(mean, torch.full((ELEMENTS,), 2.0))
    assert (event.own, event.averaged) == ("added", 3)


@pytest.mark.parametrize(
    ("leg", "values", "reason"),
    [
        (2, [1.0] * (ELEMENTS - 1), "violation: a version of 12 bytes instead of 16"),
        (2, [1.0, float("nan"), 1.0, 1.0], FAR),
        (2, [1.0, 3e38, 1.0, 1.0], FAR),
        (0, [1.0] * ELEMENTS, "violation: a version of leg 0, which is older than what was asked for"),
    ],
)
async def test_hostile_version_is_left_out_and_the_others_count(leg: int, values: list[float], reason: str) -> None:
    def answer() -> Answer:
        return Answer(VersionTaken(leg=leg), torch.tensor(values).numpy().data.cast("B"))

    event, (mean,) = await mixed(
        FakePart(2, 1.0), FakePart(2, 3.0), FakePart(2, 0.0), prepare=lambda world: world.replace(2, answer)
    )
    assert torch.equal(mean, torch.full((ELEMENTS,), 2.0))
    assert list(event.left_out.values()) == [reason]


async def refusal(ask: Callable[[World], tuple[SimEndpoint, TakeRequest]]) -> PeerError:
    world = await World(FakePart(2, 1.0), FakePart(2, 1.0), strangers=1).open()
    endpoint, request = ask(world)
    with pytest.raises(PeerError) as raised:
        await take(endpoint, PeerId("peer0"), request, ELEMENTS, 5.0)
    return raised.value


async def test_only_replicas_are_shown_versions_and_only_of_what_is_open() -> None:
    body = {"part": PART, "step": STEP, "least": 1}
    assert "only replicas" in (await refusal(lambda world: (world.endpoints[2], TakeRequest(**body)))).reason
    other = {**body, "part": stage_part(1)}
    assert "not held here" in (await refusal(lambda world: (world.endpoints[1], TakeRequest(**other)))).reason
    later = {**body, "step": STEP + 1}
    assert "step 3 is open here" in (await refusal(lambda world: (world.endpoints[1], TakeRequest(**later)))).reason


async def test_who_is_ahead_of_all_others_is_not_alone() -> None:
    event, (mean,) = await mixed(FakePart(3, 1.0), FakePart(2, 3.0))
    assert torch.equal(mean, torch.full((ELEMENTS,), 2.0))
    assert (event.own, event.averaged, event.oldest) == ("added", 2, 1)


async def test_nothing_is_computed_on_the_event_loop() -> None:
    world = World(FakePart(2, 1.0), FakePart(2, 2.0), FakePart(1, 6.0))
    with OnLoop(world.device) as seen:
        await world.mix()
    assert seen.off_loop, "nothing was mixed"
    assert not seen.did


async def test_replica_that_hangs_costs_one_deadline_once_and_counts_again_when_it_is_back() -> None:
    world = await World(FakePart(0, 1.0), FakePart(0, 3.0), FakePart(0, 5.0)).open()
    mixing = world.mixing(sync_every=100)
    running = asyncio.create_task(mixing.run())
    assert {event.averaged for event in await world.legs(3, mixing)} == {3}
    world.network.hold(world.peers[2])
    hanging = await world.legs(40, mixing)
    assert [event.seconds for event in hanging] == [1.0] + [0.0] * 39, "one deadline, and nobody lost a leg"
    assert {event.averaged for event in hanging} == {2}
    world.network.release(world.peers[2])
    assert [event.averaged for event in await world.legs(3, mixing)] == [2, 3, 3], "once its late answer has come"
    running.cancel()


async def test_first_mixing_waits_a_little_for_who_hangs_from_the_start() -> None:
    world = await World(FakePart(0, 1.0), FakePart(0, 3.0), FakePart(0, 5.0)).open()
    mixing = world.mixing(sync_every=100)
    running = asyncio.create_task(mixing.run())
    world.network.hold(world.peers[2])
    assert [event.seconds for event in await world.legs(20, mixing, 6.0)] == [FIRST_S] + [0.0] * 19
    running.cancel()


async def test_link_slower_than_the_first_deadline_is_measured_beside_and_waited_for_afterwards() -> None:
    parts = FakePart(0, 1.0), FakePart(0, 3.0), FakePart(0, 5.0)
    slow = PeerId("peer2")
    world = await World(*parts, delay=lambda source, target, size: 8.0 if source == slow else 0.0).open()
    mixing = world.mixing(sync_every=100)
    running = asyncio.create_task(mixing.run())
    events = await world.legs(4, mixing, 20.0)
    assert [(event.averaged, event.seconds) for event in events] == [(2, FIRST_S), (3, 8.0), (3, 8.0), (3, 8.0)]
    running.cancel()

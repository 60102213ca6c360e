"""Members of a round in one virtual-time loop, joined by a simulated network that tests can break.

Time stands still while anything can run and jumps to the next timer otherwise, so a test with a 30 s deadline takes no
time and is the same every time. When nothing can run and no timer is set, the loop raises: a lock-up fails at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from swarm.averaging.allreduce.plan import RoundKey, RoundPlan, RoundResult
from swarm.averaging.allreduce.service import AllReduce
from swarm.errors import RoundFailed
from swarm.ids import PeerId, RunId, stage_part
from swarm.network.protocols import (
    Answer,
    Incoming,
    LinkStatistics,
    Payload,
    ReplyT,
    RequestT,
    Rpc,
    Service,
)
from swarm.sim.loop import LoopClock as LoopClock
from swarm.sim.network import SimEndpoint, SimNetwork

T = TypeVar("T")
Hook = Callable[[PeerId, PeerId, str, Any], Awaitable[None]]


class LockedUp(AssertionError):
    """Nothing can run, and nothing ever will."""


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise LockedUp
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in a fresh virtual loop; no task may be left when ``work`` ends."""

    async def watched() -> T:
        try:
            return await work
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(watched())


async def inline(fn: Callable[..., Any], /, *args: Any) -> Any:
    """Run at once, on the loop: deterministic."""
    return fn(*args)


@dataclass
class Network:
    """Who is there, how long messages take, and what happens to them.

    ``hook(caller, target, rpc, body)`` runs before a call leaves and may wait, raise, or kill.
    """

    seed: int = 0
    slowest_s: float = 0.01
    hook: Hook | None = None
    endpoints: dict[PeerId, TappedEndpoint] = field(default_factory=dict)
    calls: Counter[Rpc[Any, Any]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self._sim = SimNetwork(LoopClock(), delay=lambda source, target, size: rng.random() * self.slowest_s)
        self._deaths: dict[PeerId, asyncio.Event] = {}

    async def join(self, peer: PeerId) -> TappedEndpoint:
        self._deaths[peer] = asyncio.Event()
        inner = self._sim.endpoint(peer)
        await inner.enter(RunId("0" * 64))
        self.endpoints[peer] = TappedEndpoint(self, inner)
        return self.endpoints[peer]

    def kill(self, peer: PeerId) -> None:
        self._sim.kill(peer)
        self._deaths[peer].set()

    def cut(self, one: PeerId, other: PeerId) -> None:
        """From now on nothing that these two send each other arrives, and neither is told."""
        self._sim.cut(one, other)
        self._sim.cut(other, one)

    def dead(self, peer: PeerId) -> bool:
        return self._sim.find(peer) is None

    async def wait_dead(self, peer: PeerId) -> None:
        await self._deaths[peer].wait()


Handler = Callable[[PeerId, Any, Incoming], Awaitable[Answer[Any]]]


class TappedEndpoint:
    """An endpoint whose calls the test counts and can interfere with."""

    def __init__(self, network: Network, inner: SimEndpoint) -> None:
        self._network, self._inner = network, inner
        self.payload_sent = 0

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    def mount(self, service: Service) -> None:
        self._inner.mount(service)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._inner.learn(peer, addresses)

    def statistics(self) -> LinkStatistics:
        return self._inner.statistics()

    async def close(self) -> None:
        await self._inner.close()

    def replace_handler(self, rpc: Rpc[Any, Any], handle: Handler) -> None:
        """Make this peer answer a method otherwise."""
        methods = self._inner.desk._methods
        methods[rpc.name] = dataclasses.replace(methods[rpc.name], handle=handle)

    def handler(self, rpc: Rpc[Any, Any]) -> Handler:
        return self._inner.desk._methods[rpc.name].handle

    async def call(
        self,
        target: PeerId,
        rpc: Rpc[RequestT, ReplyT],
        body: RequestT,
        *,
        timeout_s: float,
        payload: Payload = b"",
        max_reply_bytes: int = 0,
    ) -> tuple[ReplyT, memoryview]:
        network = self._network
        network.calls[rpc] += 1
        if network.hook is not None:
            await network.hook(self.peer, target, rpc, body)
        self.payload_sent += len(payload)
        answer, encoded = await self._inner.call(
            target, rpc, body, timeout_s=timeout_s, payload=payload, max_reply_bytes=max_reply_bytes
        )
        network.endpoints[target].payload_sent += len(encoded)
        return answer, encoded


def names(count: int) -> tuple[PeerId, ...]:
    """Peer ids in rank order."""
    return tuple(PeerId(f"p{number}") for number in range(count))


def make_plan(weights: Mapping[PeerId, int] | Sequence[int], elements: int, **fields: Any) -> RoundPlan:
    """A plan of stage 0's step 1, 30 s, for members p0 … with these weights."""
    if not isinstance(weights, Mapping):
        weights = dict(zip(names(len(weights)), weights, strict=True))
    key = RoundKey(step=1, part=stage_part(0), attempt=fields.pop("attempt", 0))
    defaults: dict[str, Any] = {"timeout_s": 30.0, "chunk_elements": 4}
    return RoundPlan(key=key, members=tuple(weights), weights=weights, elements=elements, **(defaults | fields))


def whole_numbers(plan: RoundPlan, seed: int = 0) -> dict[PeerId, torch.Tensor]:
    """Sums whose addition is exact, so that the right mean is one division away."""
    rng = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, plan.dtype)
    return {peer: torch.randint(-1000, 1000, (plan.elements,), generator=rng).to(dtype) for peer in plan.contributors}


def right_mean(plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor]) -> torch.Tensor:
    """What the round must give."""
    total = torch.zeros(plan.elements, dtype=torch.float64)
    for peer in plan.contributors:
        total += sums[peer].double()
    return (total / plan.total_weight).float()


async def serve_members(network: Network, members: Sequence[PeerId]) -> dict[PeerId, AllReduce]:
    """One all-reduce service for each member, mounted."""
    services = {}
    for peer in members:
        endpoint = await network.join(peer)
        services[peer] = AllReduce(endpoint, LoopClock(), run=inline)
        endpoint.mount(services[peer])
    return services


Outcome = RoundResult | RoundFailed | asyncio.CancelledError


async def play(
    network: Network,
    plan: RoundPlan,
    sums: Mapping[PeerId, torch.Tensor],
    plans: Mapping[PeerId, RoundPlan] | None = None,
) -> dict[PeerId, Outcome]:
    """All members reduce at once; what each got. A member that dies has its task cancelled, like its process."""
    services = await serve_members(network, plan.members)
    tasks = {
        peer: asyncio.ensure_future(services[peer].reduce((plans or {}).get(peer, plan), sums.get(peer)))
        for peer in plan.members
    }

    async def end_with(peer: PeerId) -> None:
        await network.wait_dead(peer)
        tasks[peer].cancel()

    ends = [asyncio.ensure_future(end_with(peer)) for peer in plan.members]
    outcomes = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for end in ends:
        end.cancel()
    for outcome in outcomes:
        if not isinstance(outcome, Outcome):
            raise outcome
    return dict(zip(plan.members, outcomes, strict=True))  # type: ignore[arg-type]

"""The rig of ``swarm.averaging``: members of a round in virtual time, on a network that tests can break.

outcomes = await play(Network(), plan := make_plan([1, 2], 12), whole_numbers(plan))
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.messages import CHUNK
from swarm.averaging.allreduce.plan import RoundKey, RoundPlan, RoundResult
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
from swarm.schema import Empty
from swarm.security.signing import Signing
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.clocks import LoopClock as LoopClock
from tests.harness.rigs.clocks import in_virtual_time as in_virtual_time
from tests.harness.rigs.clocks import turns as turns
from tests.harness.rigs.common import EventList as EventList
from tests.harness.rigs.common import InlineDevice as InlineDevice
from tests.harness.rigs.common import inline as inline
from tests.harness.rigs.common import sign, verify

Hook = Callable[[PeerId, PeerId, str, Any], Awaitable[None]]


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
        """Lose, from now on, all that these two send each other, and tell neither."""
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
        methods = self._inner.dispatcher._methods
        methods[rpc.name] = dataclasses.replace(methods[rpc.name], handle=handle)

    def handler(self, rpc: Rpc[Any, Any]) -> Handler:
        return self._inner.dispatcher._methods[rpc.name].handle

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
    """Return so many peer ids in rank order."""
    return tuple(PeerId(f"p{number}") for number in range(count))


def make_plan(weights: Mapping[PeerId, int] | Sequence[int], elements: int, **fields: Any) -> RoundPlan:
    """Return a plan of stage 0's step 1, 30 s, for members p0 … with these weights."""
    if not isinstance(weights, Mapping):
        weights = dict(zip(names(len(weights)), weights, strict=True))
    key = RoundKey(step=1, part=stage_part(0), attempt=fields.pop("attempt", 0), after=fields.pop("after", ""))
    defaults: dict[str, Any] = {"timeout_s": 30.0, "chunk_elements": 4}
    return RoundPlan(key=key, members=tuple(weights), weights=weights, elements=elements, **(defaults | fields))


def whole_numbers(plan: RoundPlan, seed: int = 0) -> dict[PeerId, torch.Tensor]:
    """Return sums whose addition is exact, so that the right mean is one division away."""
    rng = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, plan.dtype)
    return {peer: torch.randint(-1000, 1000, (plan.elements,), generator=rng).to(dtype) for peer in plan.contributors}


def right_mean(plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor]) -> torch.Tensor:
    """Return the mean that the round must give."""
    total = torch.zeros(plan.elements, dtype=torch.float64)
    for peer in plan.contributors:
        total += sums[peer].double()
    return (total / plan.total_weight).float()


async def serve_members(network: Network, members: Sequence[PeerId]) -> dict[PeerId, AllReduce]:
    """Mount an all-reduce service at each member, and return them."""
    services = {}
    for peer in members:
        endpoint = await network.join(peer)
        services[peer] = AllReduce(endpoint, LoopClock(), run=inline, signing=Signing(partial(sign, peer), verify))
        endpoint.mount(services[peer])
    return services


async def reduce_at(
    services: Mapping[PeerId, AllReduce], plan: RoundPlan, sums: Mapping[PeerId, torch.Tensor], *peers: PeerId
) -> list[Any]:
    """Have these members (none: all) reduce at once, and return what each got: a result, or why there is none."""
    jobs = (services[peer].reduce(plan, sums[peer]) for peer in peers or plan.members)
    return await asyncio.gather(*jobs, return_exceptions=True)


def kill_at(network: Network, victim: PeerId, method: Rpc[Any, Any], number: int) -> None:
    """Kill the victim just before the call of that number is delivered."""
    seen = 0

    async def hook(caller: PeerId, target: PeerId, name: Rpc[Any, Any], body: Any) -> None:
        nonlocal seen
        seen += name == method
        if name == method and seen == number:
            network.kill(victim)
            await asyncio.sleep(0)

    network.hook = hook


def flip_a_bit(endpoint: TappedEndpoint, *for_whom: PeerId) -> None:
    """Have a member answer these with other bits than its means have."""
    honest = endpoint.handler(CHUNK)

    async def forge(caller: PeerId, body: Any, incoming: Incoming) -> Answer[Any]:
        answer = await honest(caller, body, incoming)
        forged = bytearray(answer.payload)
        if forged:
            forged[0] ^= caller in for_whom
        return Answer(Empty(), forged)

    endpoint.replace_handler(CHUNK, forge)


Outcome = RoundResult | RoundFailed | asyncio.CancelledError


async def play(
    network: Network,
    plan: RoundPlan,
    sums: Mapping[PeerId, torch.Tensor],
    plans: Mapping[PeerId, RoundPlan] | None = None,
) -> dict[PeerId, Outcome]:
    """Have all members reduce at once and return what each got. A member that dies has its task cancelled."""
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


def only_results(outcomes: Mapping[PeerId, Outcome]) -> dict[PeerId, RoundResult]:
    """Return what each member got; raises AssertionError when one of them got no result."""
    found = {peer: outcome for peer, outcome in outcomes.items() if isinstance(outcome, RoundResult)}
    assert len(found) == len(outcomes), outcomes
    return found

"""Hub and spoke in a cell of the benchmark ``wan``: every hop is handed over through the trainer, as in SWARM.

Stage hosts, links and compute are those of the product's swarm: a call carries a microbatch's activation to a replica
and its answer brings the result back. Nothing else of such a system is modelled, all in its favour: nobody looks for
peers, replicas are always chosen by the shortest queue, no forward is computed again for its backward, the optimizer
takes no time, and averaging is one exchange of halves between the two replicas of a stage.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.ids import PeerId, RunId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.schema import Empty, Message
from swarm.sim.device import InlineDevice, SimulatedDevice
from swarm.sim.links import Links, Traffic
from swarm.sim.loop import LoopClock, run_world
from swarm.sim.network import SimEndpoint, SimNetwork
from swarm.sim.wires import PayloadWeights
from tests.benchmarks._wan_cells import MICROBATCHES, REPLICAS, STAGES, TRAINERS, Cell

IN_FLIGHT = 32
"""Microbatches of one trainer at a time, as many as the product has at most."""
REAL_BYTES = 64
"""Of a payload that stands for an activation or for a part."""
RUN = RunId("ab" * 32)
LONGEST_S = 80_000.0
"""No call takes so long; one of a day would be refused."""


class Work(Message):
    """A hop's compute."""

    backward: bool


WORK = Rpc("pipeline/1/work", Work, Empty)
TRADE = Rpc("averaging/1/trade", Empty, Empty)


@dataclass(slots=True, kw_only=True)
class Machine:
    """A stage host or a trainer: computes what it is sent, one after the other, and trades halves of its part."""

    endpoint: SimEndpoint
    device: SimulatedDevice
    compute_s: float
    waiting_s: float = 0.0
    """What others have sent it to do, seconds of its device."""

    def methods(self) -> list[AnyMethod]:
        """See :class:`swarm.network.protocols.Service`."""
        return [WORK.handled_with_payload(self._on_work, admit=_any), TRADE.handled_with_payload(_on_trade, admit=_any)]

    def takes_s(self, *, backward: bool) -> float:
        """Return the seconds of one hop; a backward costs two forwards."""
        return self.compute_s * (2 if backward else 1) / 3

    async def _on_work(self, caller: PeerId, body: Work, incoming: Incoming) -> Answer[Empty]:
        await self.device.run(lambda: self.device.spend(self.takes_s(backward=body.backward)))
        return Answer(Empty(), bytes(incoming.payload))


def _any(caller: PeerId, body: Message, size: int) -> None:
    return None


async def _on_trade(caller: PeerId, body: Empty, incoming: Incoming) -> Answer[Empty]:
    return Answer(Empty(), bytes(incoming.payload))


class Hub:
    """One run of the candidate.

    Args:
        cell: The links, compute and sizes.
        steps: How many.
        seed: Of the links.
        full_stop: All microbatches of a step come home, then the replicas average, then the next step begins. Without
            it trainers go on as if there were no steps, and averaging goes on beside their work: its update comes late.
    """

    def __init__(self, cell: Cell, *, steps: int, seed: int, full_stop: bool) -> None:
        self._cell, self._steps, self._seed, self._full_stop = cell, steps, seed, full_stop
        self._stages: list[list[Machine]] = []
        self._trainers: list[Machine] = []
        self._done = 0
        self._closed: list[float] = []
        self._averaging: asyncio.Task[None] | None = None

    def play(self) -> None:
        """Play it to its end."""
        run_world(self._live())

    def seconds(self) -> dict[int, float]:
        """Return how long each step took, by its number from 1 on."""
        return {step: end - begin for step, (begin, end) in enumerate(itertools.pairwise([0.0, *self._closed]), 1)}

    async def _live(self) -> None:
        network = SimNetwork(LoopClock(), traffic=Traffic(Links.parse(self._cell.links | {"seed": self._seed})))
        network.weights = PayloadWeights(
            activations=self._cell.activation_mb * 1e6 / REAL_BYTES,
            averages={"*": self._cell.part_mb * 1e6 / 2 / REAL_BYTES},
        )
        for stage in range(STAGES):
            self._stages.append([await self._machine(network, f"host-{stage}-{rank}") for rank in range(REPLICAS)])
        self._trainers += [await self._machine(network, f"trainer-{number}") for number in range(TRAINERS)]
        turns, steps = (self._steps, 1) if self._full_stop else (1, self._steps + 1)  # one more: no step is the last
        for _ in range(turns):
            each = steps * MICROBATCHES // TRAINERS
            await asyncio.gather(*(self._feed(trainer, each) for trainer in self._trainers))
            if self._full_stop:
                await self._average(None)
                self._close()
        if self._averaging is not None:
            await self._averaging

    async def _machine(self, network: SimNetwork, name: str) -> Machine:
        endpoint = network.endpoint(name)
        await endpoint.enter(RUN)
        device = SimulatedDevice(InlineDevice(torch.device("cpu")), LoopClock())
        machine = Machine(endpoint=endpoint, device=device, compute_s=self._cell.compute_s)
        endpoint.mount(machine)
        return machine

    async def _feed(self, trainer: Machine, microbatches: int) -> None:
        free = asyncio.Semaphore(IN_FLIGHT)

        async def journey() -> None:
            async with free:
                route = [await self._hop(trainer, replicas, backward=False) for replicas in self._stages]
                for host in reversed(route):
                    await self._hop(trainer, [host], backward=True)
                self._count()

        await asyncio.gather(*(journey() for _ in range(microbatches)))

    async def _hop(self, trainer: Machine, replicas: Sequence[Machine], *, backward: bool) -> Machine:
        host = min(replicas, key=lambda one: one.waiting_s)
        seconds = host.takes_s(backward=backward)
        host.waiting_s += seconds
        await _send(trainer, host, WORK, Work(backward=backward))
        host.waiting_s -= seconds
        return host

    def _count(self) -> None:
        """Without a full stop a step is over when as many microbatches are as it has."""
        self._done += 1
        if not self._full_stop and self._done % MICROBATCHES == 0:
            self._close()
            self._averaging = asyncio.create_task(self._average(self._averaging))

    def _close(self) -> None:
        self._closed.append(asyncio.get_running_loop().time())

    async def _average(self, before: asyncio.Task[None] | None) -> None:
        """One round at a time."""
        if before is not None:
            await before
        ways = [way for group in (*self._stages, self._trainers) for way in itertools.permutations(group, 2)]
        await asyncio.gather(*(_send(source, target, TRADE, Empty()) for source, target in ways))


async def _send(source: Machine, target: Machine, rpc: Rpc[Any, Empty], body: Message) -> None:
    payload, whom = bytes(REAL_BYTES), target.endpoint.peer
    await source.endpoint.call(whom, rpc, body, timeout_s=LONGEST_S, payload=payload, max_reply_bytes=REAL_BYTES)

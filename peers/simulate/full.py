"""A simulation of up to 64 peers with everything that a peer runs: real memberships, deciders, records and averaging,
in memory and in virtual time.

The numbers are real, of a model so small that they cost nothing; what a microbatch takes on a machine of its class is
slept on the clock, and payloads weigh on the links what those of the scenario's model would. Who founds the run has a
link that takes nothing but time. The rule `ours` is the peers' own (`[rebalance] mode = "auto"`); they have no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from peers.chaos.schedule import Removal
from peers.console.interrupt import SIGNALS
from peers.simulate.sim_swarm import SimSwarm
from peers.simulate.spot_market import SpotMarket
from swarm.columns import columns, columns_of, host_parts
from swarm.device import Device
from swarm.events import Event, HostsMoved, StepClosed, StepGivenUp
from swarm.ids import ENDS, PartName
from swarm.models.registry import family_of
from swarm.planning.workload import PeerClass
from swarm.sim.device import InlineDevice, SimulatedDevice
from swarm.sim.links import Links, LinkShape
from swarm.sim.loop import LoopClock, run_world
from swarm.sim.machines import FORWARD_SHARE
from swarm.sim.simulation import SimulatedStep, SimulationCase, SimulationResult, StepCosts, shares
from swarm.sim.wires import PayloadWeights

TINY = {"vocab_size": 300, "dim": 16, "heads": 1, "context": 8}
"""What is really computed, of as many layers as the scenario's model has."""
FLOAT32 = 4
FOUNDING_S = 600.0
"""Until everybody is there, by virtual time: no simulation begins later."""

T = TypeVar("T")


class FullSwarm(SimSwarm):
    """The swarm of a case. Stage hosts are called host-PLACE, those that come later spot-PLACE-NUMBER."""

    def __init__(self, root: Path, case: SimulationCase) -> None:
        places = [machine.kind for machine in case.turnover.machines]
        self._classes = _ClassOf(case.classes, tuple(places), case.trainers)
        self._costs = StepCosts(case)
        wishes: dict[str, dict[str, int | str]] = {
            f"host-{place}": {"stage": machine.stage}
            for place, machine in enumerate(case.turnover.machines)
            if machine.stage is not None
        }
        domains, split = [f"kind-{choice}" for choice in range(len(case.kinds))], dict[str, Any]()
        if case.work.loads:
            split = {"variants": tuple(map(len, case.work.loads)), "route_by": "domain", "domains": tuple(domains)}
            brings = dealt(case.kinds, len(case.trainers))
            wishes |= {f"trainer-{number}": {"domain": domains[choice]} for number, choice in enumerate(brings)}
        shared = {"share": "stages", "delink_at": case.turnover.delink_at} if case.work.alike else {}
        super().__init__(
            root,
            may_fail=True,
            links=ClassedLinks(seed=case.seed, machines=(("*", 1.0, 1.0),), of=self._classes),
            hosts=len(places),
            trainers=len(case.trainers),
            sites=wishes,
            run={"steps": case.steps, "seed": case.seed, "copies": case.work.copies},
            model={**TINY, "layers": sum(case.stages), **shared},
            split={
                "stages": len(case.stages),
                "layers_per_stage": case.stages,
                "ends": "hosted" if case.work.hosted else "private",
                **split,
            },
            batch={"microbatch_size": 1, "microbatches_per_step": case.microbatches},
            codecs={"activations": "float32", "gradients": "float32"},
            rebalance={"mode": "auto" if case.turnover.rule == "ours" else "off"},
        )
        self.network.weights = self._weights(case)

    def _weights(self, case: SimulationCase) -> PayloadWeights:
        """Return how much heavier the scenario's payloads are than the tiny model's; of the parts on average."""
        family, stages = family_of(self.manifest.model), len(case.stages)
        real = {part.name: family.cost(part, TINY["context"]).parameters for part in family.parts(self.manifest.split)}

        def ratio(columns: Sequence[int], parts: Sequence[PartName]) -> float:
            layers = (*case.stages, 0)
            meant = sum(case.work.part(stages, at, layers[at]).parameters for at in columns)
            return case.work.averaged_bytes * meant / max(1, FLOAT32 * sum(real.get(name, 0) for name in parts))

        plain = [next(iter(there)) for there in columns(self.manifest.split.parts)]
        hosts = ratio(range(stages), plain)
        crossing = case.rows * (case.work.activation_bytes + case.work.gradient_bytes) / 2
        return PayloadWeights(
            activations=crossing / (FLOAT32 * TINY["dim"] * TINY["context"]),
            averages={"host-*": hosts, "spot-*": hosts, "trainer-*": ratio((stages,), (ENDS,))},
        )

    def _device(self, name: str) -> Device:
        one = self._classes.of(name)
        self.devices[name] = ClassedDevice(None if one is None else (one, self._costs))
        return self.devices[name]


def dealt(kinds: Sequence[float], trainers: int) -> list[int]:
    """Return which kind of text each of so many trainers brings, as many of each as its share, at least one."""
    found = list(range(min(trainers, len(kinds))))
    while len(found) < trainers:
        found.append(max(range(len(kinds)), key=lambda kind: kinds[kind] * trainers - found.count(kind)))
    return found


@dataclass(frozen=True, slots=True)
class _ClassOf:
    """The class of each machine, by the name of its peer."""

    classes: tuple[PeerClass, ...]
    places: tuple[int, ...]
    trainers: tuple[int, ...]

    def of(self, name: str) -> int | None:
        """The number of its class; None for the founder."""
        kind, *numbers = name.split("-")
        if kind == "trainer":
            return self.trainers[int(numbers[0])]
        return self.places[int(numbers[0])] if kind in ("host", "spot") else None

    def link(self, name: str) -> PeerClass | None:
        """Its class; None for the founder."""
        kind = self.of(name)
        return None if kind is None else self.classes[kind]


@dataclass(frozen=True, kw_only=True)
class ClassedLinks(Links):
    """Links of machines by their class: from one to another it takes a quarter of the round trips of both."""

    of: _ClassOf

    def shape(self, source: str, target: str) -> LinkShape:
        """See :class:`~swarm.sim.links.Links`."""
        trips = [one.round_trip_s for name in (source, target) if (one := self.of.link(name)) is not None]
        return LinkShape(latency_s=sum(trips) / max(1, len(trips)) / 2)

    def machine(self, name: str) -> tuple[float, float]:
        """See :class:`~swarm.sim.links.Links`."""
        one = self.of.link(name)
        return (float("inf"), float("inf")) if one is None else (one.up, one.down)


class ClassedDevice(SimulatedDevice):
    """A device on which a part takes what it takes on a machine of this class; nothing at the founder's."""

    def __init__(self, known: tuple[int, StepCosts] | None) -> None:
        super().__init__(InlineDevice(torch.device("cpu")), LoopClock())
        self._known = known

    def place(self, part: T) -> T:
        """Return the part with methods that take their time."""
        if self._known is None:
            return part
        kind, costs = self._known
        name = PartName(part.spec.name)  # type: ignore[attr-defined]
        at = next(iter(columns_of(name)), costs.stages)
        whole_s = costs.seconds(kind, at)
        if name == ENDS:
            self._stage_s = {"loss": whole_s}
        else:
            forward_s = FORWARD_SHARE * whole_s
            self._stage_s = {"forward": forward_s, "forward_loss": forward_s, "backward": whole_s - forward_s}
        return super().place(part)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Have a signal stop the world between two turns; its own handler is called once that has been cleared up. What the
    handler raises would end no more than the task that runs just then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        asyncio.get_running_loop().stop()

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    except RuntimeError:
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and callable(handler := before[received[0]]):
        handler(received[0], None)


class FullPlay:
    """Plays a case in a directory of its own, which is gone afterwards. Cost: some 12 ms of a core a hop."""

    def __init__(self, case: SimulationCase) -> None:
        self._case = case
        self._steps: list[SimulatedStep] = []
        self._given_up = 0
        self._held: Mapping[PartName, int] = {}
        self._kinds = Counter[int]()

    def run(self) -> SimulationResult:
        """Play to the end. Raises what ends the run."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with _stopped_by_signals(), tempfile.TemporaryDirectory(prefix="simulate-") as folder:
                notices = self._case.turnover.notices
                trace = [Removal(one.at_s, one.places, one.back_s, one.noticed and notices) for one in self._case.trace]
                swarm = FullSwarm(Path(folder), self._case)
                market = SpotMarket(swarm, trace, lambda place, number: f"spot-{place}-{number}")
                run_world(self._live(swarm, market))
                self._kinds.update(one.get("choice", 0) for record in swarm.history() for one in record["committed"])
        finally:
            torch.set_num_threads(threads)
        ended_s = self._steps[-1].closed_s if len(self._steps) >= self._case.steps else self._case.until_s
        moves = sum(len(event.moves) for event in swarm.events(HostsMoved))
        counts = {"joins": len(market.join_seconds()), "moves": moves, "given up": self._given_up}
        more = {name: float(value) for name, value in sorted(market.counts.items())}
        kinds = shares(self._kinds, len(self._case.kinds))
        return SimulationResult("full", tuple(self._steps), ended_s, counts, self._held, kinds, more)

    async def _live(self, swarm: FullSwarm, market: SpotMarket) -> None:
        await swarm.open()
        swarm.peers["bootstrap"].events.listeners.append(lambda event: self._hear(event, market))
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(market.run())
            try:
                await swarm.run(timeout_s=FOUNDING_S + self._case.until_s)
            except TimeoutError:
                if not self._steps:
                    raise
            finally:
                playing.cancel()

    def _hear(self, event: Event, market: SpotMarket) -> None:
        """What the founder tells: it stays, and sees every step."""
        self._given_up += isinstance(event, StepGivenUp)
        if not isinstance(event, StepClosed) or event.step <= 0:
            return
        now_s = market.now_s - market.began_s
        if now_s > self._case.until_s:
            return
        held = [machine.part for machine in market.machines.values() if machine.holds and machine.part is not None]
        self._held = {part: held.count(part) for part in host_parts(market.swarm.manifest.cut_with(held))}
        before_s = self._steps[-1].closed_s if self._steps else 0.0
        self._steps.append(
            SimulatedStep(
                step=event.step,
                closed_s=now_s,
                seconds=now_s - before_s,
                peers=len(held),
                fewest=min(self._held.values()),
                rate=event.microbatches / (now_s - before_s),
            )
        )

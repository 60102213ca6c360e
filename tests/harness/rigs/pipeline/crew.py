"""A trainer and real replicas with cheap parts, and faults that strike them in a chosen phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.pipeline.stage.admission import Participants
from swarm.pipeline.trainer.pace import JourneyDeadlines
from swarm.sim.network import SimNetwork
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.pipeline.parts import TRAINER
from tests.harness.rigs.pipeline.sides import FakeLeader, Replica, TrainerSide, enter, working

Routes = Mapping[MicrobatchId, tuple[PeerId, ...]]
PHASES = ("forward", "handed on", "backward", "accumulate", "accumulated")
"""When a fault strikes: as a forward begins, as the next stage begins with its output, as a backward begins, before and
after the sum is changed."""


def works(routes: Iterable[MicrobatchId]) -> Any:
    """Return microbatches of step 1, with their routes where they have some, as what is assigned."""
    if isinstance(routes, Mapping):
        return {StepWork(1, microbatch): route for microbatch, route in routes.items()}
    return {StepWork(1, microbatch) for microbatch in routes}


def quick() -> JourneyDeadlines:
    """Return deadlines of a test's size."""
    return JourneyDeadlines(floor_s=0.1, ceiling_s=0.4)


class Crew:
    """A trainer and real replicas: ``crew.replicas`` by peer. ``struck`` are the peers that a fault has hit."""

    def __init__(self, stages: Sequence[Sequence[PeerId]], **options: Any) -> None:
        self.stages, self._options = stages, options
        self.network = SimNetwork(LoopClock())
        self.struck: list[PeerId] = []

    @classmethod
    async def of(
        cls, stages: Sequence[Sequence[PeerId]], *, limits: dict[str, Any] | None = None, **options: Any
    ) -> Crew:
        """Return an open crew; ``limits`` are the replicas'."""
        crew = cls(stages, **options)
        await crew.open(**(limits or {}))
        return crew

    async def open(self, **limits: Any) -> None:
        """Have everybody enter the run."""
        hosted = self._options.get("hosted", False)
        (home,) = await enter(self.network, TRAINER)
        self.side = TrainerSide(home, self.stages, **self._options)
        self.replicas: dict[PeerId, Replica] = {}
        for stage, peers in enumerate(self.stages):
            for peer, endpoint in zip(peers, await enter(self.network, *peers), strict=True):
                replica = Replica(endpoint, stage, len(self.stages), hosted=hosted, **limits)
                replica.part.scale = 2.0 + stage
                replica.server.open_step(1, Participants.of([TRAINER], self.stages))
                self.replicas[peer] = replica

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Have the replicas work inside, for ten minutes at most."""
        async with working(*self.replicas.values()), asyncio.timeout(600):
            yield

    async def feed(self, quota: int) -> FakeLeader:
        """Feed step 1 with so many microbatches."""
        leader = FakeLeader(quota)
        async with self.working():
            await leader.fed_by(self.side.trainer)
        return leader

    def held(self, *peers: PeerId) -> set[MicrobatchId]:
        """Return the microbatches that these have in their sums."""
        return {microbatch for peer in peers for microbatch in self.replicas[peer].part.held}

    # --- faults --------------------------------------------------------------------------------------------------

    def kill(self, peer: PeerId) -> None:
        """Kill a peer without a word: its connections break."""
        self.struck.append(peer)
        self.network.kill(peer)

    def silence(self, peer: PeerId) -> None:
        """Let nothing come from a peer or reach it any more, while no connection breaks."""
        self.struck.append(peer)
        for other in [TRAINER, *self.replicas]:
            self.network.cut(peer, other)
            self.network.cut(other, peer)

    def mend(self, peer: PeerId) -> None:
        """Undo :meth:`silence`: what is sent from now on arrives."""
        for other in [TRAINER, *self.replicas]:
            self.network.mend(peer, other)
            self.network.mend(other, peer)

    def strike(self, stage: int, phase: str, fault: Callable[[PeerId], None]) -> None:
        """Have ``fault`` hit the first replica of a stage that gets so far, once."""
        at = stage + 1 if phase == "handed on" else stage
        for peer in self.stages[at]:
            part = self.replicas[peer].part
            if phase == "accumulated":
                part.accumulate = self._after(part.accumulate, peer, fault)  # type: ignore[method-assign]
            else:
                hook = "forward" if phase == "handed on" else phase
                part.on[hook] = self._hook(peer, phase, fault)

    def _hook(self, peer: PeerId, phase: str, fault: Callable[[PeerId], None]) -> Callable[[], None]:
        def hook() -> None:
            if self.struck:
                return
            stage = self.replicas[peer].stage - (phase == "handed on")
            victim = peer
            if phase == "handed on":
                journey = self.side.trainer._under_way()[0]
                victim = journey.route[stage]
            fault(victim)

        return hook

    def _after(self, usual: Any, peer: PeerId, fault: Callable[[PeerId], None]) -> Any:
        def accumulate(work: StepWork, gradients: Any, **how: Any) -> None:
            usual(work, gradients, **how)
            if not self.struck:
                fault(peer)

        return accumulate

    # --- the end of a step ---------------------------------------------------------------------------------------

    def assigned(self, leader: FakeLeader) -> Routes:
        """Return what came home, by route; those struck are replaced by the first of their stage that was not."""
        routes: dict[MicrobatchId, tuple[PeerId, ...]] = {}
        for journey in leader.finished:
            route = list(journey.route)
            for stage, peer in enumerate(route):
                if peer in self.struck:
                    route[stage] = next(other for other in self.stages[stage] if other not in self.struck)
            routes[journey.key.microbatch] = tuple(route)
        return routes

    async def settle(self, assigned: Routes) -> None:
        """Have every replica that is left hold what it is assigned."""
        for stage, peers in enumerate(self.stages):
            for peer in peers:
                if peer not in self.struck:
                    own = works({mb: route for mb, route in assigned.items() if route[stage] == peer})
                    await self.replicas[peer].server.settle(1, own)

    def sums(self) -> list[dict[MicrobatchId, float]]:
        """Return, by stage, what the replicas that are left hold; raises AssertionError when two hold the same."""
        found = []
        for peers in self.stages:
            together: dict[MicrobatchId, float] = {}
            for peer in peers:
                if peer in self.struck:
                    continue
                for microbatch, gradient in self.replicas[peer].part.held.items():
                    assert microbatch not in together, f"{microbatch} counts twice"
                    together[microbatch] = gradient
            found.append(together)
        return found

"""The rig of ``swarm.membership``: a run that others observe, with a real part, real digests and updates, a donor and a
contact, and whatever one wants to lie about.

    bench = ObserverBench(Run(steps=2))
    await bench.open()
    part = await bench.installed(bench.observer())
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch

from data_shards.tokenize import train_tokenizer
from swarm.config import Manifest
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes
from swarm.consensus.roster import Roster
from swarm.ids import PartName, PeerId, stage_part
from swarm.membership.founding_record import genesis
from swarm.membership.observer import Observer, ObserverContext
from swarm.membership.observer_service import Observers, ObserverService
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.update import Update
from swarm.schema import Message
from swarm.sim.network import SimEndpoint, SimNetwork
from swarm.state.download import Download, DownloadContext, IntoMemory, PeerChunks, Wanted
from swarm.state.snapshot import Snapshot, digest, initial_snapshot
from swarm.state.transfer import StateDonor
from swarm.step.observe_messages import RunStanding
from tests.harness.rigs.clocks import FakeClock as FakeClock
from tests.harness.rigs.clocks import HandClock as HandClock
from tests.harness.rigs.clocks import LoopClock as LoopClock
from tests.harness.rigs.clocks import in_time as in_time
from tests.harness.rigs.clocks import stop as stop
from tests.harness.rigs.clocks import turns as turns
from tests.harness.rigs.clocks import virtual as virtual
from tests.harness.rigs.common import RUN as RUN
from tests.harness.rigs.common import EventList as EventList
from tests.harness.rigs.common import InlineDevice as InlineDevice
from tests.harness.rigs.common import inline as inline
from tests.harness.rigs.common import sign as sign
from tests.harness.rigs.common import verify as verify
from tests.harness.rigs.consensus import COMMITTED as COMMITTED
from tests.harness.rigs.consensus import GENESIS as GENESIS
from tests.harness.rigs.consensus import ROSTER as ROSTER
from tests.harness.rigs.consensus import A as A
from tests.harness.rigs.consensus import B as B
from tests.harness.rigs.consensus import T as T
from tests.harness.rigs.consensus import acceptances as acceptances
from tests.harness.rigs.consensus import listed as listed
from tests.harness.rigs.consensus import microbatch as microbatch
from tests.harness.rigs.consensus import record as record
from tests.harness.rigs.models import TINY as TINY
from tests.harness.rigs.state import ME as ME
from tests.harness.rigs.state import Donors as Donors
from tests.harness.rigs.state import big_state as big_state
from tests.harness.rigs.step import RULES as RULES
from tests.harness.rigs.step import MemberBench as MemberBench
from tests.harness.rigs.step import apply as apply
from tests.harness.rigs.step import decide as decide
from tests.harness.rigs.step import prepare as prepare
from tests.harness.rigs.step import reconcile as reconcile
from tests.harness.swarm import small_manifest


@functools.cache
def tokenizer() -> bytes:
    """Return what makes words of letters, trained once."""
    return train_tokenizer(["some words to make a tokenizer of"], 300)


def manifest(*, hosts: int = 2, stages: int = 2, ends: str = "private", **sections: dict[str, Any]) -> Manifest:
    """Return the manifest of a small run."""
    return small_manifest(tokenizer(), hosts, 1, {"split": {"stages": stages, "ends": ends}} | sections)


STAGE = stage_part(0)
DONOR, CONTACT, OTHER, JOINER = (PeerId(name) for name in ("D", "C", "E", "J"))
OBSERVED = Roster([listed(DONOR), listed(OTHER), listed(CONTACT, "trainer", "ends")])
"""Who takes part in the run that is observed."""


ADAMW = AdamW(OptimizerConfig())


def fresh_part(update: Update = ADAMW) -> TrainedPart:
    """Return the stage at its initial weights."""
    part = empty_part(update)
    part.install(initial_snapshot(STAGE, part.layout, family_of(TINY).initial_weights(0)))
    return part


def empty_part(update: Update = ADAMW) -> TrainedPart:
    """Return the stage without weights."""
    spec = next(spec for spec in family_of(TINY).parts(SplitConfig(stages=2)) if spec.name == STAGE)
    return TrainedPart(spec, TINY, update)


class Run:
    """The members' side: closes steps, one after the other, with made-up gradients."""

    def __init__(self, steps: int = 0, update: Update = ADAMW) -> None:
        self.update, self.part = update, fresh_part(update)
        self.decisions = [signed(genesis(RUN, OBSERVED, self._digests(digest(self.part.snapshot()))))]
        for _ in range(steps):
            self.close()

    @property
    def head(self) -> CloseRecord:
        """Return the newest record."""
        return self.decisions[-1].record

    def close(
        self,
        roster: Roster | None = None,
        before: CloseRecord | None = None,
        *,
        ended: bool = False,
        cap: float = 1.0,
    ) -> Decision:
        """Return the decision of the next step, with a mean that is capped; the ``roster`` takes part from then on."""
        before = before or self.head
        step = before.step + 1
        averaged = self.part.averaged(step)
        mean = torch.randn(averaged.stop - averaged.start, generator=torch.Generator().manual_seed(step)) / 10
        found = self.part.prepare(mean, lr=0.01, clip=0.5 * cap, step=step)
        self.part.swap()
        record = CloseRecord(
            run=RUN,
            step=step,
            ended=ended,
            committed=(),
            tokens=1,
            loss_sum=1.0,
            grad_norm=1.0,
            clip=0.5,
            lr=0.01,
            caps={} if cap == 1.0 else {STAGE: cap},
            digests=self._digests(found),
            cursors={},
            roster=(roster or before.members).members,
            previous=before.hash(),
        )
        self.decisions.append(signed(record, before.members.peers, mean))
        return self.decisions[-1]

    def _digests(self, of_stage: str) -> dict[PartName, str]:
        return {STAGE: of_stage, PartName("stage-1"): "0" * 64, PartName("ends"): "1" * 64}


def signed(record: CloseRecord, peers: Sequence[PeerId] = OBSERVED.peers, mean: torch.Tensor | None = None) -> Decision:
    """Return a decision that these peers accepted."""
    return Decision(record, {peer: sign(peer, acceptance_bytes(record)) for peer in peers}, mean)


class ObserverBench:
    """Who serves the run to an observer, over a network in memory and in a time of its own. ``replicas`` of the stage
    are donors; all of them and the contact decide at once, unless :meth:`publish` is told who does."""

    def __init__(self, run: Run, *, downloads: int = 4, replicas: Sequence[PeerId] = (DONOR,)) -> None:
        self.run, self.clock = run, HandClock()
        self.network = SimNetwork(self.clock)
        self.replicas = tuple(replicas)
        self.twists: Twists = {}
        self.donors = {peer: StateDonor(self.clock, max_downloads=downloads, run=inline) for peer in replicas}
        self.services = {
            peer: ObserverService(self._standing, donor, self._snapshot(peer), Observers(donor, self.clock))
            for peer, donor in self.donors.items()
        }
        self.parts = {peer: self.run.part.snapshot() for peer in replicas}
        nothing = StateDonor(self.clock)
        self.services[CONTACT] = ObserverService(
            self._standing, nothing, _holds_nothing, Observers(nothing, self.clock)
        )
        self.leaving = False
        self.told: list[int] = []
        self.endpoints: dict[PeerId, SimEndpoint] = {}
        self.asked: list[tuple[PeerId, Rpc[Any, Any]]] = []

    def _standing(self, closed: int | None) -> RunStanding:
        waiting = "peers" if closed is None else ""
        return RunStanding(founder=CONTACT, closed=closed, waiting_for=waiting, leaving=self.leaving)

    @property
    def service(self) -> ObserverService:
        """Return the first donor's."""
        return self.services[self.replicas[0]]

    @property
    def donor(self) -> StateDonor:
        """Return the first donor's."""
        return self.donors[self.replicas[0]]

    @property
    def contact(self) -> ObserverService:
        """Return the contact's."""
        return self.services[CONTACT]

    async def open(self) -> None:
        """Have everybody enter the network and publish what was decided so far."""
        for peer in self.replicas:
            await self.on_network(peer, self.services[peer], self.donors[peer])
        await self.on_network(CONTACT, self.contact)
        await self.on_network(JOINER)
        for decision in self.run.decisions:
            await self.publish(decision)

    async def on_network(self, peer: PeerId, *services: Any) -> SimEndpoint:
        """Add a peer with these services, each answer of which may be twisted."""
        endpoint = self.endpoints[peer] = self.network.endpoint(peer)
        await endpoint.enter(RUN)
        for service in services:
            endpoint.mount(_Twisted(service, self.twists if peer == DONOR else {}, lambda name: self._note(peer, name)))
        return endpoint

    async def publish(self, decision: Decision, *who: PeerId) -> None:
        """Have the donors and the contact, or some of them, decide and swap."""
        for peer in who or tuple(self.services):
            if peer in self.parts:
                self.parts[peer] = self.run.part.snapshot()
            await self.services[peer].publish(decision, STAGE if peer in self.parts else None)

    async def close(self, roster: Roster | None = None, **more: Any) -> Decision:
        """Close one more step of the run."""
        decision = self.run.close(roster, **more)
        await self.publish(decision)
        return decision

    def observer(self, *donors: PeerId, part: PartName | None = STAGE, me: PeerId = JOINER) -> Observer:
        """Return a peer that wants to join, with the help of these (none: of all replicas)."""

        async def observe(decision: Decision) -> None:
            self.told.append(decision.record.step)

        context = ObserverContext(
            run=RUN,
            endpoint=self.endpoints[me],
            device=InlineDevice(),
            verify=verify,
            observe=observe,
        )
        return Observer(context, donors or self.replicas, part)

    async def installed(self, observer: Observer, me: PeerId = JOINER) -> TrainedPart:
        """Start, download, and begin to follow."""
        decision = await observer.start(CONTACT)
        part = await self.fetch(decision.record, *observer.donors, me=me)
        await observer.begin(decision, part)
        return part

    async def fetch(self, record: CloseRecord, *donors: PeerId, me: PeerId = JOINER) -> TrainedPart:
        """Return the part, downloaded and verified."""
        part = empty_part(self.run.update)
        wanted = Wanted(part=STAGE, step=record.step, digest=record.digests[STAGE], layout=part.layout)
        context = DownloadContext(donor=partial(PeerChunks, self.endpoints[me]), clock=self.clock, run=inline)
        part.install(await Download(context, wanted, IntoMemory(wanted)).fetch(donors or self.replicas))
        return part

    @property
    def kept(self) -> list[int]:
        """Return the steps whose update the donor keeps in memory."""
        return self.service._updates.steps(STAGE)

    @property
    def states(self) -> int:
        """Return how many states the donor keeps in memory for others."""
        return len(self.donor._leases)

    def _snapshot(self, peer: PeerId) -> Callable[[PartName], Awaitable[Snapshot | None]]:
        async def snapshot(part: PartName) -> Snapshot | None:
            return self.parts[peer] if part == STAGE else None

        return snapshot

    def _note(self, peer: PeerId, method: Rpc[Any, Any]) -> None:
        self.asked.append((peer, method))


async def _holds_nothing(part: PartName) -> None:
    return None


Twists = dict[Rpc[Any, Any], Callable[[Message, Answer[Any]], Answer[Any]]]


class _Twisted:
    """A service whose answers may be changed on their way out; a twist may raise a PeerError instead."""

    def __init__(
        self,
        service: Any,
        twists: Twists,
        note: Callable[[Rpc[Any, Any]], None],
    ) -> None:
        self._service, self._twists, self._note = service, twists, note

    def methods(self) -> list[AnyMethod]:
        """Return all methods, twisted."""
        return [dataclasses.replace(method, handle=self._handler(method)) for method in self._service.methods()]

    def _handler(self, method: AnyMethod) -> Any:
        async def handle(caller: PeerId, body: Message, incoming: Incoming) -> Answer[Any]:
            self._note(method.rpc)
            answer = await method.handle(caller, body, incoming)
            twist = self._twists.get(method.rpc)
            return answer if twist is None else twist(body, answer)

        return handle

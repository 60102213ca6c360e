"""One peer of the join benchmark, in a process of its own: ``python -m tests.benchmarks._join_peer SETTINGS``.

``SETTINGS`` is JSON: ``{"home", "donors": [homes], "listen", "layers", "dim"}``. Speaks JSON lines: it prints who it
is; a donor then closes a step for each ``{"close": true}``; the joiner, given ``{"join": {peer: addresses}}``, tells
how its download goes and every step that it takes. Model, updates and records are made up, and the same everywhere; the
state, its digests, the signatures and what travels are real.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import uvloop
from multiaddr import Multiaddr

from swarm.clock import SystemClock
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes
from swarm.consensus.roster import Member, Roster
from swarm.device import DeviceThread
from swarm.events import DonorDropped, Event, StateDownloaded, SyncProgress
from swarm.ids import PartName, PeerId, RunId, stage_part
from swarm.membership.download import PartDownload
from swarm.membership.founding_record import genesis
from swarm.membership.observer import Observer, ObserverContext
from swarm.membership.observer_service import ObserverService
from swarm.membership.observers import Observers
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.security.signing import verify
from swarm.state.snapshot import Snapshot, initial_snapshot
from swarm.state.transfer import StateDonor
from swarm.step.observe_messages import RunStanding

RUN = RunId("1c" * 32)
STAGE = stage_part(0)


class JoinPeer:
    """What donors and joiner have in common."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.clock = settings, SystemClock()
        self.identities = [load_or_create(Path(home) / "identity.key") for home in settings["donors"]]
        self.roster = Roster(
            Member(peer=identity.peer, role="stage", name=f"d{number}", part=STAGE, addresses=())
            for number, identity in enumerate(self.identities)
        )
        model = GptConfig(vocab_size=300, dim=settings["dim"], layers=settings["layers"], heads=8, context=32)
        spec = next(spec for spec in family_of(model).parts(SplitConfig(stages=1)) if spec.name == STAGE)
        self.device = DeviceThread(torch.device("cpu"))
        self.part = TrainedPart(spec, model, AdamW(OptimizerConfig()))
        self.model = model

    async def open(self) -> LibP2PEndpoint:
        """On the network."""
        home = Path(self.settings["home"])
        config = EndpointConfig(run_dir=home / "run", listen=(Multiaddr(self.settings["listen"]),), relay="off")
        self.endpoint = await LibP2PEndpoint.open(config, load_or_create(home / "identity.key"), self.clock)
        await self.endpoint.enter(RUN)
        say(peer=self.endpoint.peer, addresses=self.endpoint.addresses)
        return self.endpoint

    def signed(self, record: CloseRecord, mean: torch.Tensor | None = None) -> Decision:
        """Accepted by everybody."""
        return Decision(record, {i.peer: i.private.sign(acceptance_bytes(record)) for i in self.identities}, mean)


class Donor(JoinPeer):
    """Closes steps when told, and serves those who observe."""

    async def run(self) -> None:
        """Until the input ends."""
        layout = self.part.layout
        weights = family_of(self.model).initial_weights(0, self.part.spec)
        await self.device.run(self.part.install, initial_snapshot(STAGE, layout, weights))
        donor = StateDonor(self.clock)
        first = self.identities[0].peer
        standing = partial(RunStanding, founder=first, waiting_for="")
        service = ObserverService(
            lambda closed: standing(closed=closed), donor, self.snapshot, Observers(donor, self.clock)
        )
        self.endpoint.mount(donor)
        self.endpoint.mount(service)
        digest = await self.device.run(lambda: _digest(self.part.snapshot()))
        head = genesis(RUN, self.roster, {STAGE: digest})
        await service.publish(self.signed(head), STAGE)
        say(ready=True)
        async for _ in orders():
            began = time.monotonic()
            mean = torch.randn(layout.elements, generator=torch.Generator().manual_seed(head.step)) / 100
            step = head.step + 1
            digest = await self.device.run(lambda step=step, mean=mean: self.close(step, mean))
            head = CloseRecord(
                run=RUN, step=step, committed=(), tokens=1, loss_sum=1.0, grad_norm=1.0, clip=1.0, lr=1e-4,
                digests={STAGE: digest}, cursors={}, roster=self.roster.members, previous=head.hash(),
            )  # fmt: skip
            await service.publish(self.signed(head, mean), STAGE)
            say(closed=head.step, seconds=time.monotonic() - began, cpu_s=_cpu_s())

    def close(self, step: int, mean: torch.Tensor) -> str:
        """On the device thread."""
        digest = self.part.prepare(mean, lr=1e-4, clip=1.0, step=step)
        self.part.swap()
        return digest

    async def snapshot(self, part: PartName) -> Snapshot:
        """Our state."""
        return await self.device.run(self.part.snapshot)


class Joiner(JoinPeer):
    """Gets the state and catches up."""

    async def run(self) -> None:
        """One order, one joining."""
        async for order in orders():
            await self.join({PeerId(peer): addresses for peer, addresses in order["join"].items()})
            return

    async def join(self, donors: dict[PeerId, list[str]]) -> None:
        """As a peer does it, but for being let in."""
        for peer, addresses in donors.items():
            self.endpoint.learn(peer, addresses)
        around: Any = SimpleNamespace(endpoint=self.endpoint, clock=self.clock, device=self.device, events=self)
        context = ObserverContext(
            run=RUN, endpoint=self.endpoint, device=self.device, verify=verify, observe=self.observe
        )
        observer = Observer(context, list(donors), STAGE)
        contact = list(donors)[-1]
        decision = await observer.start(contact)
        say(started=decision.record.step, donors=observer.donors)
        before = self.endpoint.statistics().total[1]
        await PartDownload(around, decision.record, self.part).run(observer.donors)
        say(wire_bytes=self.endpoint.statistics().total[1] - before)
        await observer.begin(decision, self.part)
        while True:
            waited = time.monotonic()
            record = await observer.follow()
            say(followed=record.step, waited_s=time.monotonic() - waited, update_bytes=4 * self.part.layout.elements)

    async def observe(self, decision: Decision) -> None:
        """A member would be told."""

    def emit(self, event: Event) -> None:
        """An event of the download."""
        if isinstance(event, SyncProgress):
            say(received=event.bytes_received, total=event.bytes_total)
        elif isinstance(event, DonorDropped):
            say(dropped=event.donor, code=event.code)
        elif isinstance(event, StateDownloaded):
            say(downloaded=event.bytes_received, gave=event.donors)


def say(**fields: Any) -> None:
    """One line to the benchmark."""
    print(json.dumps(fields), flush=True)


async def orders() -> Any:
    """What the benchmark says, line by line."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _digest(snapshot: Snapshot) -> str:
    from swarm.state.snapshot import digest

    return digest(snapshot)


def _cpu_s() -> float:
    """Processor seconds of this process and its daemon, so far."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


async def _main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    peer = Joiner(settings) if settings["home"] not in settings["donors"] else Donor(settings)
    endpoint = await peer.open()
    try:
        await peer.run()
    finally:
        await endpoint.close()
        await peer.device.close()


if __name__ == "__main__":
    uvloop.run(_main(json.loads(sys.argv[1])))

"""What the founder of a run does before it is a member like any other: weights, roster, genesis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from peers.roles import Surroundings
from swarm.errors import PeerError, RunEnded
from swarm.ids import PartName, PeerId
from swarm.models.init import initial_weights
from swarm.models.layout import FlatLayout
from swarm.models.split import build_part, split_model
from swarm.network.protocols import Directory
from swarm.network.records import PeerRecord
from swarm.optimization.calls import StepCalls
from swarm.optimization.founding import found, gather_candidates
from swarm.optimization.roster import Candidate
from swarm.pipeline.health import PING_TIMEOUT_S, Ping
from swarm.schema import Empty
from swarm.state.snapshot import Snapshot, digest, initial_snapshot
from swarm.state.transfer import StateDonor

GENESIS_TIMEOUT_S = 120.0
"""A member answers the genesis when it has downloaded its part."""


class Founder:
    """Makes the initial weights once and serves them until everybody has his part."""

    def __init__(
        self,
        around: Surroundings,
        directory: Directory,
        calls: StepCalls,
        own_record: Callable[[], PeerRecord],
        donor: StateDonor,
    ) -> None:
        self._around, self._directory, self._calls = around, directory, calls
        self._own_record, self._donor = own_record, donor

    async def found(self, patience_s: float | None, waiting: Callable[[str], None]) -> None:
        """Return when the genesis is decided; ``waiting`` is told who is missing. Raises RunEnded when too few peers
        come within ``patience_s`` (None: wait for ever), which those who came are told, or a member's PeerError."""
        run = self._around.manifest.run
        snapshots = await self._around.device.run(self._initial_snapshots)
        digests: dict[PartName, str] = {}
        for snapshot in snapshots:
            digests[snapshot.part] = await asyncio.to_thread(digest, snapshot)
            self._donor.offer(snapshot, digests[snapshot.part])
        try:
            candidates = await gather_candidates(
                self._candidates,
                self._around.clock,
                stage_hosts=run.start_when.stage_hosts,
                trainers=run.start_when.trainers,
                patience_s=patience_s,
                waiting=waiting,
            )
        except RunEnded as ended:
            watch = self._around.watch
            watch.follow([PeerId(candidate.peer) for candidate in await self._candidates()])
            await watch.tell_all(self._around.endpoint.peer, ended.reason)
            raise
        await found(self._calls, self._around.manifest.run_id, candidates, digests, timeout_s=GENESIS_TIMEOUT_S)
        for part in digests:
            self._donor.withdraw(part)

    async def _candidates(self) -> Sequence[Candidate]:
        """Everybody in the directory who waits for this run and answers, and ourselves; no more than the run asked
        for, those that started first. A record may outlive its peer by a minute, and anybody may write one."""
        me, run = self._around.endpoint.peer, self._around.manifest.run
        records = await self._directory.lookup(PeerRecord)
        waiting = {p: r for p, r in records.items() if r.status == "waiting" and r.role != "bootstrap" and p != me}
        answers = await asyncio.gather(*(self._answers(peer, record) for peer, record in waiting.items()))
        alive = [item for item, answered in zip(waiting.items(), answers, strict=True) if answered]
        alive.sort(key=lambda item: (item[1].incarnation, item[0]))
        hosts = [item for item in alive if item[1].role == "stage"][: run.start_when.stage_hosts]
        trainers = [item for item in alive if item[1].role == "trainer"][: run.start_when.trainers]
        return [
            Candidate(peer=peer, role=r.role, name=r.name, stage=r.stage, addresses=r.addresses)
            for peer, r in [(me, self._own_record()), *hosts, *trainers]
        ]

    async def _answers(self, peer: PeerId, record: PeerRecord) -> bool:
        self._around.endpoint.learn(peer, record.addresses)
        try:
            await self._around.endpoint.call(peer, "health/1/ping", Ping(), Empty, timeout_s=PING_TIMEOUT_S)
        except PeerError:
            return False
        return True

    def _initial_snapshots(self) -> list[Snapshot]:
        manifest = self._around.manifest
        weights = initial_weights(manifest.model, manifest.run.seed)
        return [
            initial_snapshot(spec.name, layout, {name: weights[name] for name in layout.names})
            for spec in split_model(manifest.model, manifest.split)
            for layout in [FlatLayout.of(build_part(spec, manifest.model))]
        ]

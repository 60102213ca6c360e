"""Peers that keep copies of parts they do not train, in whole swarms under a virtual clock: what they hold is the state
that was decided, at once, no matter who dies or lies; and it can be had from them."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.copies import copy_holders
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Member, Roster
from swarm.events import CopyDropped, CopyHeld, Event, StepClosed
from swarm.ids import ENDS, PartName, PeerId
from swarm.membership.copying import Copying
from swarm.membership.observer import Observer, ObserverContext
from swarm.membership.observer_service import ObserverService
from swarm.membership.part_copy import PartCopy
from swarm.membership.rules import spec_of, update_of
from swarm.network.protocols import Payload
from swarm.optim.part import PartState, TrainedPart
from swarm.security.signing import PrivateIdentity, verify
from swarm.sim.device import InlineDevice
from swarm.sim.links import Links
from swarm.sim.loop import PEER, LoopClock, as_peer, run_world
from swarm.sim.network import SimEndpoint
from swarm.state.download import Download, DownloadContext, IntoMemory, PeerChunks, Wanted
from swarm.state.snapshot import digest
from tests.harness.expect import eventually
from tests.swarms.story import run_beside

LATENCY_S = 0.02
LONG_S = 300.0
COPIES = 2


def copying_swarm(root: Path, *, steps: int = 6, **shape: Any) -> SimSwarm:
    """Two replicas of each of two stages and of the ends, and a bootstrap; a step takes about two seconds."""
    return SimSwarm(
        root,
        **{"hosts": 4, "trainers": 2} | shape,
        run={"steps": steps, "copies": COPIES},
        links=Links.parse({"default": {"latency_ms": 1000 * LATENCY_S}}),
        stage_s={"forward": 0.1, "backward": 0.2},
    )


@dataclass(frozen=True)
class Arrival:
    """A copy came to a record's state."""

    peer: str
    part: PartName
    record: CloseRecord
    digest: str
    at_s: float


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    """Every state that any copy had, as it was."""
    seen: list[Arrival] = []
    observe = PartCopy._observe

    async def note(copy: PartCopy, decision: Decision) -> None:
        await observe(copy, decision)
        assert copy.state is not None
        found = digest(copy.state.snapshot())
        seen.append(Arrival(PEER.get(), copy.part, decision.record, found, asyncio.get_running_loop().time()))

    monkeypatch.setattr(PartCopy, "_observe", note)
    return seen


def closings(swarm: SimSwarm) -> dict[tuple[str, int], float]:
    """(peer, step) -> when it closed there; filled while the swarm runs."""
    times: dict[tuple[str, int], float] = {}

    def attach(name: str) -> None:
        def listen(event: Event) -> None:
            if isinstance(event, StepClosed):
                times[name, event.step] = asyncio.get_running_loop().time()

        swarm.peers[name].events.listeners.append(listen)

    swarm.on_added.append(attach)
    return times


def roster_of(swarm: SimSwarm) -> Roster:
    membership = swarm.peers["bootstrap"].membership
    assert membership is not None
    return membership.roster


def copying_of(swarm: SimSwarm, name: str) -> Copying:
    membership = swarm.peers[name].membership
    assert membership is not None
    return membership._chain.copying


def name_of(swarm: SimSwarm, peer: PeerId) -> str:
    return next(name for name, one in swarm.peers.items() if one.endpoint.peer == peer)


def holders_of(swarm: SimSwarm, part: PartName) -> list[str]:
    return [name_of(swarm, peer) for peer in copy_holders(roster_of(swarm), part, COPIES)]


async def closed(swarm: SimSwarm, step: int) -> CloseRecord:
    """The record with which the bootstrap closed this step, or the newest after it."""
    membership = swarm.peers["bootstrap"].membership

    def head() -> CloseRecord | None:
        found = None if membership is None else membership._run.position.head
        return found if found is not None and found.step >= step else None

    await eventually(lambda: swarm.peers["bootstrap"].membership is not None, deadline_s=LONG_S)
    membership = swarm.peers["bootstrap"].membership
    return await eventually(head, deadline_s=LONG_S) or pytest.fail("no record")


def test_copies_are_at_each_step_s_state_as_soon_as_it_is_decided(tmp_path: Path, arrivals: list[Arrival]) -> None:
    swarm = copying_swarm(tmp_path)
    times = closings(swarm)
    run_world(swarm.run())
    held = {(one.peer, one.part) for one in arrivals}
    ends = {peer for peer, part in held if part == ENDS}
    assert len(held) == COPIES * 2 + 1 == len(swarm.events(CopyHeld)), "of both stages, and one of the ends"
    assert ends == {"bootstrap"}, "none at a stage host, who could read what trainers send"
    assert all(roster_of(swarm)[swarm.peers[peer].endpoint.peer].part != part for peer, part in held)
    assert all(one.digest == one.record.digests[one.part] for one in arrivals)
    reached = {(one.peer, one.part, one.record.step): one.at_s for one in arrivals}
    lags = [reached[peer, part, step] - times[peer, step] for peer, part in held for step in range(1, 6)]
    assert max(lags) < 4 * LATENCY_S, f"{max(lags):.3f} s after the step was closed"
    assert min(times["bootstrap", step + 1] - times["bootstrap", step] for step in range(1, 6)) > 10 * LATENCY_S
    assert not swarm.events(CopyDropped)


def test_run_without_copies_keeps_none(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path)
    run_world(swarm.run())
    assert not swarm.events(CopyHeld)


@pytest.mark.parametrize("decided_too", [True, False])
def test_copy_does_not_take_a_hostile_update_and_follows_another_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrivals: list[Arrival], *, decided_too: bool
) -> None:
    """``decided_too``: the liar lies about what was decided, not about what is ahead only."""
    swarm = copying_swarm(tmp_path)
    lies: list[tuple[str, str]] = []
    update, averaged = ObserverService._update, ObserverService._wait_averaged

    def lies_now(step: int, of: str) -> bool:
        if step < 3 or (lies and lies[0][0] != PEER.get()):
            return False
        lies.append((PEER.get(), of))
        return True

    async def lie_ahead(service: ObserverService, part: PartName, step: int) -> torch.Tensor | None:
        true = await averaged(service, part, step)
        return torch.ones_like(true) if true is not None and lies_now(step, "ahead") else true

    async def lie(service: ObserverService, caller: PeerId, part: PartName, step: int) -> Payload:
        true = await update(service, caller, part, step)
        return bytes(len(true)) if decided_too and lies_now(step, "decided") else true

    monkeypatch.setattr(ObserverService, "_wait_averaged", lie_ahead)
    monkeypatch.setattr(ObserverService, "_update", lie)
    run_world(swarm.run())
    assert {of for _, of in lies} == ({"ahead", "decided"} if decided_too else {"ahead"}), "the fault did not fire"
    assert all(one.digest == one.record.digests[one.part] for one in arrivals)
    newest = {(one.peer, one.part): one.record.step for one in arrivals}
    assert set(newest.values()) <= {5, 6}, "all went on, from the others"
    assert not swarm.events(CopyDropped)


def test_copies_move_when_the_roster_changes_and_free_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = copying_swarm(tmp_path, steps=1000)
    states: dict[tuple[str, str], weakref.ref[PartState]] = {}
    install = PartState.install

    def note(state: PartState, snapshot: Any) -> None:
        install(state, snapshot)
        if not isinstance(state, TrainedPart):
            states[PEER.get(), state.spec.name] = weakref.ref(state)

    monkeypatch.setattr(PartState, "install", note)

    async def story() -> None:
        await closed(swarm, 2)
        before = {part: set(holders_of(swarm, part)) for part in roster_of(swarm).parts}
        number, part, loser = _newcomer(swarm)
        assert states[loser, part]() is not None
        await swarm.join("late", "stage", number, stage=0)
        await eventually(lambda: swarm.peers["late"].events.of(CopyHeld), deadline_s=LONG_S)
        await eventually(lambda: swarm.peers[loser].events.of(CopyDropped), deadline_s=LONG_S)
        gc.collect()
        assert states[loser, part]() is None, "its memory is not free"
        assert loser in before[part]
        assert part not in copying_of(swarm, loser).copies.parts
        assert await copying_of(swarm, loser).copies.snapshot(part) is None
        await eventually(lambda: all(_keeps_its_copies(swarm, name) for name in swarm.peers), deadline_s=LONG_S)

    run_beside(swarm, story)


def _keeps_its_copies(swarm: SimSwarm, name: str) -> bool:
    wanted = {part for part in roster_of(swarm).parts if name in holders_of(swarm, part)}
    return set(copying_of(swarm, name).copies.parts) == wanted


def _newcomer(swarm: SimSwarm) -> tuple[int, PartName, str]:
    """(number of a new replica of stage 0 that takes a copy off somebody, the copy's part, that peer's name)."""
    roster = roster_of(swarm)
    for number in range(300, 400):
        peer = PrivateIdentity(hashlib.sha256(str(number).encode()).digest()).peer
        after = Roster([*roster.members, Member(peer=peer, role="stage", name="late", part="stage-0", addresses=())])
        for part in roster.parts:
            before, now = (set(copy_holders(one, part, COPIES)) for one in (roster, after))
            if peer in now and before - now:
                return number, part, name_of(swarm, (before - now).pop())
    raise AssertionError("nobody would take a copy off anybody")


def test_copy_that_is_taken_is_the_part_at_the_newest_step_when_its_replicas_are_all_dead(tmp_path: Path) -> None:
    swarm = copying_swarm(tmp_path, steps=1000, may_fail=True)
    part = PartName("stage-1")

    async def story() -> None:
        await closed(swarm, 3)
        roster = roster_of(swarm)
        await eventually(lambda: copying_of(swarm, holders_of(swarm, part)[0]).copies.held(part, 3), deadline_s=LONG_S)
        for peer in roster.replicas(part):
            swarm.kill(name_of(swarm, peer))
        await asyncio.sleep(3.0)
        record = await closed(swarm, 3)
        for name in holders_of(swarm, part):
            copying = copying_of(swarm, name)
            assert copying.copies.held(part, record.step) is not None
            assert (
                copying.copies.held(part, record.step - 1)
                is None
                is copying.copies.held(PartName("stage-9"), record.step)
            )
            copying._changed.set()  # as with the record that has it taken
            taken = await asyncio.get_running_loop().create_task(copying.take(part, record.step), context=as_peer(name))
            assert taken is not None
            assert (taken.step, digest(taken)) == (record.step, record.digests[part])
            assert copying.copies.held(part, record.step) is None is await copying.copies.snapshot(part)
            assert part not in copying._kept, "it was begun anew while it was taken"
            assert swarm.peers[name].events.of(CopyDropped)[-1].part == part

    run_beside(swarm, story)


def test_copy_that_is_not_at_the_step_is_not_given(tmp_path: Path, arrivals: list[Arrival]) -> None:
    swarm = copying_swarm(tmp_path, steps=1000)
    part = PartName("stage-1")

    async def story() -> None:
        await closed(swarm, 2)
        copying = copying_of(swarm, holders_of(swarm, part)[0])
        before = await eventually(lambda: copying.copies.held(part, 2), deadline_s=LONG_S)
        assert await copying.take(part, 1) is None
        assert await copying.take(PartName("stage-9"), 2) is None
        step = (await closed(swarm, 4)).step
        assert await eventually(lambda: copying.copies.held(part, step), deadline_s=LONG_S) is before, (
            "it went on as a copy"
        )

    run_beside(swarm, story)


def test_holder_serves_who_joins_as_a_replica_would(tmp_path: Path) -> None:
    swarm = copying_swarm(tmp_path, steps=1000)
    part = PartName("stage-1")

    async def story() -> None:
        record = await closed(swarm, 2)
        (holder, _) = copy_holders(record.members, part, COPIES)
        me = swarm.network.endpoint("joiner")
        await me.enter(swarm.manifest.run_id)
        await _follow_through(swarm, me, holder, part)

    run_beside(swarm, story)


async def _follow_through(swarm: SimSwarm, me: SimEndpoint, holder: PeerId, part: PartName) -> None:
    """Download a part from its holder and take three steps with its help."""

    async def observe(decision: Decision) -> None:
        pass

    context = ObserverContext(
        run=swarm.manifest.run_id, endpoint=me, device=InlineDevice(swarm.devices["host-0"].torch_device),
        verify=verify, observe=observe,
    )  # fmt: skip
    manifest = swarm.manifest
    mine = PartState.of(spec_of(manifest, part), manifest.model, update_of(manifest))
    observer = Observer(context, [holder], part)
    decision = await observer.start(swarm.peers["bootstrap"].endpoint.peer)
    record = decision.record
    wanted = Wanted(part=part, step=record.step, digest=record.digests[part], layout=mine.layout)
    fetching = DownloadContext(donor=partial(PeerChunks, me), clock=LoopClock())
    mine.install(await Download(fetching, wanted, IntoMemory(wanted)).fetch([holder]))
    await observer.begin(decision, mine)
    for _ in range(3):
        record = await observer.follow()
        assert digest(mine.snapshot()) == record.digests[part]
    await observer.close()

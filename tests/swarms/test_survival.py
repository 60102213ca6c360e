"""A run goes on, exactly, whoever of its members dies and whatever they were doing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from swarm.consensus.roster import owner
from swarm.events import Accumulated, Committed, CutOff, Event, PeerLost, PeerReady, RoundDone, StepClosed, TermBegan
from swarm.ids import PeerId
from tests.harness.swarm import LocalPeer, LocalSwarm

EventT = TypeVar("EventT", bound=Event)
STEPS = 6
LONG_S = 300.0


def once(peer: LocalPeer, kind: type[EventT], when: Callable[[EventT], bool], do: Callable[[], Any]) -> list[EventT]:
    """Do it right inside the first such event of a peer; the list says whether it fired."""
    fired: list[EventT] = []

    def listen(event: Event) -> None:
        if isinstance(event, kind) and not fired and when(event):
            fired.append(event)
            do()

    peer.events.listeners.append(listen)
    return fired


def records(swarm: LocalSwarm, name: str) -> list[dict[str, Any]]:
    """A peer's chain."""
    return swarm.history(name)


def check_exactly_once(swarm: LocalSwarm, survivors: list[str], *, steps: int = STEPS) -> list[dict[str, Any]]:
    """Every survivor has the same chain to the last step, each microbatch is committed once, and none is left out."""
    chains = {name: {record["step"]: record for record in records(swarm, name)} for name in survivors}
    reference = next(chain for chain in chains.values() if len(chain) == steps + 1)
    for chain in chains.values():
        assert all(record == reference[step] for step, record in chain.items())
        assert max(chain) == steps
    counted = [tuple(one["microbatch"]) for step in range(1, steps + 1) for one in reference[step]["committed"]]
    assert len(counted) == len(set(counted)) == steps * swarm.manifest.batch.microbatches_per_step
    for trainer in {microbatch[0] for microbatch in counted}:
        places = sorted((m[2], m[3]) for m in counted if m[0] == trainer)
        epochs = {epoch for epoch, _ in places}
        for epoch in epochs:
            positions = [position for e, position in places if e == epoch]
            assert positions == list(range(positions[0], positions[-1] + 1)), "a microbatch was left out"
    for step in range(1, steps + 1):
        assert len({e.record for e in swarm.events(StepClosed) if e.step == step}) <= 1
    return [reference[step] for step in range(steps + 1)]


def finished(swarm: LocalSwarm, survivors: list[str]) -> None:
    """Everybody else saw the run to its end."""
    for name in survivors:
        assert swarm.peers[name].outcome == "every step of the run is closed", (name, swarm.peers[name].outcome)


async def test_bootstrap_that_dies_is_not_missed(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    await swarm.open()
    fired = once(swarm.peers["host-0"], StepClosed, lambda e: e.step == 2, lambda: swarm.kill("bootstrap"))
    await swarm.run(timeout_s=LONG_S)
    survivors = [name for name in swarm.peers if name != "bootstrap"]
    assert fired
    finished(swarm, survivors)
    chain = check_exactly_once(swarm, survivors)
    dead = swarm.peers["bootstrap"].endpoint.peer
    assert [record["absent"] for record in chain].count([dead]) == 1
    assert {event.peer for event in swarm.events(PeerLost)} == {dead}


def leader_of(swarm: LocalSwarm, step: int) -> str:
    """Who leads a step in its first term, in the roster with which the run begins."""
    roster = swarm.peers["host-0"].membership.roster  # type: ignore[union-attr]
    peer = owner(roster, step, 0)
    return next(name for name, one in swarm.peers.items() if one.endpoint.peer == peer)


@pytest.mark.parametrize("moment", ["feeding", "averaging", "decided"])
async def test_leader_that_dies_is_succeeded(tmp_path: Path, moment: str) -> None:
    """It leads a step while another of its kind is there to take over what it held."""
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    await swarm.open()
    killed: list[str] = []

    def strike() -> None:
        step = swarm.peers["host-0"].membership._run.position.open_step  # type: ignore[union-attr]
        victim = leader_of(swarm, step)
        if not killed and step >= 2:
            killed.append(victim)
            swarm.kill(victim)

    kinds: dict[str, type[Event]] = {"feeding": Accumulated, "averaging": RoundDone, "decided": Committed}
    for peer in swarm.peers.values():
        peer.events.listeners.append(lambda event: strike() if isinstance(event, kinds[moment]) else None)
    await swarm.run(timeout_s=LONG_S)
    assert killed, "nobody was killed"
    survivors = [name for name in swarm.peers if name not in killed]
    finished(swarm, survivors)
    check_exactly_once(swarm, survivors)
    if moment != "decided":
        assert swarm.events(TermBegan)


@pytest.mark.parametrize("moment", ["accumulated", "averaged"])
async def test_stage_host_that_dies_costs_nothing(tmp_path: Path, moment: str) -> None:
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    await swarm.open()
    kind: type[Event] = Accumulated if moment == "accumulated" else RoundDone
    peer = swarm.peers["host-1"]
    fired = once(peer, kind, lambda event: event.step >= 2, lambda: swarm.kill("host-1"))  # type: ignore[attr-defined]
    await swarm.run(timeout_s=LONG_S)
    survivors = [name for name in swarm.peers if name != "host-1"]
    assert fired
    finished(swarm, survivors)
    check_exactly_once(swarm, survivors)


@pytest.mark.parametrize("moment", ["accumulated", "averaged"])
async def test_trainer_that_dies_takes_its_work_back(tmp_path: Path, moment: str) -> None:
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    await swarm.open()
    victim = swarm.peers["trainer-0"]
    watcher, kind = (swarm.peers["host-0"], Accumulated) if moment == "accumulated" else (victim, RoundDone)

    def when(event: Any) -> bool:
        mine = moment == "averaged" or event.microbatch.trainer == victim.endpoint.peer
        return event.step >= 2 and mine

    fired = once(watcher, kind, when, lambda: swarm.kill("trainer-0"))
    await swarm.run(timeout_s=LONG_S)
    survivors = [name for name in swarm.peers if name != "trainer-0"]
    assert fired
    finished(swarm, survivors)
    check_exactly_once(swarm, survivors)


async def test_reproducible_run_ends_with_the_same_weights_whichever_hosts_die(tmp_path: Path) -> None:
    ends = {}
    for name, victims in {"whole": (), "struck": ("host-1", "host-4")}.items():
        root = tmp_path / name
        root.mkdir()
        swarm = LocalSwarm(root, hosts=6, trainers=2, run={"steps": STEPS, "reproducible": True})
        await swarm.open()
        fired = [
            once(swarm.peers[victim], Accumulated, lambda e, s=2 + i: e.step >= s, partial(swarm.kill, victim))
            for i, victim in enumerate(victims)
        ]
        await swarm.run(timeout_s=LONG_S)
        assert all(fired)
        ends[name] = check_exactly_once(swarm, [n for n in swarm.peers if n not in victims])[-1]["digests"]
    assert ends["whole"] == ends["struck"]


async def test_peer_without_which_the_run_went_on_comes_back(tmp_path: Path) -> None:
    """It is cut off from all others for some steps, and is let in again."""
    swarm = LocalSwarm(tmp_path, hosts=4, trainers=2, run={"steps": 40})
    await swarm.open()
    victim = swarm.peers["host-1"]
    lost: PeerId = victim.endpoint.peer
    others = [peer.endpoint.peer for peer in swarm.peers.values() if peer is not victim]

    def isolate() -> None:
        for other in others:
            swarm.network.cut(lost, other)
            swarm.network.cut(other, lost)

    cut = once(swarm.peers["host-0"], StepClosed, lambda e: e.step == 2, isolate)
    healed = once(swarm.peers["host-0"], StepClosed, lambda e: e.step == 5, swarm.network.heal)
    await swarm.run(timeout_s=LONG_S)
    assert cut
    assert healed
    assert victim.events.of(CutOff)
    assert len(victim.events.of(PeerReady)) == 2
    finished(swarm, list(swarm.peers))
    check_exactly_once(swarm, list(swarm.peers), steps=40)
    assert Counter(event.peer for event in swarm.events(PeerLost))[lost] > 0


async def test_kills_one_after_the_other_are_survived(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path, hosts=6, trainers=3, run={"steps": 10})
    await swarm.open()
    victims = ["bootstrap", "host-1", "trainer-2", "host-4"]
    fired = [
        once(swarm.peers["host-0"], StepClosed, lambda e, s=2 * i + 1: e.step == s, lambda v=victim: swarm.kill(v))
        for i, victim in enumerate(victims)
    ]
    await swarm.run(timeout_s=LONG_S)
    assert all(fired)
    survivors = [name for name in swarm.peers if name not in victims]
    finished(swarm, survivors)
    check_exactly_once(swarm, survivors, steps=10)

"""Runs that not everybody may join: the same weights, no place for strangers, and no centre."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.simulate.local_swarm import _identity, founder_id
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending, PeerError, RunEnded, Unadmitted
from swarm.events import Event, PeerReady, StepClosed
from swarm.ids import PeerId
from swarm.membership.announcer import RECORD_TTL_S
from swarm.network.discovery.records import PeerRecord
from swarm.security.credentials import Credential, Order
from swarm.sim.loop import run_world
from swarm.step.observe_messages import STANDING, StandingRequest
from tests.harness.expect import eventually
from tests.harness.swarm import LocalSwarm

DONE = "every step of the run is closed"


class Admitted(SimSwarm):
    """A swarm whose founder admits its peers; those in ``shown`` show something else."""

    shown: dict[str, Credential | None] = {}

    def credential_of(self, name: str, role: Any, peer: PeerId) -> Credential | None:
        return self.shown[name] if name in self.shown else super().credential_of(name, role, peer)


class InRealTime(LocalSwarm):
    """The same in real time."""

    shown: dict[str, Credential | None] = {}

    def credential_of(self, name: str, role: Any, peer: PeerId) -> Credential | None:
        return self.shown[name] if name in self.shown else super().credential_of(name, role, peer)


def admitted(mode: str) -> dict[str, Any]:
    return {} if mode == "open" else {"admission": {"mode": mode, "issuers": (str(founder_id()),)}}


def when(swarm: SimSwarm, name: str, step: int, do: Callable[[], object]) -> list[int]:
    """Have something done when a peer has closed a step; the step, once it was."""
    done: list[int] = []

    def hear(event: Event) -> None:
        if isinstance(event, StepClosed) and event.step == step and not done:
            done.append(step)
            do()

    swarm.peers[name].events.listeners.append(hear)
    return done


def order(swarm: SimSwarm, name: str, *numbers: int) -> Order:
    """To revoke a peer, signed by those of these numbers."""
    run = swarm.manifest.run_id
    grant = swarm.credential_of(name, "stage", swarm.peers[name].endpoint.peer)
    assert grant is not None
    made = Order(verb="revoke", run=run, name=name, serial=grant.grant.serial, until_step=grant.grant.until_step)
    for number in numbers:
        made = made.with_signature(_identity(number))
    return made


def give(swarm: SimSwarm, at: str, said: Order) -> None:
    admission = swarm.peers[at].around.admission
    assert admission is not None
    admission.give(said)


def test_weights_are_those_of_an_open_run_to_the_bit(tmp_path: Path) -> None:
    found = {}
    for mode in ("open", "token", "organisation"):
        root = tmp_path / mode
        root.mkdir()
        swarm = Admitted(root, hosts=3, trainers=2, run={"steps": 4, "reproducible": True}, **admitted(mode))
        run_world(swarm.run(timeout_s=300))
        assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
        found[mode] = swarm.history()[-1]["digests"]
        assert ("admissions" in swarm.history()[-1]) == (mode != "open")
    assert found["token"] == found["organisation"] == found["open"]


@pytest.mark.promise("strangers read nothing")
def test_sybils_take_no_founding_place_and_are_told_nothing(tmp_path: Path) -> None:
    swarm = Admitted(tmp_path, hosts=2, trainers=1, run={"steps": 12}, **admitted("token"))

    refused: list[PeerId] = []

    async def ask(sybil: Any) -> None:
        with pytest.raises(Unadmitted):
            await sybil.call(founder_id(), STANDING, StandingRequest(), timeout_s=5)
        refused.append(sybil.peer)

    async def story() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            for number in range(900, 905):
                sybil = swarm.network.endpoint(_identity(number).peer)
                await sybil.enter(swarm.manifest.run_id)
                record = PeerRecord(
                    role="stage", name=f"s{number}", addresses=sybil.addresses, incarnation=1, status="waiting", step=0
                )
                await sybil.directory.announce(record, ttl_s=RECORD_TTL_S)
                when(swarm, "bootstrap", 1, lambda sybil=sybil: group.create_task(ask(sybil)))  # type: ignore[misc]
            await swarm.run(timeout_s=300)

    run_world(story())
    assert len(refused) == 5
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    assert {one["peer"] for one in swarm.history()[0]["roster"]} == {p.endpoint.peer for p in swarm.peers.values()}


async def test_newcomer_with_a_grant_joins_and_those_with_anothers_or_none_do_not(tmp_path: Path) -> None:
    swarm = InRealTime(tmp_path, hosts=2, trainers=1, run={"steps": 60}, **admitted("token"))

    async def story() -> None:
        await eventually(lambda: bool(swarm.peers and swarm.peers["bootstrap"].events.of(StepClosed)))
        copied = swarm.credential_of("host-0", "stage", swarm.peers["host-0"].endpoint.peer)
        swarm.shown = {"none": None, "copied": copied}
        late = await swarm.join("late", "stage", 300)
        await swarm.join("none", "stage", 301, may_fail=True)
        await swarm.join("copied", "stage", 302, may_fail=True)
        await eventually(lambda: bool(late.events.of(PeerReady)))

    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run(timeout_s=100))
        group.create_task(story())
    assert swarm.peers["late"].outcome == DONE
    for name in ("none", "copied"):
        assert isinstance(swarm.peers[name].outcome, BaseException), name
        assert not swarm.peers[name].events.of(PeerReady)
    names = {one["name"] for record in swarm.history() for one in record["roster"]}
    assert names == {"bootstrap", "host-0", "host-1", "trainer-0", "late"}


def test_revoked_member_is_out_with_the_next_record_and_hears_why(tmp_path: Path) -> None:
    swarm = Admitted(tmp_path, hosts=4, trainers=1, run={"steps": 12}, **admitted("token"))

    async def story() -> None:
        await opened(swarm, may_fail="host-3")
        revoked = when(swarm, "bootstrap", 2, lambda: give(swarm, "bootstrap", order(swarm, "host-3", 0)))
        await swarm.run(timeout_s=600)
        assert revoked == [2]

    run_world(story())
    history = {record["step"]: record for record in swarm.history()}
    gone = swarm.peers["host-3"].endpoint.peer
    assert [step for step in history if gone in {one["peer"] for one in history[step]["roster"]}] == [0, 1, 2]
    assert [one["name"] for one in history[3]["admissions"]["revoked"]] == ["host-3"]
    told = swarm.peers["host-3"].outcome
    assert isinstance(told, BaseException)
    assert "was revoked" in _leaf(told)


def test_run_without_its_issuer_goes_on_and_its_voters_revoke(tmp_path: Path) -> None:
    swarm = Admitted(tmp_path, hosts=4, trainers=1, run={"steps": 24}, **admitted("token"))

    def leave() -> None:
        founder = swarm.peers["bootstrap"].membership
        assert founder is not None
        founder.leave("the test", Ending.DONE)

    def vote() -> None:
        for number, name in ((100, "host-0"), (101, "host-1"), (102, "host-2")):
            give(swarm, name, order(swarm, "host-3", number))

    async def story() -> None:
        await opened(swarm, may_fail="host-3")
        done = when(swarm, "host-0", 2, leave), when(swarm, "host-0", 10, vote)
        await swarm.run(timeout_s=600)
        assert done == ([2], [10])

    run_world(story())
    history = {record["step"]: record for record in swarm.history("host-0")}
    with_founder = [step for step in history if "bootstrap" in {one["name"] for one in history[step]["roster"]}]
    assert max(with_founder) <= 5
    assert max(history) - max(with_founder) >= 14
    assert {one["name"] for one in history[24]["roster"]} == {"host-0", "host-1", "host-2", "trainer-0"}
    assert [one["name"] for one in history[24]["admissions"]["revoked"]] == ["host-3"]


async def opened(swarm: SimSwarm, may_fail: str) -> None:
    """Open a swarm in which one peer's end is no failure."""
    await swarm.open()
    start = swarm._start

    def starting(peer: Any, *, may_fail: bool = False) -> None:
        start(peer, may_fail=may_fail or peer.settings.name == name)

    name, swarm._start = may_fail, starting  # type: ignore[method-assign]


def _leaf(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        ended = error.subgroup(RunEnded) or error.subgroup(PeerError) or error
        error = ended.exceptions[0]
    return str(error)

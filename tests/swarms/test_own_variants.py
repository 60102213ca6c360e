"""An expert that an organisation keeps to itself: its peers alone hold it, and while none is there the others train
on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.invariants.check import check_run
from peers.commands.history import read
from peers.commands.history_source import HistorySource
from peers.simulate.local_swarm import founder_id
from peers.simulate.sim_swarm import SimSwarm
from swarm.errors import Ending, Refused, RunEnded
from swarm.events import CheckpointWritten, CopyHeld, PartAssigned, StateDownloaded, StepClosed, StepGivenUp, Waiting
from swarm.ids import stage_part
from swarm.network.protocols import Rpc
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.state.checkpoints.checkpoint_service import DESCRIBE_FILE
from swarm.state.transfer import DESCRIBE, DescribeRequest
from swarm.step.calls import first_leaf
from swarm.step.observe_messages import AHEAD, NEXT, START, STAY, AheadRequest, NextRequest, StartRequest, StayRequest
from tests.harness.expect import eventually
from tests.swarms.story import DONE
from tests.swarms.test_rescue import holders

STEPS, CODE = 12, stage_part(1, 1, 2)
HOST, TRAINER = "host-4", "trainer-1"
"""Those of acme, whose domain code is."""


class Owned(SimSwarm):
    """Five hosts and two trainers, of whom acme has one each. Each keeps what it has in a directory of its own."""

    def __init__(self, root: Path, *, steps: int = STEPS, ends: str = "private") -> None:
        names = ("bootstrap", *(f"host-{number}" for number in range(5)), "trainer-0", "trainer-1")
        sites: dict[str, dict[str, Any]] = {
            name: {"run_directory": root / f"kept-{name}", "checkpoint_every": 2} for name in names
        }
        sites["trainer-0"]["domain"], sites["trainer-1"]["domain"] = "law", "code"
        sites["again"] = sites[HOST]
        super().__init__(
            root,
            hosts=5,
            trainers=2,
            sites=sites,
            split={
                "stages": 2,
                "ends": ends,
                "variants": (1, 2),
                "route_by": "domain",
                "domains": ("law", "code"),
                "own": {"code": "acme"},
            },
            admission={"mode": "token", "issuers": (str(founder_id()),)},
            run={"steps": steps, "copies": 2},
            model={"layers": 2, "dim": 16, "context": 8},
            batch={"microbatch_size": 1, "microbatches_per_step": 4},
            rebalance={"mode": "auto"},
            stage_s=dict.fromkeys(("forward", "forward_loss", "backward"), 0.1),
            links=Links.parse({"default": {"latency_ms": 20}}),
        )

    def organisation_of(self, name: str) -> str:
        return "acme" if name in (HOST, TRAINER, "again") else "st-mary"

    async def closed(self, step: int) -> None:
        """Until a step is closed."""
        await eventually(
            lambda: any(event.step >= step for event in self.peers["host-0"].events.of(StepClosed)), deadline_s=600.0
        )

    def choices(self) -> dict[int, set[int]]:
        """By step, those of the microbatches that count."""
        return {one["step"]: {c.get("choice", 0) for c in one["committed"]} for one in self.history()}


def play(swarm: Owned, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def both() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run(timeout_s=3000.0))
            group.create_task(story())

    run_world(both())


def check(swarm: Owned, *but: str) -> None:
    assert {name: peer.outcome for name, peer in swarm.peers.items() if name not in but} == dict.fromkeys(
        swarm.peers.keys() - set(but), DONE
    )
    kept = {name: list((swarm.root / f"kept-{name}").rglob(f"{CODE}*")) for name in swarm.peers if name != "again"}
    assert {name for name, files in kept.items() if files} == {HOST}
    assert CODE not in {event.part for event in swarm.events(CopyHeld)}
    check_run([swarm.root]).assert_sound()


@pytest.mark.parametrize("ends", ["private", "hosted"])
def test_death_of_an_owners_last_host_pauses_its_expert_alone_until_it_is_started_again(
    tmp_path: Path, ends: str
) -> None:
    swarm = Owned(tmp_path, ends=ends)

    async def story() -> None:
        await swarm.closed(3)
        swarm.kill(HOST)
        await swarm.closed(6)
        await swarm.join("again", "stage", 104, **({"stage": 1} if ends == "private" else {"domain": "code"}))

    play(swarm, story)
    check(swarm, HOST)
    (void,) = {(event.step, event.lost) for event in swarm.events(StepGivenUp)}
    assert void[1] == (CODE,)
    away = [one for one in swarm.history() if one["step"] >= void[0] and not holders(swarm, CODE, one["step"])]
    assert len({one["digests"][CODE] for one in away}) == 1, "it stays as it was"
    assert len({one["digests"][stage_part(1, 0, 2)] for one in away}) == len(away), "the other one trains on"
    choices = swarm.choices()
    assert {choice for one in away[1:] for choice in choices[one["step"]]} == {0}
    waits = {event.what for event in swarm.peers[TRAINER].events.of(Waiting)}
    assert any(
        f"a host of {CODE}, which acme keeps to itself" in what and "next: acme starts one" in what for what in waits
    )
    (revived,) = [one for one in swarm.peers["again"].events.of(StateDownloaded) if one.part == CODE]
    assert (revived.bytes_received, revived.donors) == (0, (swarm.peers["again"].endpoint.peer,))
    assert holders(swarm, CODE) == ["again"]
    assert 1 in choices[STEPS], "its trainer feeds again"


def test_owners_host_comes_back_while_nobody_else_feeds(tmp_path: Path) -> None:
    swarm = Owned(tmp_path)

    async def story() -> None:
        await swarm.closed(3)
        swarm.kill("trainer-0")
        await swarm.closed(5)
        swarm.kill(HOST)
        waits = swarm.peers["host-0"].events
        await eventually(lambda: any(f"a host of {CODE}" in one.what for one in waits.of(Waiting)), deadline_s=600.0)
        await swarm.join("again", "stage", 104, stage=1)

    play(swarm, story)
    check(swarm, HOST, "trainer-0")
    (void,) = {event.step for event in swarm.events(StepGivenUp)}
    assert holders(swarm, CODE, void) == ["again"], "with the step that its loss gave up"
    assert swarm.choices()[STEPS] == {1}


def test_owners_last_host_may_leave_and_no_step_is_lost_by_that(tmp_path: Path) -> None:
    swarm = Owned(tmp_path)

    async def story() -> None:
        await swarm.closed(3)
        membership = swarm.peers[HOST].membership
        assert membership is not None
        membership.leave("SIGTERM", Ending.DRAINED)

    play(swarm, story)
    check(swarm, HOST)
    assert not swarm.events(StepGivenUp)
    assert holders(swarm, CODE) == []
    assert swarm.choices()[STEPS] == {0}
    newest = read(HistorySource(tmp_path / "bootstrap" / "history.jsonl"), last=1, verify=False).rows[-1]
    assert [(one.part, one.hosts > 0, one.passed > 0) for one in newest.variants] == [
        (stage_part(1, 0, 2), True, True),
        (CODE, False, False),
    ]
    left = min(one["step"] for one in swarm.history() if one["step"] > 2 and not holders(swarm, CODE, one["step"]))
    kept = swarm.root / f"kept-{HOST}"
    assert max(path.parent.name for path in kept.rglob(f"{CODE}.safetensors")) == f"step-{left:08d}", "its last state"


QUESTIONS: tuple[tuple[Rpc[Any, Any], Any], ...] = (
    (START, StartRequest(part=CODE)),
    (NEXT, NextRequest(part=CODE, step=3)),
    (AHEAD, AheadRequest(part=CODE, step=3)),
    (STAY, StayRequest(part=CODE, had=2)),
    (DESCRIBE, DescribeRequest(part=CODE, step=2, digest="0" * 64)),
    (DESCRIBE_FILE, DescribeRequest(part=CODE, step=2, digest="0" * 64)),
)


def test_nobody_else_is_given_it_or_let_feed_it_whatever_it_asks(tmp_path: Path) -> None:
    swarm, said, feeding = Owned(tmp_path, steps=6), dict[tuple[str, str], str](), list[str]()

    async def story() -> None:
        await swarm.closed(2)
        owner = swarm.peers[HOST].endpoint.peer
        for name in ("host-0", "trainer-0", "bootstrap"):
            for rpc, body in QUESTIONS:
                try:
                    await swarm.peers[name].endpoint.call(owner, rpc, body, timeout_s=5.0)
                except Refused as refused:
                    said[name, rpc.name] = refused.reason
        await swarm.join("stranger", "stage", 500, stage=1)
        await swarm.join("thief", "stage", 502, domain="code", may_fail=True)
        sought = await swarm.join("spy", "trainer", 501, data=swarm.shards[0], domain="code", may_fail=True)
        await swarm.closed(4)
        feeding.append("spy" if sought.endpoint.peer in {m["peer"] for m in swarm.history()[-1]["roster"]} else "")
        swarm.kill("spy")

    play(swarm, story)
    check(swarm, "spy", "thief")
    asked = {(name, rpc.name) for name in ("host-0", "trainer-0", "bootstrap") for rpc, _ in QUESTIONS}
    assert said.keys() == asked
    assert all(f"{CODE} is an expert that acme keeps to itself" in reason for reason in said.values()), said
    assert {event.part for event in swarm.peers["stranger"].events.of(PartAssigned)} == {stage_part(1, 0, 2)}
    assert feeding == [""]
    ended = swarm.peers["thief"].outcome
    assert isinstance(ended, ExceptionGroup)
    refused = first_leaf(ended)
    assert isinstance(refused, RunEnded)
    assert f"{CODE} is an expert that acme keeps to itself" in refused.reason
    assert swarm.events(CheckpointWritten)

"""A leader that is there, answers pings, and does not close its step, is succeeded as one that is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm.consensus.roster import owner
from swarm.errors import Busy
from swarm.events import PeerLost, StepClosed, TermBegan
from swarm.sim.loop import run_world
from swarm.step.leader.close import Leading
from swarm.step.leader.service import LeadService
from tests.harness.simulated import SimSwarm
from tests.swarms.story import DONE

STEP, STEPS = 3, 5
WITHIN_S = 60.0


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _never_closes(patch: pytest.MonkeyPatch, struck: list[str]) -> None:
    decide = Leading.decide

    async def stands_still(leading: Leading) -> Any:
        if (leading.step, leading.term) == (STEP, 0):
            struck.append("decide")
            await _for_ever()
        return await decide(leading)

    patch.setattr(Leading, "decide", stands_still)


def _stops_in_the_middle(patch: pytest.MonkeyPatch, struck: list[str]) -> None:
    judge = Leading._judge

    async def stands_still(leading: Leading, averaged: Any) -> None:
        if (leading.step, leading.term) == (STEP, 0):
            struck.append("judge")
            await _for_ever()
        await judge(leading, averaged)

    patch.setattr(Leading, "_judge", stands_still)


def _leases_nothing(patch: pytest.MonkeyPatch, struck: list[str]) -> None:
    lease = LeadService._on_lease

    async def gives_nothing(service: LeadService, caller: Any, body: Any) -> Any:
        if (body.step, body.term) == (STEP, 0) and owner(service._roster, STEP, 0) == service._me:
            struck.append("lease")
            raise Busy("later")
        return await lease(service, caller, body)

    patch.setattr(LeadService, "_on_lease", gives_nothing)


@pytest.mark.parametrize("stall", [_never_closes, _stops_in_the_middle, _leases_nothing])
def test_live_leader_that_stands_still_is_replaced_within_a_minute(
    stall: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[str] = []
    stall(monkeypatch, struck)
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    run_world(swarm.run(timeout_s=600.0))
    assert struck
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    assert not swarm.events(PeerLost), "nobody is gone"
    terms = [event for event in swarm.events(TermBegan) if event.step == STEP]
    assert terms
    assert terms[0].reason.startswith("its leader is overdue: ")
    seconds = {event.step: event.seconds for event in swarm.events(StepClosed)}
    assert seconds[STEP] < WITHIN_S
    assert max(seconds[step] for step in seconds if step not in (STEP, 1)) < WITHIN_S / 4, "the next ones are as before"
    assert not [event for event in swarm.events(TermBegan) if event.step != STEP], "nobody else is overdue"

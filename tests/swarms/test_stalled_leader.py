"""A leader that is there, answers pings, and does not close its step, is succeeded as one that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.roster import owner
from swarm.errors import PeerError, Superseded, WrongStep
from swarm.events import PeerLost, StepClosed, TermBegan
from swarm.ids import PeerId
from swarm.sim.loop import PEER, run_world
from swarm.step.leader.book import MOST_ENDED
from swarm.step.leader.close import StepClose
from swarm.step.member.member_service import MemberService
from tests.harness.bad_leaders import (
    Attack,
    asks_again_and_again,
    finds_more_to_ask,
    leases_nothing,
    neither_closes,
    never_closes,
    stops_in_the_middle,
    striking,
)
from tests.swarms.story import DONE

STEP, STEPS = 3, 5
WITHIN_S, SOON_S = 60.0, 15.0
"""A leader that has had all answers is passed over soon."""


@pytest.mark.parametrize(
    ("stall", "within_s"),
    [
        (never_closes, WITHIN_S),
        (stops_in_the_middle, WITHIN_S),
        (leases_nothing, WITHIN_S),
        (asks_again_and_again, SOON_S),
        (finds_more_to_ask, 2 * WITHIN_S),
        (neither_closes, 2 * WITHIN_S),
    ],
)
def test_live_leader_that_stands_still_is_replaced_within_a_minute(
    stall: Attack, within_s: float, tmp_path: Path
) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS})
    with striking(stall, step=STEP) as struck:
        run_world(swarm.run(timeout_s=600.0))
    assert struck
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    assert not swarm.events(PeerLost), "nobody is gone"
    terms = [event for event in swarm.events(TermBegan) if event.step == STEP]
    assert terms
    assert terms[0].reason.startswith("its leader is overdue: ")
    seconds = {event.step: event.seconds for event in swarm.events(StepClosed)}
    assert seconds[STEP] < within_s
    assert max(seconds[step] for step in seconds if step not in (STEP, 1)) < WITHIN_S / 4, "the next ones are as before"
    assert not [event for event in swarm.events(TermBegan) if event.step != STEP], "nobody else is overdue"


def test_leader_that_has_lost_work_computed_anew_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its question is answered by all that are there, and it asks nothing while a trainer that died is made up for."""
    swarm = SimSwarm(
        tmp_path, hosts=4, trainers=3, run={"steps": STEPS}, stage_s={"forward": 4.0, "backward": 8.0}, may_fail=True
    )
    reconcile, killed = StepClose.reconcile, list[str]()

    async def loses_a_trainer(leading: StepClose, committed: Any) -> Any:
        roster, step = leading.book.roster, leading.book.step
        if (step, leading.term) == (STEP, 0) and not killed:
            lead = {owner(roster, step, term) for term in (0, 1)}
            killed.append(next(roster[peer].name for peer in roster.trainers if peer not in lead))
            swarm.kill(killed[0])
        return await reconcile(leading, committed)

    monkeypatch.setattr(StepClose, "reconcile", loses_a_trainer)
    run_world(swarm.run(timeout_s=3600.0))
    assert {peer.outcome for name, peer in swarm.peers.items() if name not in killed} == {DONE}
    seconds = {event.step: event.seconds for event in swarm.events(StepClosed)}
    assert seconds[STEP] > seconds[STEP - 1] + SOON_S, "work was computed anew"
    assert not swarm.events(TermBegan)


@pytest.mark.parametrize("error", [Superseded, WrongStep])
def test_member_that_says_again_and_again_that_the_step_is_over_is_left_out(
    error: type[PeerError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": STEPS}, may_fail=True)
    honest, announce, said, liar = MemberService.from_leader, StepClose.announce, list[int](), "host-0"

    async def says_no(service: MemberService, caller: PeerId, step: int, term: int, **more: Any) -> Any:
        if PEER.get() == liar and step >= STEP and caller != service._context.me:
            said.append(term)
            raise error("it is over")
        return await honest(service, caller, step, term, **more)

    async def has_closed(leading: StepClose) -> None:
        await announce(leading)
        if leading.book.step == STEP and not swarm.is_dead(liar):
            swarm.kill(liar)  # it would never learn that the run is over

    monkeypatch.setattr(MemberService, "from_leader", says_no)
    monkeypatch.setattr(StepClose, "announce", has_closed)
    run_world(swarm.run(timeout_s=600.0))
    assert len(said) >= MOST_ENDED
    assert {peer.outcome for name, peer in swarm.peers.items() if name != liar} == {DONE}
    closed = next(record for record in swarm.history() if record["step"] == STEP)
    assert liar not in {member["name"] for member in closed["roster"]}

"""Who excuses a leader that stands still: those that are at work for it, but not one alone for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from swarm.consensus.roster import Roster, tail
from swarm.ids import PeerId
from swarm.step.member.leader_watch import ALONE_STEPS, RECALLED_STEPS, LeaderWatch
from swarm.step.member.position import Position
from tests.harness.rigs.consensus import A, B, T, listed
from tests.harness.rigs.step import LoopClock

C = PeerId("C")
ROSTER = Roster(
    [listed(A), listed(B, beside=(tail(C),)), listed(C, beside=(tail(B),)), listed(T, "trainer", "ends")],
)


def looking(me: PeerId = A) -> tuple[LeaderWatch, Any]:
    at = SimpleNamespace(roster=ROSTER, open_step=1, answering=False)
    lead, health = cast(Any, None), cast(Any, None)
    return LeaderWatch(me, cast(Position, at), lead, health, LoopClock(), lambda: 10.0), at


async def test_leader_has_its_answers_where_nobody_is_at_work_for_it() -> None:
    watch, at = looking()
    assert watch.has_answers([])
    at.answering = True
    assert not watch.has_answers([])


async def test_peers_of_one_machine_excuse_a_leader_in_few_steps() -> None:
    watch, at = looking()
    for step in range(1, ALONE_STEPS + 1):
        at.open_step = step
        assert [watch.has_answers([B, C]) for _ in range(3)] == [False] * 3
    at.open_step += 1
    assert watch.has_answers([B, C]), "they have excused as many as honest ones may"
    assert watch.has_answers([C])
    assert not watch.has_answers([T]), "another has not"
    assert not watch.has_answers([B, T]), "nor have two machines"
    at.open_step = RECALLED_STEPS + 1
    assert not watch.has_answers([B]), "it is long ago"


async def test_leader_that_keeps_its_judge_alone_at_work_is_excused_as_seldom() -> None:
    watch, at = looking()
    at.answering = True
    for at.open_step in range(1, ALONE_STEPS + 1):
        assert not watch.has_answers([])
    at.open_step += 1
    assert watch.has_answers([])

"""A member that answers late, step after step, is not waited for after some steps, and let back on probation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.slowness import FIRST_LEAVE
from swarm.events import DigestMismatch, LeftOutAsSlow, PeerLost, StepClosed, StepHeldUp, TermBegan
from swarm.sim.links import Links
from swarm.sim.loop import PEER, LoopClock, run_world
from swarm.step.member.member_service import MemberService
from swarm.waiting import LATER_S
from tests.swarms.story import DONE

STEPS, SOON = 20, 8
"""The leaders of three steps must have found it late, and one that leads a step itself does not say so."""
QUESTIONS = {"reconcile": "_on_reconcile", "apply": "_on_apply", "propose": "_on_propose", "decide": "_on_decide"}


@contextlib.contextmanager
def answers_late(name: str, question: str, by_s: float, *, after: bool = False) -> Iterator[list[int]]:
    """Have a member answer a question so much later than it could, ``after`` it has done what it asks for or before;
    yields the steps in which it did."""
    honest, struck = getattr(MemberService, QUESTIONS[question]), list[int]()

    async def late(member: MemberService, caller: object, body: object) -> object:
        if PEER.get() != name:
            return await honest(member, caller, body)
        struck.append(member.position.open_step)
        answer = await honest(member, caller, body) if after else None
        await LoopClock().sleep(by_s)
        return answer if after else await honest(member, caller, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberService, QUESTIONS[question], late)
        yield struck


def seconds(swarm: SimSwarm, at: str = "bootstrap") -> dict[int, float]:
    """How long each step took where a peer is."""
    return {event.step: event.seconds for event in swarm.peers[at].events.of(StepClosed)}


@pytest.mark.parametrize(
    ("who", "question", "by_s", "after"),
    [
        ("host-1", "reconcile", 55.0, False),
        ("trainer-1", "reconcile", 55.0, True),
        ("host-1", "apply", 25.0, False),
    ],
)
def test_member_that_answers_late_in_each_step_is_soon_not_waited_for_and_comes_back_on_probation(
    who: str, question: str, by_s: float, after: bool, tmp_path: Path
) -> None:
    links = Links.parse({"default": {"latency_ms": 20}})
    shape: dict[str, Any] = {"hosts": 6, "trainers": 3, "stage_s": {"forward": 0.05, "backward": 0.1}}
    shape |= {"batch": {"microbatch_size": 1, "microbatches_per_step": 3}}
    swarm = SimSwarm(tmp_path, links=links, may_fail=True, run={"steps": STEPS}, **shape)
    with answers_late(who, question, by_s, after=after) as struck:
        run_world(swarm.run())
    slow, history = swarm.peers[who].endpoint.peer, swarm.history()
    left = sorted(swarm.events(LeftOutAsSlow), key=lambda event: event.step)
    assert {event.peer for event in left} == {slow}
    assert {event.peer for event in swarm.events(StepHeldUp)} == {slow}, "nobody who waited for it"
    assert left[0].step <= SOON
    assert [event.until - event.step - 1 for event in left] == [FIRST_LEAVE << times for times in range(len(left))]
    assert [record["step"] for record in history if slow in record["absent"]] == [event.step for event in left]
    outside = [record["step"] for record in history if slow not in [member["peer"] for member in record["roster"]]]
    assert set(range(left[0].step, left[0].until)) <= set(outside)
    assert struck
    assert set(struck).isdisjoint(range(left[0].step + 1, left[0].until + 1))
    took = seconds(swarm)
    usual_s = median(took[step] for step in outside if step + 1 in outside)
    assert usual_s < 2.0
    assert max(took[step] for step in range(2, left[0].step)) > 4.0, "it was waited for until then"
    assert max(took[step] for step in range(left[0].step + 1, left[0].until)) < 2 * usual_s
    assert not swarm.events(DigestMismatch)
    assert not swarm.events(PeerLost)
    assert {event.term for event in swarm.events(TermBegan)} <= {1}, "nobody but the slow one, where it leads itself"
    assert {peer.outcome for name, peer in swarm.peers.items() if name != who} == {DONE}


def test_member_that_is_late_to_vote_is_waited_for_a_few_seconds(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, hosts=4, trainers=2, run={"steps": 6})
    with answers_late("trainer-1", "propose", 25.0) as struck:
        run_world(swarm.run())
    assert set(struck) >= set(range(1, 7))
    assert max(seconds(swarm).values()) < LATER_S + 2.0
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}


def test_member_without_whose_answer_the_step_can_be_closed_is_waited_for_twice_as_long_as_is_late(
    tmp_path: Path,
) -> None:
    swarm = SimSwarm(tmp_path, hosts=6, trainers=2, stage_s={"forward": 0.05, "backward": 0.1}, run={"steps": 3})
    with answers_late("host-1", "reconcile", 55.0, after=True) as struck, answers_late("host-1", "apply", 25.0):
        run_world(swarm.run())
    slow = swarm.peers["host-1"].endpoint.peer
    assert set(struck) == {1, 2, 3}
    assert 2 * LATER_S < min(seconds(swarm).values()) <= max(seconds(swarm).values()) < 2 * LATER_S + 2.0
    assert {event.peer for event in swarm.events(StepHeldUp)} == {slow}
    assert all(not record["absent"] for record in swarm.history()), "and what it did counts"
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}

"""Closing a step as its leader, with members that disagree, refuse, or cannot be told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from swarm.clock import SystemClock
from swarm.errors import DeadlineMissed, OutOfSync, PeerError, Refused, Violation, WrongStep
from swarm.events import Committed, DigestMismatch, Event
from swarm.ids import PeerId
from swarm.network.protocols import Answer, Method, Request
from swarm.optimization.calls import StepCalls
from swarm.optimization.changes import NO_CHANGES
from swarm.optimization.history import History
from swarm.optimization.messages import (
    Accepted,
    Apply,
    Averaged,
    Complete,
    Decide,
    Lease,
    Leased,
    Prepared,
    Propose,
    Reconcile,
)
from swarm.optimization.records import acceptance_bytes
from swarm.optimization.step import Closing, RemoteLeader, close_step
from swarm.schema import Empty
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.unit.optimization.world import COMMITTED, CURSOR, GENESIS, ROSTER, RULES, RUN, A, B, T, sign

QUESTIONS = ("step/1/reconcile", "step/1/apply", "step/1/propose", "step/1/decide")
LEADER, SUCCESSOR = ROSTER.succession(1)[:2]
OTHER = next(peer for peer in (A, B) if peer != LEADER)


class Puppet:
    """A member that answers as it is told; ``asked`` are the methods in order. ``desk`` says whether it leases too."""

    def __init__(self, peer: PeerId) -> None:
        self.peer, self.desk = peer, True
        self.asked: list[str] = []
        self.instead: dict[str, Callable[[Any], Any]] = {}
        self.gradient = "a" * 64 if ROSTER[peer].part == "stage-0" else "b" * 64
        self.weights = "c" * 64 if ROSTER[peer].part == "stage-0" else "d" * 64
        self.sq_norm = 3.0

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        kinds: list[tuple[str, Any, Callable[[Any], Any]]] = [
            (QUESTIONS[0], Reconcile, self._averaged),
            (QUESTIONS[1], Apply, lambda body: Prepared(digest=self.weights)),
            (QUESTIONS[2], Propose, lambda b: Accepted(signature=sign(self.peer, acceptance_bytes(b.record)))),
            (QUESTIONS[3], Decide, lambda body: Empty()),
        ]
        leading: list[tuple[str, Any, Callable[[Any], Any]]] = [
            ("lead/1/lease", Lease, lambda body: Leased(total=body.total, reason="")),
            ("lead/1/complete", Complete, lambda body: Empty()),
        ]
        kinds += leading if self.desk else []
        return [Method(name=name, request=kind, handle=self._handler(name, usual)) for name, kind, usual in kinds]

    def _averaged(self, body: Reconcile) -> Averaged:
        cursor = CURSOR if self.peer == T else None
        return Averaged(digest=self.gradient, sq_norm=self.sq_norm, cursor=cursor)

    def _handler(self, name: str, usual: Callable[[Any], Any]) -> Any:
        async def handle(request: Request) -> Answer:
            self.asked.append(name)
            answer = self.instead.get(name, usual)(request.body)
            return Answer(await answer if asyncio.iscoroutine(answer) else answer)

        return handle


class Sink:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """See :class:`swarm.events.EventSink`."""
        self.events.append(event)


class Stage:
    """Three puppets on a network, one of which leads step 1."""

    def __init__(self) -> None:
        self.network, self.events = SimNetwork(SystemClock()), Sink()
        self.puppets = {peer: Puppet(peer) for peer in ROSTER.peers}
        self.endpoints: dict[PeerId, SimEndpoint] = {}

    async def set(self) -> None:
        for peer, puppet in self.puppets.items():
            self.endpoints[peer] = self.network.endpoint(peer)
            await self.endpoints[peer].enter(RUN)
            self.endpoints[peer].mount(puppet)
        history = History()
        history.append(GENESIS)
        self.calls = StepCalls(self.endpoints[LEADER])
        self.closing = Closing(
            rules=RULES,
            calls=self.calls,
            history=history,
            events=self.events,
            timeout_s=lambda: 5.0,
            asking=tuple,
            settle=lambda absent: (NO_CHANGES, ROSTER),
        )

    async def close(self) -> Any:
        return await close_step(self.closing, 1, COMMITTED)

    def asked(self, method: str) -> set[PeerId]:
        return {peer for peer, puppet in self.puppets.items() if method in puppet.asked}


@pytest.fixture
async def stage() -> Stage:
    made = Stage()
    await made.set()
    return made


def no(error: Exception) -> Callable[[Any], Any]:
    def answer(body: Any) -> Any:
        raise error

    return answer


async def test_step_that_all_agree_on_is_decided_by_all_the_leader_last(stage: Stage) -> None:
    order: list[PeerId] = []
    for peer, puppet in stage.puppets.items():
        puppet.instead["step/1/decide"] = lambda body, peer=peer: (order.append(peer), Empty())[1]
    closed = await stage.close()
    assert closed.grad_norm == pytest.approx(6**0.5)
    assert (closed.tokens, closed.loss_sum, closed.cursors) == (21, 3.0, {T: CURSOR})
    assert closed.digests == {"ends": "d" * 64, "stage-0": "c" * 64}
    assert all(puppet.asked == list(QUESTIONS) for puppet in stage.puppets.values())
    assert order[-1] == LEADER
    assert [event for event in stage.events.events if isinstance(event, Committed)]


@pytest.mark.parametrize(("what", "words"), [("gradient", "averaged gradient"), ("weights", "updated weights")])
@pytest.mark.parametrize("value", ["e" * 64, ""])
async def test_step_whose_replicas_disagree_is_reported_and_not_decided(
    stage: Stage, what: str, words: str, value: str
) -> None:
    setattr(stage.puppets[B], what, value)
    with pytest.raises(OutOfSync, match=words):
        await stage.close()
    (mismatch,) = stage.events.events
    assert isinstance(mismatch, DigestMismatch)
    assert (mismatch.part, set(mismatch.digests)) == ("stage-0", {A, B})
    assert mismatch.digests[B] == value
    assert not stage.asked("step/1/propose")
    assert not stage.asked("step/1/decide")


@pytest.mark.parametrize("question", QUESTIONS[:3])
@pytest.mark.parametrize("peer", ROSTER.peers)
async def test_step_that_a_member_refuses_names_it_and_nobody_swaps(stage: Stage, question: str, peer: PeerId) -> None:
    stage.puppets[peer].instead[question] = no(Refused("not with me"))
    with pytest.raises(Refused, match=f"^{peer}: not with me"):
        await stage.close()
    assert not stage.asked("step/1/decide")
    assert stage.events.events == []


async def test_step_that_a_member_refuses_after_accepting_is_decided_by_the_others_all_the_same(stage: Stage) -> None:
    stage.puppets[OTHER].instead["step/1/decide"] = no(PeerError("the disk is full"))
    with pytest.raises(OutOfSync, match=f"step 1 is decided, but {OTHER}: the disk is full"):
        await stage.close()
    assert stage.asked("step/1/decide") == set(ROSTER.peers)
    assert [type(event) for event in stage.events.events] == [Committed]


async def test_step_with_a_member_that_cannot_be_told_is_decided(stage: Stage) -> None:
    async def die(body: Any) -> Any:
        stage.network.kill(OTHER)
        await asyncio.get_running_loop().create_future()

    stage.puppets[OTHER].instead["step/1/decide"] = die
    closed = await stage.close()
    assert closed.step == 1
    assert stage.asked("step/1/decide") == set(ROSTER.peers)
    assert [type(event) for event in stage.events.events] == [Committed]


async def test_step_with_a_member_that_never_answers_ends_naming_it(stage: Stage) -> None:
    async def silence(body: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    object.__setattr__(stage.closing, "timeout_s", lambda: 0.05)
    stage.puppets[OTHER].instead["step/1/apply"] = silence
    with pytest.raises(DeadlineMissed, match=f"^{OTHER}: "):
        await stage.close()
    assert not stage.asked("step/1/propose")


async def test_step_whose_norm_is_no_number_ends(stage: Stage) -> None:
    for puppet in stage.puppets.values():
        puppet.sq_norm = 1e308
    with pytest.raises(OutOfSync, match="gradient norm"):
        await stage.close()
    assert not stage.asked("step/1/apply")


# --- the leader as a trainer sees it ---------------------------------------------------------------------------------


def remote(stage: Stage) -> RemoteLeader:
    return RemoteLeader(StepCalls(stage.endpoints[T]), ROSTER, lambda: 5.0)


async def test_remote_leader_leases_what_is_added(stage: Stage) -> None:
    leader = remote(stage)
    assert await leader.lease(1, 4) == 4
    stage.puppets[LEADER].instead["lead/1/lease"] = lambda body: Leased(total=5, reason="")
    assert await leader.lease(1, 4) == 1
    assert await leader.lease(1, 4) == 0


async def test_remote_leader_that_takes_a_lease_back_is_in_violation(stage: Stage) -> None:
    leader = remote(stage)
    await leader.lease(1, 4)
    stage.puppets[LEADER].instead["lead/1/lease"] = lambda body: Leased(total=3, reason="")
    with pytest.raises(Violation, match="3 microbatches leased where 4"):
        await leader.lease(1, 4)


async def test_remote_leader_that_closed_the_step_has_nothing_to_lease(stage: Stage) -> None:
    stage.puppets[LEADER].instead["lead/1/lease"] = no(WrongStep("step 1 is closed"))
    assert await remote(stage).lease(1, 4) == 0


async def test_remote_leader_is_told_with_its_successor(stage: Stage) -> None:
    await remote(stage).complete(1, COMMITTED[0], (bytes(64),))
    assert stage.asked("lead/1/complete") == {LEADER, SUCCESSOR}


async def test_remote_leader_whose_successor_saw_the_step_close_is_enough(stage: Stage) -> None:
    stage.puppets[SUCCESSOR].instead["lead/1/complete"] = no(WrongStep("step 1 is closed"))
    await remote(stage).complete(1, COMMITTED[0], (bytes(64),))


@pytest.mark.parametrize(
    ("peer", "error"), [(LEADER, WrongStep("closed")), (LEADER, Refused("no")), (SUCCESSOR, Refused("no"))]
)
async def test_remote_leader_that_does_not_count_a_microbatch_is_an_error_that_names_it(
    stage: Stage, peer: PeerId, error: PeerError
) -> None:
    stage.puppets[peer].instead["lead/1/complete"] = no(error)
    with pytest.raises(type(error), match=f"^{peer}: "):
        await remote(stage).complete(1, COMMITTED[0], (bytes(64),))

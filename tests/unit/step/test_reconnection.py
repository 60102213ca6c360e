"""Members of a provisional lineage meet the others again: it is confirmed or given up, as a majority has decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus.acceptor import Vote
from swarm.consensus.ballot import Incarnation
from swarm.consensus.changes import NO_CHANGES
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Roster
from swarm.errors import Busy, WrongStep
from swarm.events import LineageConfirmed
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.schema import Empty
from swarm.step.leader.provisional import LOOK_S, Reconnection
from swarm.step.loop import ExitBarrier, StepLoop
from swarm.step.member.open_step import OpenStep
from swarm.step.messages import DECIDE, PREPARE, Decide, Promise
from swarm.step.observe_messages import NEXT, START, Decided
from tests.harness.rigs.step import (
    COMMITTED,
    GENESIS,
    ROSTER,
    A,
    B,
    MemberBench,
    Stage,
    T,
    acceptances,
    evidence,
    listed,
    no,
    record,
    stop,
)

C, U = PeerId("C"), PeerId("U")
FIVE = Roster([*ROSTER.members, listed(C), listed(U, "trainer", "ends")])
BEGINNING = GENESIS.model_copy(update={"roster": FIVE.members})
OURS, OTHERS = (A, T), (B, C, U)
ME = next(peer for peer in FIVE.succession(1) if peer in OURS)
"""Who asks for votes for our lineage."""


BY_A = tuple(one.model_copy(update={"route": (A,)}) for one in COMMITTED)
CANDIDATE = record(
    BEGINNING, committed=BY_A, lineage=1, term=1, absent=OTHERS, roster=tuple(FIVE[peer] for peer in OURS)
)
ELSEWHERE = record(BEGINNING, absent=OURS, roster=tuple(FIVE[peer] for peer in OTHERS))
CLOSED = WrongStep("step 1 is closed, step 2 is open")


class Reunited:
    """``OURS`` went on alone with ``CANDIDATE``, and the others are back."""

    async def set(self) -> Reunited:
        self.stage, self.bench = await Stage(FIVE, leader=ME).set(), MemberBench(me=ME, genesis=BEGINNING)
        forking, state = self.bench.position.forking, OpenStep(Incarnation(ME).ballot(BEGINNING))
        changes = NO_CHANGES.model_copy(update={"absent": OTHERS})
        await state.accept(Vote(term=1, record=CANDIDATE, changes=changes, evidence=evidence(CANDIDATE, FIVE)), ME)
        self.bench.history.append(CANDIDATE)
        proof = acceptances(CANDIDATE, 1, OURS)
        await forking.closed(Decision(CANDIDATE, proof, term=1), BEGINNING, state)
        await self.bench.member._open_next(CANDIDATE)
        assert forking.fork is not None
        self.fork = forking.fork
        for peer in OURS:
            self.answers(peer, PREPARE, lambda body: Promise(vote=None, free=0, candidate=self.fork.offer()))
        return self

    def answers(self, peer: PeerId, method: Rpc[Any, Any], answer: Callable[[Any], Any]) -> None:
        self.stage.puppets[peer].instead[method] = answer

    async def look(self, seconds: float = 0.5) -> None:
        """One look, and what comes of it."""
        running = asyncio.create_task(Reconnection(self.bench.member, self.stage.closing).run())
        await asyncio.sleep(seconds)
        assert not running.done(), "it looks for as long as the peer lives"
        await stop(running)

    @property
    def confirmed(self) -> int:
        return len(self.stage.events.of(LineageConfirmed))


def decided(one: CloseRecord, term: int = 4) -> Decided:
    return Decided.of(Decision(one, acceptances(one, term, OTHERS), term=term))


JUNK = {f"Ev{number}": bytes(64) for number in range(1, 9)} | {f"x{number}": bytes(64) for number in range(1, 90)}


def told_later(one: Decided) -> Callable[[Any], Any]:
    """An answer: at first this peer has closed nothing."""
    refuse = no(WrongStep("not closed here"), times=1)
    return lambda body: refuse(body) or one


async def test_lineage_that_others_accept_is_confirmed() -> None:
    here = await Reunited().set()
    here.answers(ME, DECIDE, lambda body: here.fork.decided(body.record, body.term, body.acceptances) or Empty())
    await here.look(3 * LOOK_S)
    assert here.fork.confirmation is not None
    assert (here.confirmed, here.bench.history.head) == (1, CANDIDATE)


async def test_lineage_is_confirmed_by_a_proof_to_which_one_has_added_junk() -> None:
    here = await Reunited().set()
    proof = decided(CANDIDATE)
    here.answers(B, NEXT, lambda body: proof.model_copy(update={"acceptances": proof.acceptances | JUNK}))
    await here.look()
    assert here.fork.confirmation is not None
    assert here.fork.confirmation.acceptances.keys() == set(OTHERS)


async def test_lineage_whose_own_members_do_not_answer_in_time_asks_again() -> None:
    here = await Reunited().set()
    for peer in OURS:
        usual = here.stage.puppets[peer].instead[PREPARE]
        late = no(Busy("it stalls"), times=1)
        here.answers(peer, PREPARE, lambda body, late=late, usual=usual: late(body) or usual(body))
    here.answers(ME, DECIDE, lambda body: here.fork.decided(body.record, body.term, body.acceptances) or Empty())
    await here.look(3 * LOOK_S)
    assert here.fork.confirmation is not None


async def test_lineage_that_the_disk_does_not_let_it_give_up_ends_the_loop_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = await Reunited().set()
    member, position, history = here.bench.member, here.bench.position, here.bench.history

    def refuse(to: CloseRecord) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(history, "rewind", refuse)
    here.answers(B, NEXT, lambda body: decided(ELSEWHERE))
    closing = replace(here.stage.closing, history=history)
    loop = StepLoop(member, closing, ExitBarrier(), None, _never)
    with pytest.raises(OSError, match="read-only file system"):
        await loop.run()
    assert (position.cut_off, position.open_step, history.head) == ("", 2, CANDIDATE)


async def _never() -> None:
    raise AssertionError("it was not cut off")


async def test_lineage_that_is_decided_by_others_as_it_asks_for_votes_is_not_given_up() -> None:
    """One of them leads the step and has our candidate accepted, while we ask for the same."""
    here = await Reunited().set()
    here.answers(B, NEXT, told_later(decided(CANDIDATE)))
    here.answers(B, PREPARE, no(CLOSED))
    await here.look()
    assert here.stage.asked(PREPARE)
    assert here.fork.confirmation is not None
    assert (here.confirmed, here.bench.position.cut_off) == (1, "")


async def test_lineage_whose_fate_is_proven_as_it_asks_for_votes_is_given_up_for_that_record() -> None:
    here = await Reunited().set()
    here.answers(B, NEXT, told_later(decided(ELSEWHERE)))
    here.answers(B, PREPARE, no(CLOSED))
    await here.look()
    assert here.bench.position.forking.elsewhere == ELSEWHERE
    assert "do not count: a majority went on without it" in here.bench.position.cut_off


async def test_member_that_went_far_with_us_does_not_make_us_give_it_up() -> None:
    """It keeps no proof any more of a step so long ago."""
    here = await Reunited().set()
    follows = record(CANDIDATE, lineage=1, roster=tuple(FIVE[peer] for peer in (*OURS, B)))
    here.answers(B, PREPARE, no(CLOSED))
    here.answers(B, START, lambda body: Decided.of(Decision(follows, {}, term=0)))
    await here.look()
    assert (here.fork.confirmation, here.bench.position.cut_off) == (None, "")


async def test_member_that_went_far_without_us_makes_us_give_it_up() -> None:
    here = await Reunited().set()
    follows = record(ELSEWHERE, roster=tuple(FIVE[peer] for peer in OTHERS))
    here.answers(B, PREPARE, no(CLOSED))
    here.answers(B, START, lambda body: Decided.of(Decision(follows, {}, term=0)))
    await here.look()
    assert "do not count: step 1 was decided without it" in here.bench.position.cut_off
    assert not here.confirmed


async def test_lineage_confirmed_between_two_looks_is_told_of_though_it_is_over() -> None:
    here = await Reunited().set()
    for peer in OTHERS:
        here.answers(peer, PREPARE, no(Busy("catching up")))
    running = asyncio.create_task(here.look(3 * LOOK_S))
    await asyncio.sleep(0.5 * LOOK_S)
    proof = decided(CANDIDATE)
    body = Decide(step=1, record=CANDIDATE.hash(), term=proof.term, acceptances=proof.acceptances)
    assert here.bench.position.forking.decided(body) is None
    here.bench.position.forking.fork = None
    await running
    assert here.confirmed == 1

"""Leading a step on which all agree, or of which replicas differ."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from swarm.consensus.records import acceptance_bytes, voters
from swarm.consensus.roster import Roster
from swarm.errors import Refused
from swarm.events import AttemptFailed, Committed, DigestMismatch
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.step.leader.tables import MAX_TIES, TIED_S
from swarm.step.messages import APPLY, DECIDE, PROPOSE, RECONCILE, Averaged
from tests.harness.rigs.step import (
    CURSOR,
    LEADER,
    OTHER,
    QUESTIONS,
    ROSTER,
    THREE,
    A,
    B,
    Puppet,
    T,
    listed,
    no,
    stage,
    verify,
)

# --- all well --------------------------------------------------------------------------------------------------------


async def test_step_with_a_part_that_is_far_out_has_its_cap_in_the_record_and_all_are_told_the_norms() -> None:
    here = await stage()
    here.puppets[T].sq_norm = 1e60
    closed = await here.leading().run()
    assert closed.caps == {"ends": 3**0.5 / 1e30}
    assert (closed.grad_norm, closed.clip) == (pytest.approx(6**0.5), pytest.approx(6**-0.5))
    assert all(p.told(APPLY)[0].sq_norms == {"ends": 1e60, "stage-0": 3.0} for p in here.puppets.values())


async def test_step_that_all_agree_on_is_decided_by_all_the_leader_last() -> None:
    here = await stage()
    order: list[PeerId] = []
    for peer, puppet in here.puppets.items():
        puppet.instead[DECIDE] = lambda body, peer=peer: order.append(peer)
    leading = here.leading()
    closed = await leading.run()
    assert closed.grad_norm == pytest.approx(6**0.5)
    assert (closed.tokens, closed.loss_sum, closed.cursors) == (21, 3.0, {T: CURSOR})
    assert closed.digests == {"ends": "d" * 64, "stage-0": "c" * 64}
    assert (closed.term, closed.absent, closed.members.peers) == (0, (), ROSTER.peers)
    assert all(puppet.asked == list(QUESTIONS) for puppet in here.puppets.values())
    assert order[-1] == LEADER
    assert (leading.decided, leading.told) == (closed, set(ROSTER.peers) - {LEADER})
    assert [type(event) for event in here.events.events] == [Committed]
    for decision in here.puppets[OTHER].told(DECIDE):
        signed = acceptance_bytes(closed)
        assert all(verify(peer, signed, decision.acceptances[peer]) for peer in ROSTER.peers)


async def test_step_of_more_members_than_voters_is_told_to_all_and_decided_by_the_voters() -> None:
    many = Roster([*ROSTER.members, *(listed(f"Z{n}", "bootstrap", None, name="z", worked=1) for n in range(11))])
    here = await stage(roster=many)
    deciding = voters(many, here.genesis.hash())
    for peer in set(many.peers) - set(deciding) - {here.leader}:
        here.puppets[peer].instead[PROPOSE] = no(Refused("it has no vote, and does not count"))
    closed = await here.leading().run()
    assert here.asked(PROPOSE) == here.asked(DECIDE) == set(many.peers)
    (decision,) = here.puppets[T].told(DECIDE)
    assert len(deciding) == 11
    assert set(decision.acceptances) == set(deciding), "of the others no signature proves anything"
    assert closed.members.peers == many.peers


async def test_leader_whose_own_close_is_slow_has_decided_all_the_same() -> None:
    here = await stage()
    closed = asyncio.Event()

    async def slow(body: Any) -> None:
        await asyncio.sleep(10)  # its swap, its disk and its snapshot take longer than an answer may
        closed.set()

    here.puppets[here.leader].instead[DECIDE] = slow
    leading = here.leading()
    assert await leading.run() == leading.decided
    assert here.asked(DECIDE) == set(ROSTER.peers)
    assert not closed.is_set()


# --- disagreement ----------------------------------------------------------------------------------------------------


TIES = pytest.mark.parametrize(
    ("what", "words"), [("gradient", "the averaged gradient"), ("weights", "the updated weights")]
)


def lie(puppet: Puppet, what: str, *, times: int) -> None:
    """So often it tells of other numbers than it should, each time of the same."""
    usual, left = getattr(puppet, what), iter(range(times))

    def answer(body: Any) -> None:
        setattr(puppet, what, usual if next(left, None) is None else "e" * 64)

    puppet.instead[RECONCILE if what == "gradient" else APPLY] = answer


@TIES
async def test_part_whose_replicas_differ_one_to_one_is_averaged_anew_until_they_agree(what: str, words: str) -> None:
    here, plainly = await stage(), what == "gradient"  # sums are averaged plainly before anybody counts as tied
    lie(here.puppets[B], what, times=1 + plainly)
    closed = await here.leading().run()
    assert (closed.absent, closed.digests) == ((), {"ends": "d" * 64, "stage-0": "c" * 64})
    mismatches, failures = here.events.of(DigestMismatch), here.events.of(AttemptFailed)
    assert (len(mismatches), len(failures)) == (1 + plainly, 1 + plainly)
    mismatch, failed = mismatches[-1], failures[-1]
    assert (mismatch.part, set(mismatch.digests), mismatch.digests[B]) == ("stage-0", {A, B}, "e" * 64)
    assert f"disagree about {words}" in failed.reason
    asked = here.puppets[A].told(RECONCILE)
    numbers = [body.attempts["stage-0"] for body in asked]
    assert numbers == sorted(set(numbers))  # else it would repeat what it had answered
    assert {body.attempts["ends"] for body in asked} == {asked[0].attempts["ends"]}
    assert any(said.startswith("a and b to agree on stage-0") for said in here.waited)
    assert here.waited[-1] == ""


@TIES
@pytest.mark.parametrize("back", [True, False])
async def test_tie_that_repeats_is_tried_now_and_then_and_ends_when_who_is_there_changes(
    back: bool, what: str, words: str
) -> None:
    voter = listed("Z", "bootstrap", None, worked=1)
    here, third = await stage(roster=Roster([*THREE.members, voter])), PeerId("C")
    here.liveness.lose(third, "cut off")
    liar = next(peer for peer in (A, B) if peer != here.leader)
    lie(here.puppets[liar], what, times=1_000)
    running = asyncio.create_task(here.leading().run())
    await asyncio.sleep(10 * TIED_S)
    assert MAX_TIES < len(here.events.of(DigestMismatch)) <= MAX_TIES + 10
    assert not here.asked(PROPOSE)
    assert words in here.events.of(AttemptFailed)[-1].reason
    before = asyncio.get_running_loop().time()
    if back:
        here.liveness.find(third)
    else:
        here.liveness.lose(liar, "its machine was ended")
    closed = await running
    assert asyncio.get_running_loop().time() - before < TIED_S / 2
    assert set(closed.absent) == ({liar} if back else {liar, third})
    assert closed.digests["stage-0"] == "c" * 64


@pytest.mark.parametrize(("what", "method"), [("gradient", RECONCILE), ("weights", APPLY)])
@pytest.mark.parametrize("value", ["e" * 64, ""])
async def test_replica_that_differs_from_the_others_is_reported_and_left_out(
    what: str, method: Rpc[Any, Any], value: str
) -> None:
    here = await stage(roster=THREE)
    setattr(here.puppets[B], what, value)
    leading = here.leading()
    closed = await leading.run()
    plainly = bool(value) and what == "gradient"  # the one who reduced may have given it other numbers
    asked = 1 + plainly
    assert {(one.part, one.digests[B]) for one in here.events.of(DigestMismatch)} == {("stage-0", value)}
    assert ["disagree" in failed.reason for failed in here.events.of(AttemptFailed)] == [True] * asked
    assert (closed.absent, closed.digests) == ((B,), {"ends": "d" * 64, "stage-0": "c" * 64})
    assert B not in closed.members
    assert len(here.puppets[B].told(method)) == asked
    told = here.puppets[A].told(RECONCILE)
    assert [body.plainly for body in told[:asked]] == [(), ("stage-0",)][:asked]
    assert all(B not in body.live for body in told[asked:])


async def test_leader_that_differs_from_the_others_leaves_itself_out_and_lives() -> None:
    leads = THREE.succession(1)[0]
    here = await stage(roster=THREE)
    here.puppets[leads].weights = "e" * 64
    closed = await here.leading().run()
    assert here.events.of(DigestMismatch)
    assert closed.absent == (leads,)


@pytest.mark.parametrize("claim", [1e308, math.inf])
async def test_member_that_claims_a_norm_that_no_gradient_has_is_left_out(claim: float) -> None:
    """Of two parts it would make the norm of the model no number, and no leader could close the step."""
    here = await stage()
    here.puppets[OTHER].instead[RECONCILE] = lambda body: Averaged.model_construct(
        digest="a" * 64, sq_norm=claim, cursor=None, failure="", missing=(), heard={}
    )
    closed = await here.leading().run()
    assert (closed.absent, closed.grad_norm) == ((OTHER,), pytest.approx(6**0.5))

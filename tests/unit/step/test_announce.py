"""The record with which a run begins: everybody accepts it, or nobody begins."""

from __future__ import annotations

import pytest

from swarm.errors import OutOfSync, PeerError
from swarm.ids import PeerId
from swarm.membership.founding_record import announce
from swarm.step.messages import DECIDE
from tests.harness.rigs.step import GENESIS, ROSTER, A, B, Stage, T, decide, no, silence, virtual

FOUNDER = T


async def founding() -> Stage:
    return await Stage(leader=FOUNDER).set()


@virtual
async def test_founding_is_told_to_all_the_founder_last() -> None:
    here = await founding()
    order: list[PeerId] = []
    for peer, puppet in here.puppets.items():
        puppet.instead[DECIDE] = lambda body, peer=peer: order.append(peer)
    await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert set(order) == set(ROSTER.peers)
    assert order[-1] == FOUNDER


@pytest.mark.parametrize("how", ["die", "silence"])
@virtual
async def test_founding_with_a_member_that_cannot_be_told_is_decided_all_the_same(how: str) -> None:
    here = await founding()
    here.puppets[A].instead[DECIDE] = here.die(A) if how == "die" else silence
    await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert here.asked(DECIDE) == set(ROSTER.peers)


@virtual
async def test_founding_whose_founder_is_slow_to_close_is_decided_all_the_same() -> None:
    here = await founding()
    here.puppets[FOUNDER].instead[DECIDE] = silence
    await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert here.asked(DECIDE) == set(ROSTER.peers)


@virtual
async def test_founding_with_a_member_that_says_no_is_decided_all_the_same() -> None:
    """It may have accepted it in a life that is over."""
    here = await founding()
    here.puppets[B].instead[DECIDE] = no(PeerError("this record was not accepted here"))
    await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert here.asked(DECIDE) == set(ROSTER.peers)


@virtual
async def test_founding_whose_founder_says_no_itself_is_reported_when_all_were_told() -> None:
    here = await founding()
    here.puppets[FOUNDER].instead[DECIDE] = no(PeerError("the disk is full"))
    with pytest.raises(OutOfSync, match=f"step 0 is decided, but {FOUNDER}: the disk is full"):
        await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert here.asked(DECIDE) == set(ROSTER.peers)

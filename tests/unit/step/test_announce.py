"""The record with which a run begins: everybody accepts it, or nobody begins."""

from __future__ import annotations

import pytest

from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.membership.founding_record import announce
from swarm.step.messages import DECIDE
from tests.harness.rigs.step import GENESIS, ROSTER, A, B, Stage, T, decide, no, silence

FOUNDER = T


async def founding() -> Stage:
    return await Stage(leader=FOUNDER).set()


async def test_founding_is_told_to_all_the_founder_last() -> None:
    here = await founding()
    order: list[PeerId] = []
    for peer, puppet in here.puppets.items():
        puppet.instead[DECIDE] = lambda body, peer=peer: order.append(peer)
    await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert set(order) == set(ROSTER.peers)
    assert order[-1] == FOUNDER


@pytest.mark.parametrize(
    ("peer", "how"), [(A, "dies"), (A, "is silent"), (FOUNDER, "is silent"), (B, "says no")], ids="-".join
)
async def test_founding_with_a_member_that_cannot_be_told_is_decided_all_the_same(peer: PeerId, how: str) -> None:
    """Who says no may have accepted it in a life that is over; a founder may only be slow to close."""
    here = await founding()
    refuses = no(PeerError("this record was not accepted here"))
    here.puppets[peer].instead[DECIDE] = {"dies": here.die(peer), "is silent": silence, "says no": refuses}[how]
    await announce(here.calls, decide(GENESIS), ROSTER, 5.0)
    assert here.asked(DECIDE) == set(ROSTER.peers)

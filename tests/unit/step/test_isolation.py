"""When those that are there may go on without a majority."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from swarm.consensus.acceptor import has_majority
from swarm.consensus.records import CloseRecord, voters
from swarm.consensus.roster import Roster
from swarm.step.leader.provisional import Isolation
from tests.harness.rigs.step import GENESIS, ROSTER, RULES, A, FakeLiveness, HandClock, T, record

GRACE_S = 60.0
CROWD = Roster(ROSTER[A if number % 2 else T].model_copy(update={"peer": f"P{number}"}) for number in range(10, 40))
HEAD = GENESIS.model_copy(update={"roster": CROWD.members})


def test_grace_is_over_only_while_the_voters_after_the_newest_record_are_no_majority() -> None:
    """Of many members other voters are drawn after each record: nobody need come back for a majority to be there."""
    clock, liveness = HandClock(), FakeLiveness()
    for peer in voters(CROWD, HEAD.hash())[:6]:
        liveness.lose(peer)
    rules = replace(RULES, quorum_grace_s=GRACE_S)
    member = SimpleNamespace(head=HEAD, is_member=True)
    closing = SimpleNamespace(liveness=liveness, rules=rules, clock=clock)
    isolation = Isolation(cast(Any, member), cast(Any, closing))
    assert not isolation.over()
    clock.now += GRACE_S
    assert isolation.over()
    member.head = after(liveness)
    assert not isolation.over()
    member.head = HEAD
    assert not isolation.over(), "it begins anew"


def after(liveness: FakeLiveness) -> CloseRecord:
    """A record whose voters are there."""
    for tokens in itertools.count():
        closed = record(HEAD, roster=CROWD.members, tokens=tokens)
        if has_majority(voters(CROWD, closed.hash()), liveness.gone):
            return closed
    raise AssertionError

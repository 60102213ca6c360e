"""What records of a run that admits by invite may change: who joins, leaves, is revoked, and may vote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy, Admissions
from swarm.consensus.changes import NO_CHANGES, Admission, ChangeRules, Changes, OpenStepFacts
from swarm.consensus.roster import Roster
from swarm.errors import Refused, Violation
from swarm.ids import PeerId
from swarm.security.credentials import Credential, Grant, Order, SignedGrant
from swarm.step.leader.requests import ChangeRequests
from tests.harness.rigs.step import BEFORE, RUN, SEVEN, STEP, admission, listed
from tests.harness.rigs.step import RULES as WORLD_RULES

POLICY = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=("A1",)))
RULES = replace(WORLD_RULES, steps=9, max_members=9, admission=POLICY)
LOST = [PeerId("B1"), PeerId("B2")]
SIGNED = {"A1": "0" * 128}


def says_yes(peer: PeerId, data: bytes, signature: bytes) -> bool:
    return True


CHANGES = ChangeRules(RULES.roster, says_yes)


def grant(serial: str) -> Grant:
    return Grant(run=RUN, serial=serial * 16, name="ana", role="any", until_step=9, key="K")


def join(peer: str, serial: str, **fields: Any) -> Admission:
    shown = Credential(signed=SignedGrant(grant=grant(serial), signatures=SIGNED), peer=peer)
    return admission(listed(peer, **fields)).model_copy(update={"credential": shown})


def roster(*used: str, mute: tuple[str, ...] = ()) -> Roster:
    """SEVEN, of whom these used the invites 1, 2, and so on."""
    held = [join(peer, str(number)).credential for number, peer in enumerate(used, 1)]
    state = POLICY.following(POLICY.first(), 1, [one for one in held if one is not None], [], SEVEN.peers)
    return Roster([m.model_copy(update={"mute": m.peer in mute}) for m in SEVEN.members], state)


def open_step(there: Roster) -> OpenStepFacts:
    return OpenStepFacts(STEP, there, BEFORE)


def revoke(serial: str, *signers: str) -> Order:
    order = Order(verb="revoke", run=RUN, name="ana", serial=serial * 16, until_step=9)
    return order.model_copy(update={"signatures": dict.fromkeys(signers, "0" * 128)})


def test_step_is_given_up_with_one_of_two_that_join_with_one_invite() -> None:
    requests = ChangeRequests(RULES, says_yes, open_step(roster()))
    requests.joining(LOST)
    joins = [join("E", "7", part="stage-1"), join("C", "7", part="stage-1")]
    for one in joins:
        requests.join(PeerId(one.member.peer), one)
    changes, following = requests.give_up((), requests.joining(LOST), LOST)
    assert [one.member.peer for one in changes.joins] == ["C"]
    assert "E" not in following


def test_step_is_not_given_up_to_those_who_may_not_vote() -> None:
    voters = ("A1", "A2", "B1", "B2", "F", "T1", "T2")
    now = open_step(roster("A2", mute=voters))
    silent = grant("7").model_copy(update={"vote": False})
    shown = Credential(signed=SignedGrant(grant=silent, signatures=SIGNED), peer="C")
    saves = admission(listed("C", part="stage-1")).model_copy(update={"credential": shown})
    with pytest.raises(Refused, match="nobody is left that may vote"):
        CHANGES.give_up(replace(now, lost=LOST), Changes(joins=(saves,), absent=tuple(LOST)))


def test_last_one_that_may_vote_stays() -> None:
    there = roster(mute=("A1", "B1", "B2", "F", "T1", "T2"))
    assert "only one that may vote" in str(CHANGES.spared(there, [], "A2"))
    assert CHANGES.spared(there, [], "A2", moves=True) is None, "it keeps its vote"
    assert CHANGES.spared(there, [], "B1") is None


def test_order_waits_for_the_record_that_is_without_whom_it_revokes() -> None:
    there = roster("A2", "B2")
    now, orders = open_step(there), [revoke("1", "A1"), revoke("2", "A1")]
    following = Roster(m for m in there.members if m.peer != "A2")
    changes = CHANGES.with_due(now, NO_CHANGES, following, orders)
    assert [one.serial for one in changes.orders] == ["1" * 16]
    said = CHANGES.admissions(now, changes, following)
    assert said is not None
    assert said.void == {"1" * 16}
    with pytest.raises(Refused, match="names A2, whose invite was revoked"):
        CHANGES.admissions(now, changes, there)


def test_newcomer_whose_invite_is_being_revoked_is_revoked_with_the_next_record() -> None:
    now, joins = open_step(roster()), Changes(joins=(join("C", "7"),))
    following = Roster([*SEVEN.members, joins.joins[0].member])
    assert CHANGES.with_due(now, joins, following, [revoke("7", "A1")]).orders == ()


def test_majority_of_a_provisional_lineage_orders_nothing_and_issuers_do() -> None:
    there = roster("A2")
    following = Roster(m for m in there.members if m.peer != "A2")
    for signers, carried in ((("B1", "B2", "T1", "T2", "F"), False), (("A1",), True)):
        order = revoke("1", *signers)
        now = open_step(there)
        assert CHANGES.with_due(now, NO_CHANGES, following, [order]).orders == (order,)
        alone = replace(now, provisional=True)
        assert CHANGES.with_due(alone, NO_CHANGES, following, [order]).orders == ((order,) if carried else ())
        if not carried:
            with pytest.raises(Refused, match="too few signed"):
                CHANGES.admissions(alone, Changes(orders=(order,)), following)


def test_what_an_issuer_shows_makes_nobody_a_holder() -> None:
    there = Roster([m for m in SEVEN.members if m.peer != "A1"], roster().admissions)
    shown = join("X", "7").credential
    joins = Changes(joins=(admission(listed("A1", part="stage-0")).model_copy(update={"credential": shown}),))
    said = CHANGES.admissions(open_step(there), joins, SEVEN)
    assert isinstance(said, Admissions)
    assert said.holders == ()


def test_two_joins_with_one_invite_are_no_record() -> None:
    with pytest.raises(Violation, match="one invite"):
        CHANGES.apply(open_step(roster()), Changes(joins=(join("C", "7"), join("E", "7"))))

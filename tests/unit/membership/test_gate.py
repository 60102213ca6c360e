"""The gate of a run that not everybody may join: every method, every kind of caller."""

from __future__ import annotations

from typing import Any

import pytest

from peers.chaos.strangers.bodies import all_rpcs
from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy
from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.consensus.roster import Member
from swarm.errors import Busy, PeerError, Refused, Unadmitted, Violation
from swarm.ids import PeerId, RunId
from swarm.membership.access import METHODS, CallerAccess
from swarm.membership.gate import CallGate
from swarm.network.protocols import Rpc
from swarm.schema import Empty
from swarm.security.credentials import Credential, Grant, Order, credential_for, sign_grant
from swarm.security.signing import PrivateIdentity, verify

RUN = RunId("a" * 64)
ME, ISSUER, HOLDER, OTHER, VOTER, MUTE = (PrivateIdentity(bytes([number]) * 32) for number in range(6))
POLICY = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=(str(ISSUER.peer),)))
SEED = bytes([9]) * 32


class At:
    """What the gate's peer knows."""

    def __init__(self, head: CloseRecord | None) -> None:
        self.head = head


def credential(holder: PrivateIdentity = HOLDER, **changed: Any) -> Credential:
    fields: dict[str, Any] = {
        "run": RUN, "serial": "0" * 16, "name": "ana", "role": "any", "until_step": 9, "key": PrivateIdentity(SEED).peer
    }  # fmt: skip
    return credential_for(sign_grant(Grant(**(fields | changed)), ISSUER), holder.peer, SEED)


def record(step: int = 4, *, used: tuple[Credential, ...] = (), orders: tuple[Order, ...] = ()) -> CloseRecord:
    roster = [member(VOTER), member(MUTE, mute=True), *(member(HOLDER) for _ in used)]
    return CloseRecord(
        run=RUN, step=step, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0, digests={},
        cursors={}, roster=tuple(roster), previous=NO_RECORD,
        admissions=POLICY.following(POLICY.first(), step, used, orders, [one.peer for one in roster]),
    )  # fmt: skip


def member(identity: PrivateIdentity, *, mute: bool = False) -> Member:
    return Member(peer=identity.peer, role="stage", name="x", part="stage-0", addresses=(), mute=mute)


def gate(head: CloseRecord | None = None, founder: PrivateIdentity = ISSUER) -> CallGate:
    made = CallGate(POLICY, ME.peer, None, verify)
    made.follow(At(record() if head is None else head), founder.peer)
    return made


def may(made: CallGate, caller: PeerId) -> set[CallerAccess]:
    """The kinds of methods that a caller may call."""
    found = set()
    for name, needed in METHODS.items():
        try:
            made.may(caller, Rpc(name, Empty, Empty))
        except PeerError:
            continue
        found.add(needed)
    return found


def test_every_method_that_there_is_is_in_the_table() -> None:
    names = {rpc.name for rpc in all_rpcs()}
    assert names == set(METHODS)


def test_method_that_is_not_in_the_table_is_refused_to_everybody() -> None:
    for caller in (ISSUER.peer, VOTER.peer, ME.peer):
        with pytest.raises(Refused, match="open to nobody"):
            gate().may(caller, Rpc("new/1/method", Empty, Empty))


STRANGER, OBSERVER, JOINER, MEMBER, ALL = (
    {access for access in CallerAccess if access <= most} for most in CallerAccess
)


def test_each_kind_of_caller_may_call_what_the_table_says() -> None:
    made = gate()
    made.show(HOLDER.peer, credential())
    made.show(OTHER.peer, credential(OTHER, role="observer", serial="1" * 16))
    found = {who.peer: may(made, who.peer) for who in (ISSUER, HOLDER, OTHER, VOTER, MUTE, ME)}
    assert found == {
        ISSUER.peer: JOINER, HOLDER.peer: JOINER, OTHER.peer: OBSERVER, VOTER.peer: ALL, MUTE.peer: MEMBER, ME.peer: ALL
    }  # fmt: skip
    assert may(made, PeerId("12D3KooWstranger")) == STRANGER


def test_copied_credential_serves_nobody_else() -> None:
    made = gate()
    with pytest.raises(Violation):
        made.show(OTHER.peer, credential())
    with pytest.raises(Violation):
        made.show(OTHER.peer, credential().model_copy(update={"peer": str(OTHER.peer)}))
    assert may(made, OTHER.peer) == STRANGER


@pytest.mark.parametrize(("step", "why"), [(9, "expired with step 9"), (20, "expired with step 9")])
def test_expired_credential_says_so_and_admits_nobody(step: int, why: str) -> None:
    made = gate(record(step))
    with pytest.raises(Unadmitted, match=why):
        made.show(HOLDER.peer, credential())
    assert may(made, HOLDER.peer) == STRANGER


def test_credential_that_expires_while_its_holder_waits_admits_it_no_more() -> None:
    made, at = gate(), At(record())
    made.follow(at, ISSUER.peer)
    made.show(HOLDER.peer, credential())
    assert may(made, HOLDER.peer) == JOINER
    at.head = record(20)
    assert may(made, HOLDER.peer) == STRANGER


def test_member_stays_whatever_has_expired() -> None:
    assert may(gate(record(50, used=(credential(),))), HOLDER.peer) == ALL


def test_joiner_that_may_be_a_member_by_now_is_told_to_ask_again() -> None:
    made = gate()
    made.show(HOLDER.peer, credential())
    with pytest.raises(Busy):
        made.may(HOLDER.peer, Rpc("pipeline/1/forward", Empty, Empty))


def test_order_cuts_a_member_off_before_any_record_says_so() -> None:
    made, gone = gate(record(4, used=(credential(),))), list[PeerId]()
    made.expel = lambda peer, reason: gone.append(peer)
    order = Order(verb="revoke", run=RUN, name="ana", serial="0" * 16, until_step=9).with_signature(ISSUER)
    assert made.take(order) == order
    assert made.take(order) is None, "it is no news"
    assert gone == [HOLDER.peer]
    assert may(made, HOLDER.peer) == STRANGER
    with pytest.raises(Unadmitted, match="revoked"):
        made.may(HOLDER.peer, Rpc("vitals/1/standing", Empty, Empty))
    assert made.orders == (order,)
    made.follow(At(record(5, used=(credential(),), orders=(order,))), ISSUER.peer)
    assert made.orders == ()
    assert may(made, HOLDER.peer) == STRANGER


def test_order_of_nobody_in_particular_is_refused() -> None:
    order = Order(verb="revoke", run=RUN, name="ana", serial="0" * 16).with_signature(OTHER)
    with pytest.raises(Refused, match="nobody who may"):
        gate().take(order)


def test_votes_of_members_add_up() -> None:
    made = gate(record(4, used=(credential(),)))  # VOTER and HOLDER vote, MUTE does not
    order = Order(verb="revoke", run=RUN, name="eve", serial="5" * 16)
    made.take(order.with_signature(VOTER))
    assert not made.orders
    made.take(order.with_signature(HOLDER))
    assert [one.signatures.keys() for one in made.orders] == [{str(VOTER.peer), str(HOLDER.peer)}]


def test_before_there_is_a_record_the_founder_leads_and_others_wait() -> None:
    made = CallGate(POLICY, ME.peer, None, verify)
    made.follow(At(None), ISSUER.peer)
    made.show(HOLDER.peer, credential())
    assert may(made, ISSUER.peer) == ALL
    assert may(made, HOLDER.peer) == JOINER
    made.follow(At(None), OTHER.peer)
    assert may(made, OTHER.peer) == STRANGER, "a founder is admitted like any other"


def test_directory_counts_whom_the_gate_knows() -> None:
    made = gate()
    assert made.vouches(VOTER.peer, None)
    assert made.vouches(ISSUER.peer, None)
    assert made.vouches(HOLDER.peer, credential())
    assert not made.vouches(OTHER.peer, None)
    assert not made.vouches(OTHER.peer, credential())
    assert not made.vouches(HOLDER.peer, credential(role="observer"))

"""The gate of a run that not everybody may join: every method, every kind of caller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.chaos.strangers.bodies import all_rpcs
from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy, Admissions
from swarm.consensus.ballot import Ballot
from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.consensus.roster import Member
from swarm.errors import Busy, PeerError, Refused, Unadmitted, Violation
from swarm.ids import ENDS, PeerId, RunId
from swarm.membership.access import METHODS, CallerAccess
from swarm.membership.gate import MAX_PENDING_EACH, CallGate, given_by_role
from swarm.membership.observer_service import Observers, ObserverService
from swarm.network.protocols import Rpc
from swarm.schema import Empty
from swarm.security.credentials import Credential, Grant, Order, credential_for, sign_grant
from swarm.security.signing import PrivateIdentity, verify
from swarm.state.checkpoints.checkpoint_service import CheckpointService, ListRequest
from swarm.state.frozen import FrozenService, FrozenStore
from swarm.state.transfer import ChunkRequest, StateDonor
from swarm.step.member.open_step import OpenStep
from swarm.step.member.position import Forking
from swarm.step.observe_messages import (
    AHEAD,
    LEAVE,
    NEXT,
    START,
    STAY,
    AheadRequest,
    LeaveRequest,
    NextRequest,
    StartRequest,
    StayRequest,
)
from tests.harness.rigs.clocks import FakeClock

RUN = RunId("a" * 64)
ME, ISSUER, HOLDER, OTHER, VOTER, MUTE = (PrivateIdentity(bytes([number]) * 32) for number in range(6))
POLICY = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=(str(ISSUER.peer),)))
SEED = bytes([9]) * 32


class At:
    """What the gate's peer knows."""

    def __init__(self, head: CloseRecord | None, fork: CloseRecord | None = None) -> None:
        self.head = head
        self.open = OpenStep(Ballot())
        self.forking = cast(Forking, SimpleNamespace(fork=None if fork is None else SimpleNamespace(point=fork)))


def credential(holder: PrivateIdentity = HOLDER, **changed: Any) -> Credential:
    fields: dict[str, Any] = {
        "run": RUN, "serial": "0" * 16, "name": "ana", "role": "any", "until_step": 9, "key": PrivateIdentity(SEED).peer
    }  # fmt: skip
    return credential_for(sign_grant(Grant(**(fields | changed)), ISSUER), holder.peer, SEED)


def record(
    step: int = 4,
    *,
    used: tuple[Credential, ...] = (),
    orders: tuple[Order, ...] = (),
    more: tuple[PrivateIdentity, ...] = (),
    lineage: int = 0,
    after: Admissions | None = None,
) -> CloseRecord:
    """A record that names the voters VOTER and ``more``, who need none here, and those who ``used`` a grant."""
    came = dict.fromkeys(PeerId(one.peer) for one in used)
    roster = [member(VOTER), member(MUTE, mute=True), *(member(HOLDER) for _ in came), *map(member, more)]
    return CloseRecord(
        run=RUN, step=step, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0, digests={},
        cursors={}, roster=tuple(roster), previous=NO_RECORD, lineage=lineage,
        admissions=POLICY.following(after or POLICY.first(), step, used, orders, [one.peer for one in roster]),
    )  # fmt: skip


def revocation(serial: str = "0" * 16, **changed: Any) -> Order:
    return Order(**{"verb": "revoke", "run": RUN, "name": "ana", "serial": serial, "until_step": 9, **changed})


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


def test_order_cuts_a_member_off_before_any_record_says_so() -> None:
    made, gone = gate(record(4, used=(credential(),), more=(OTHER,))), list[PeerId]()
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
    order = revocation().with_signature(OTHER)
    with pytest.raises(Refused, match="nobody who may"):
        gate().take(order)


def test_votes_of_members_add_up() -> None:
    made = gate(record(4, used=(credential(),)))  # VOTER and HOLDER vote, MUTE does not
    order = revocation("5" * 16)
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
    assert made.attests(VOTER.peer, None)
    assert made.attests(ISSUER.peer, None)
    assert made.attests(HOLDER.peer, credential())
    assert not made.attests(OTHER.peer, None)
    assert not made.attests(OTHER.peer, credential())
    assert not made.attests(HOLDER.peer, credential(role="observer"))


# --- orders that are not for all ------------------------------------------------------------------------------------


def test_one_voter_has_few_orders_pending_and_those_of_the_issuers_come_through() -> None:
    made = gate(record(4, more=(OTHER, HOLDER)))
    for number in range(MAX_PENDING_EACH):
        made.take(revocation(f"{number + 1:016x}").with_signature(VOTER))
    with pytest.raises(Busy, match="too few have signed"):
        made.take(revocation("f" * 16).with_signature(VOTER))
    made.take(revocation("e" * 16).with_signature(OTHER))
    order = made.take(revocation("f" * 16).with_signature(VOTER).with_signature(ISSUER))
    assert made.orders == (order,)


@pytest.mark.parametrize("peer", ["", "12D3KooW"])
def test_order_about_nobody_breaks_no_gate(peer: str) -> None:
    made = gate()
    with pytest.raises(Refused, match="is no peer id"):
        made.take(revocation("", verb="appoint", peer=peer).with_signature(ISSUER))
    assert may(made, VOTER.peer) == ALL
    assert made._pending == {}


def test_forged_signature_of_one_who_may_is_a_violation() -> None:
    forged = revocation().with_signature(OTHER).signatures[OTHER.peer]
    with pytest.raises(Violation, match="forged"):
        gate().take(revocation().model_copy(update={"signatures": {str(ISSUER.peer): forged}}))


def test_only_signatures_that_count_are_kept() -> None:
    taken = gate().take(revocation().with_signature(ISSUER).with_signature(OTHER).with_signature(VOTER))
    assert taken is not None
    assert taken.signatures.keys() == {ISSUER.peer, VOTER.peer}


def test_revocation_of_an_expired_grant_that_nobody_holds_is_refused() -> None:
    made, at = gate(), At(record(9))
    made.follow(at, ISSUER.peer)
    with pytest.raises(Refused, match="nobody holds it"):
        made.take(revocation().with_signature(ISSUER))
    at.head = record(8)
    made.take(revocation().with_signature(VOTER))
    at.head = record(9)
    assert not made.orders
    assert made._pending == {}


def test_order_waits_while_those_left_would_be_no_majority() -> None:
    made = gate(record(4, used=(credential(),)))  # VOTER and HOLDER vote
    order = made.take(revocation().with_signature(ISSUER))
    assert order is not None
    assert not made.orders
    assert made.waits(order)
    assert may(made, HOLDER.peer) == ALL
    made.follow(At(record(5, more=(OTHER,), after=made.state, used=(credential(),))), ISSUER.peer)
    assert made.orders == (order,)
    assert not made.waits(order)


def test_within_a_provisional_lineage_issuers_order_and_nothing_is_forgotten() -> None:
    made, at = gate(), At(record(4, used=(credential(),), more=(OTHER,), lineage=4))
    made.follow(at, ISSUER.peer)
    voted = revocation("5" * 16)
    for voter in (VOTER, OTHER, HOLDER):
        made.take(voted.with_signature(voter))
    assert not made.orders
    order = made.take(revocation().with_signature(ISSUER))
    assert order is not None
    at.head = record(5, used=(credential(),), orders=(order,), lineage=4, more=(OTHER,))
    assert not made.orders
    at.head = record(4, used=(credential(),), more=(OTHER,))  # the other side's history counts
    assert {one.serial for one in made.orders} == {order.serial, voted.serial}


def test_voters_of_the_fork_point_are_those_of_both_lineages() -> None:
    """Each side's newest record names its own members only."""
    made, fork = gate(), record(3, more=(OTHER, HOLDER))
    made.follow(At(record(4, lineage=4)), ISSUER.peer)
    assert may(made, OTHER.peer) == STRANGER
    made.follow(At(record(4, lineage=4), fork), ISSUER.peer)
    assert may(made, OTHER.peer) == ALL


# --- coming back ----------------------------------------------------------------------------------------------------


def test_member_comes_back_after_its_invite_has_expired() -> None:
    used = record(4, used=(credential(),))
    made = gate(record(20, after=used.admissions))
    assert HOLDER.peer not in made.members
    made.show(HOLDER.peer, credential())
    assert may(made, HOLDER.peer) == JOINER


def test_revoked_peer_comes_back_with_another_invite() -> None:
    gone = list[PeerId]()
    out = record(5, orders=(revocation(),), after=record(4, used=(credential(),)).admissions)
    made = gate(out)
    made.expel = lambda peer, reason: gone.append(peer)
    with pytest.raises(Unadmitted, match="revoked"):
        made.show(HOLDER.peer, credential())
    gone.clear()
    again = credential(serial="7" * 16)
    assert made.attests(HOLDER.peer, again)
    assert not made.attests(HOLDER.peer, credential())
    made.show(HOLDER.peer, again)
    assert may(made, HOLDER.peer) == JOINER
    made.follow(At(record(6, used=(again,), after=out.admissions)), ISSUER.peer)
    assert may(made, HOLDER.peer) == ALL
    assert not gone


def test_revoked_peer_with_another_invite_does_not_end_itself() -> None:
    gone = list[PeerId]()
    made = CallGate(POLICY, HOLDER.peer, credential(serial="7" * 16), verify)
    made.expel = lambda peer, reason: gone.append(peer)
    made.observed(record(5, orders=(revocation(),), after=record(4, used=(credential(),)).admissions))
    assert made.step == 6
    assert not gone


def test_forged_credential_is_verified_once() -> None:
    asked = list[str]()

    def count(peer: PeerId, data: bytes, signature: bytes) -> bool:
        asked.append(peer)
        return False

    made = CallGate(POLICY, ME.peer, None, count)
    made.follow(At(record()), ISSUER.peer)
    for _ in range(3):
        assert not made.attests(HOLDER.peer, credential())
        with pytest.raises(Violation, match="forged"):
            made.show(HOLDER.peer, credential())
    assert asked == [ISSUER.peer]


def test_observer_fetches_nothing_of_the_model() -> None:
    made = gate()
    made.show(HOLDER.peer, credential())
    made.show(OTHER.peer, credential(OTHER, role="observer", serial="1" * 16))
    made.may_fetch(HOLDER.peer, "stage-0")
    with pytest.raises(Refused, match="a part of the model is for a joiner"):
        made.may_fetch(OTHER.peer, "stage-0")


@pytest.mark.parametrize(("role", "part", "other"), [("stage", "stage-1", "ends"), ("trainer", "ends", "stage-1")])
def test_joiner_fetches_what_its_role_holds_and_no_more(role: str, part: str, other: str) -> None:
    made = gate()
    made.show(OTHER.peer, credential(OTHER, role=role))
    made.may_fetch(OTHER.peer, part)
    with pytest.raises(Refused, match=f"{other} is not for who joins as {role}: that takes an invite as .*, or as any"):
        made.may_fetch(OTHER.peer, other)


def test_what_an_organisation_keeps_to_itself_is_given_to_its_own_whoever_else_is_a_member() -> None:
    mine, other = credential(organisation="acme"), credential(OTHER, organisation="mary", serial="1" * 16)
    owned = replace(POLICY, owners={"stage-1": "acme"})
    state = owned.following(owned.first(), 1, [mine], [], [HOLDER.peer])
    made = CallGate(owned, ME.peer, None, verify)
    made.follow(At(record(used=(mine,)).model_copy(update={"admissions": state})), ISSUER.peer)
    made.show(OTHER.peer, other)
    made.may_fetch(HOLDER.peer, "stage-1")
    made.may_fetch(ME.peer, "stage-1")
    made.show(VOTER.peer, credential(VOTER, organisation="acme", serial="2" * 16))
    for stranger in (OTHER, VOTER, ISSUER):  # a member is of the organisation that its record says
        made.may_fetch(stranger.peer, "stage-0")
        with pytest.raises(Refused, match="stage-1 is an expert that acme keeps to itself"):
            made.may_fetch(stranger.peer, "stage-1")
    made.show(OTHER.peer, credential(OTHER, organisation="acme", serial="3" * 16))
    made.may_fetch(OTHER.peer, "stage-1")


@pytest.mark.parametrize("role", ["stage", "trainer", "any"])
def test_whatever_hands_out_parts_gives_joiners_those_of_their_role_alone(role: str, tmp_path: Path) -> None:
    made = gate()
    made.show(OTHER.peer, credential(OTHER, role=role))
    store = FrozenStore(tmp_path / "frozen")
    services = (StateDonor(FakeClock()), CheckpointService(tmp_path), FrozenService(store, {ENDS: "b" * 64}))
    methods = {one.rpc.name: one for service in services for one in given_by_role(service, made).methods()}
    asked = {name for name in methods if name.endswith(("/describe", "/chunk"))}
    assert asked == {name for name in METHODS if name.startswith(("state/", "checkpoint/", "frozen/"))} - {
        "checkpoint/1/list", "checkpoint/1/record"
    }  # fmt: skip
    for part in ("stage-0", ENDS):
        body = ChunkRequest(part=part, step=0, digest="b" * 64, chunk=0)
        for name in asked:
            admit = methods[name].admit
            assert admit is not None
            if role in ("any", "trainer" if part == ENDS else "stage"):
                admit(OTHER.peer, body, 0)
            else:
                with pytest.raises(Refused, match=f"{part} is not for who joins as {role}"):
                    admit(OTHER.peer, body, 0)
    for method in methods.values():
        assert method.admit is not None
        with pytest.raises(Violation, match="no payload"):
            method.admit(ISSUER.peer, ListRequest(), 1)


ABOUT_A_PART = {
    START: StartRequest(part="stage-0"),
    NEXT: NextRequest(part="stage-0", step=3),
    AHEAD: AheadRequest(part="stage-0", step=3),
    STAY: StayRequest(part="stage-0", had=3),
    LEAVE: LeaveRequest(part="stage-0"),
}


@pytest.mark.parametrize("role", ["observer", "stage", "trainer"])
def test_followers_of_a_part_are_those_whose_role_holds_it(role: str) -> None:
    """The updates of a part are as good as its gradients: of a part that it may not fetch a joiner gets none."""
    made, clock = gate(), FakeClock()
    made.show(OTHER.peer, credential(OTHER, role=role))
    donor = StateDonor(clock)
    observers = ObserverService(cast(Any, None), donor, cast(Any, None), Observers(donor, clock))
    methods = {method.rpc: method for method in given_by_role(observers, made).methods()}
    assert {rpc for rpc in methods if "part" in rpc.request.model_fields} == set(ABOUT_A_PART)
    for rpc, body in ABOUT_A_PART.items():
        admit = cast(Any, methods[rpc].admit)
        if role == "stage":
            admit(OTHER.peer, body, 0)
        else:
            with pytest.raises(Refused, match="is for a joiner" if role == "observer" else "who joins as trainer"):
                admit(OTHER.peer, body, 0)
    cast(Any, methods[START].admit)(OTHER.peer, StartRequest(part=None), 0)
    cast(Any, methods[NEXT].admit)(OTHER.peer, NextRequest(part=None, step=3), 0)

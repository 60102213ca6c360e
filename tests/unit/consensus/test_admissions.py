"""Who may take part: grants, credentials, orders, and what records say of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from swarm.consensus.admissions import MAX_HOLDERS, AdmissionConfig, AdmissionPolicy, Admissions, Holder, check_orders
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Member, Roster
from swarm.errors import PeerError, Refused, Violation
from swarm.ids import PartName, RunId
from swarm.membership.founding_record import Origin, founding_record
from swarm.security.credentials import (
    MAX_CREDENTIAL_CHARS,
    Credential,
    Grant,
    Order,
    SignedGrant,
    credential_for,
    credential_of,
    sign_grant,
)
from swarm.security.signing import PrivateIdentity, verify

RUN = RunId("a" * 64)
ISSUER, SECOND, HOLDER, OTHER, KEY = (PrivateIdentity(bytes([number]) * 32) for number in range(5))
SEED = bytes([4]) * 32
POLICY = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=(str(ISSUER.peer),)))
NAMED = AdmissionPolicy(RUN, AdmissionConfig(mode="organisation", issuers=(str(ISSUER.peer),)))
STATE = POLICY.first()


def grant(**changed: Any) -> Grant:
    fields: dict[str, Any] = {
        "run": RUN,
        "serial": "0" * 16,
        "name": "ana",
        "role": "any",
        "until_step": 10,
        "key": KEY.peer,
    }
    return Grant(**(fields | changed))


def credential(holder: PrivateIdentity = HOLDER, **changed: Any) -> Credential:
    return credential_for(sign_grant(grant(**changed), ISSUER), holder.peer, SEED)


def member(identity: PrivateIdentity = HOLDER, role: Any = "stage") -> Member:
    return Member(peer=identity.peer, role=role, name="ana", part="stage-0", addresses=())


def refusal(shown: Credential | None, step: int = 5, state: Admissions = STATE, who: Member | None = None) -> str:
    try:
        POLICY.check_joiner(state, step, who or member(), shown, verify)
    except PeerError as error:
        return error.reason
    return ""


def test_credential_comes_back_from_its_text() -> None:
    assert credential_of(credential().text()) == credential()
    assert len(credential().text()) < MAX_CREDENTIAL_CHARS / 4
    for text in ("", "{}", "x" * (MAX_CREDENTIAL_CHARS + 1)):
        with pytest.raises(Violation):
            credential_of(text)


def test_joiner_with_a_credential_may_join_until_its_step() -> None:
    assert refusal(credential()) == ""
    assert refusal(credential(), step=10) == ""
    assert "expired with step 10" in refusal(credential(), step=11)


def test_joiner_without_a_credential_may_not_join_and_an_issuer_may() -> None:
    assert "shows none" in refusal(None)
    assert refusal(None, who=member(ISSUER)) == ""


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (credential(OTHER), "shows the credential of"),
        (credential().model_copy(update={"peer": str(HOLDER.peer), "proof": credential(OTHER).proof}), "is not of"),
        (credential(run="b" * 64), "for another run"),
        (credential_for(sign_grant(grant(), SECOND), HOLDER.peer, SEED), "0 of this run's issuers"),
        (credential(role="trainer"), "for trainer, not stage"),
        (credential(role="observer"), "for observer, not stage"),
    ],
)
def test_joiner_with_a_credential_that_is_not_its_own_may_not_join(shown: Credential, why: str) -> None:
    assert why in refusal(shown)


def test_grant_that_was_changed_is_forged() -> None:
    signed = sign_grant(grant(), ISSUER)
    longer = SignedGrant(grant=grant(until_step=999), signatures=signed.signatures)
    assert "forged" in refusal(credential_for(longer, HOLDER.peer, SEED))


def test_credential_needs_as_many_issuers_as_the_manifest_says() -> None:
    two = AdmissionConfig(mode="token", issuers=(str(ISSUER.peer), str(SECOND.peer)), threshold=2)
    policy = AdmissionPolicy(RUN, two)
    alone = sign_grant(grant(), ISSUER)
    with pytest.raises(Refused, match="1 of this run's issuers signed it, and 2 must"):
        policy.check_signed(policy.first(), credential_for(alone, HOLDER.peer, SEED), verify)
    both = sign_grant(grant(), SECOND, alone.signatures)
    policy.check_signed(policy.first(), credential_for(both, HOLDER.peer, SEED), verify)


def test_organisation_admits_named_peers_only() -> None:
    with pytest.raises(Refused, match="admits the peers that it names"):
        NAMED.check_signed(NAMED.first(), credential(), verify)
    named = credential_for(sign_grant(grant(key=HOLDER.peer), ISSUER), HOLDER.peer, None)
    NAMED.check_signed(NAMED.first(), named, verify)
    with pytest.raises(Refused, match="granted to"):
        credential_for(named.signed, OTHER.peer, None)


def test_first_use_binds_a_grant_to_its_peer() -> None:
    state = POLICY.following(STATE, 5, [credential()], [], [HOLDER.peer])
    assert state.by_serial["0" * 16].peer == HOLDER.peer
    assert refusal(credential(), state=state) == "", "it comes back"
    assert "used by another peer" in refusal(credential(OTHER), state=state, who=member(OTHER))


def test_record_forgets_who_expired_and_is_gone_and_keeps_its_members() -> None:
    state = POLICY.following(STATE, 5, [credential()], [], [HOLDER.peer])
    assert POLICY.following(state, 50, [], [], [HOLDER.peer]).holders == state.holders
    assert POLICY.following(state, 50, [], [], []).holders == state.holders, "there is room"
    assert POLICY.following(state, 9, [], [], []).holders == state.holders


def test_run_with_many_holders_takes_no_more() -> None:
    many = tuple(
        Holder(serial=f"{n:016x}", peer=OTHER.peer, name="x", role="any", vote=True, until_step=99)
        for n in range(1, MAX_HOLDERS + 1)
    )
    full = Admissions(issuers=STATE.issuers, holders=many)
    assert "some must expire or be revoked" in refusal(credential(), state=full)


def test_founding_takes_credentials_of_all_members_but_issuers() -> None:
    members = [member(), member(ISSUER, "bootstrap")]
    said = POLICY.founding(None, 0, [credential()], [one.peer for one in members])
    POLICY.check_founding(said, 0, members, [credential()], verify)
    with pytest.raises(Refused, match="shows none"):
        POLICY.check_founding(said, 0, members, [], verify)
    with pytest.raises(Refused, match="not those"):
        POLICY.check_founding(STATE, 0, members, [credential()], verify)
    with pytest.raises(Refused, match="what the manifest does not"):
        POLICY.check_founding(None, 0, members, [credential()], verify)
    silent = credential(vote=False)
    with pytest.raises(Refused, match="a vote that its credential does not"):
        POLICY.check_founding(POLICY.founding(None, 0, [silent], [HOLDER.peer]), 0, members, [silent], verify)


def test_resumed_run_believes_what_its_checkpoint_said_and_admits_nobody_new_without_a_credential() -> None:
    before = POLICY.following(STATE, 5, [credential()], [], [HOLDER.peer])
    said = POLICY.founding(before, 7, [], [HOLDER.peer])
    POLICY.check_founding(said, 7, [member()], [], verify)
    with pytest.raises(Refused, match="shows none"):
        POLICY.check_founding(said, 7, [member(), member(OTHER)], [], verify)


def test_run_that_is_resumed_from_its_first_step_begins_with_who_comes_then() -> None:
    def begun(origin: Origin, holder: PrivateIdentity, serial: str) -> CloseRecord:
        shown = credential(holder, serial=serial)
        record = founding_record(RUN, Roster([member(holder)]), dataclasses.replace(origin, rules=POLICY), [shown])
        POLICY.check_founding(record.admissions, 0, record.members.members, [shown], verify)
        return record

    first = begun(Origin(digests={PartName("stage-0"): "0" * 64}), HOLDER, "0" * 16)
    again = begun(Origin.after(first), OTHER, "1" * 16)
    assert again.admissions is not None
    assert [one.peer for one in again.admissions.holders] == [OTHER.peer]


# --- orders ----------------------------------------------------------------------------------------------------------


def order(*signers: PrivateIdentity, **changed: Any) -> Order:
    fields: dict[str, Any] = {"verb": "revoke", "run": RUN, "name": "ana", "serial": "0" * 16, "until_step": 10}
    made = Order(**(fields | changed))
    for signer in signers:
        made = made.with_signature(signer)
    return made


def test_issuer_revokes_and_nobody_comes_in_with_that_grant_again() -> None:
    check_orders(POLICY, STATE, 5, [order(ISSUER)], [], verify)
    state = POLICY.following(STATE, 5, [], [order(ISSUER)], [])
    assert "was revoked" in refusal(credential(), state=state)
    with pytest.raises(Refused):
        check_orders(POLICY, state, 6, [order(ISSUER)], [], verify)
    assert POLICY.following(state, 11, [], [], []).revoked == (), "it has expired"


def test_majority_of_the_voters_revokes_where_issuers_are_gone() -> None:
    voters = [HOLDER.peer, OTHER.peer, SECOND.peer]
    with pytest.raises(Refused):
        check_orders(POLICY, STATE, 5, [order(HOLDER)], voters, verify)
    check_orders(POLICY, STATE, 5, [order(HOLDER, OTHER)], voters, verify)
    with pytest.raises(Refused):
        check_orders(POLICY, STATE, 5, [order(HOLDER, KEY)], voters, verify)
    signed = order(HOLDER)  # which does not count under another voter's name
    twice = signed.model_copy(update={"signatures": dict.fromkeys(map(str, voters), signed.signatures[HOLDER.peer])})
    with pytest.raises(Refused):
        check_orders(POLICY, STATE, 5, [twice], voters, verify)


def test_issuers_are_appointed_and_dismissed_and_no_such_order_counts_twice() -> None:
    appoint = order(ISSUER, verb="appoint", serial="", peer=str(SECOND.peer))
    state = POLICY.following(STATE, 5, [], [appoint], [])
    assert set(state.issuers) == {ISSUER.peer, SECOND.peer}
    dismiss = order(SECOND, verb="dismiss", serial="", peer=str(SECOND.peer), after=1)
    check_orders(POLICY, state, 6, [dismiss], [], verify)
    back = POLICY.following(state, 6, [], [dismiss], [])
    assert back.issuers == STATE.issuers
    with pytest.raises(Refused):
        check_orders(POLICY, back, 7, [appoint], [], verify)


def test_open_run_says_nothing_of_admission() -> None:
    assert AdmissionPolicy(RUN).founding(None, 0, [], []) is None
    AdmissionPolicy(RUN).check_founding(None, 0, [member()], [], verify)


# --- what a founder, a leader and a voter may not do ------------------------------------------------------------------


def test_one_invite_founds_for_one_peer() -> None:
    twice = [credential(), credential(OTHER)]
    members = [member(), member(OTHER)]
    said = POLICY.founding(None, 0, twice, [one.peer for one in members])
    with pytest.raises(Refused, match="each is for one"):
        POLICY.check_founding(said, 0, members, twice, verify)
    with pytest.raises(Refused, match="that are no members"):
        POLICY.check_founding(POLICY.founding(None, 0, twice, [HOLDER.peer]), 0, [member()], twice, verify)


def test_run_without_a_vote_does_not_begin() -> None:
    silent = credential(vote=False)
    muted = [member().model_copy(update={"mute": True}), member(ISSUER).model_copy(update={"part": None})]
    said = POLICY.founding(None, 0, [silent], [one.peer for one in muted])
    with pytest.raises(Refused, match="none of the members may vote"):
        POLICY.check_founding(said, 0, muted, [silent], verify)


def test_resumed_run_takes_a_kept_credential_that_has_expired() -> None:
    before = POLICY.following(STATE, 5, [credential()], [], [HOLDER.peer])
    said = POLICY.founding(before, 50, [credential()], [HOLDER.peer])
    assert said is not None
    assert said.holders == before.holders
    POLICY.check_founding(said, 50, [member()], [credential()], verify)


def test_holder_comes_back_after_its_grant_has_expired_and_nobody_else_does() -> None:
    state = POLICY.following(POLICY.following(STATE, 5, [credential()], [], [HOLDER.peer]), 50, [], [], [])
    assert refusal(credential(), step=51, state=state) == ""
    assert "used by another" in refusal(credential(OTHER), step=51, state=state, who=member(OTHER))
    assert "expired" in refusal(credential(serial="1" * 16), step=51, state=state)


def test_holders_that_are_gone_and_expired_make_room_first() -> None:
    def holder(number: int, until: int) -> Holder:
        return Holder(serial=f"{number:016x}", peer=f"p{number}", name="x", role="any", vote=True, until_step=until)

    held = (holder(1, 3), holder(2, 3), *(holder(number, 99) for number in range(3, MAX_HOLDERS + 1)))
    state = POLICY.following(Admissions(issuers=STATE.issuers, holders=held), 5, [credential()], [], ["p1"])
    assert len(state.holders) == MAX_HOLDERS
    assert held[0] in state.holders
    assert held[1] not in state.holders
    assert state.holders[-1].peer == HOLDER.peer


def test_revoked_holder_stays_revoked_after_its_grant_has_expired() -> None:
    held = POLICY.following(STATE, 5, [credential()], [], [HOLDER.peer])
    check_orders(POLICY, held, 50, [order(ISSUER)], [], verify)
    state = POLICY.following(held, 50, [], [order(ISSUER)], [])
    for step in (51, 52):
        state = POLICY.following(state, step, [], [], [])
    assert "was revoked" in refusal(credential(), step=53, state=state)
    assert POLICY.due(state, 53, [order(ISSUER)], [], verify) == []


def test_order_to_revoke_what_has_expired_and_nobody_holds_is_never_due() -> None:
    assert POLICY.due(STATE, 10, [order(ISSUER)], [], verify) == [order(ISSUER)]
    assert POLICY.due(STATE, 11, [order(ISSUER)], [], verify) == []


@pytest.mark.parametrize("peer", ["", "12D3KooW", "0" * 64])
def test_no_issuer_is_appointed_that_is_no_peer(peer: str) -> None:
    assert POLICY.due(STATE, 5, [order(ISSUER, verb="appoint", serial="", peer=peer)], [], verify) == []


def test_orders_that_would_leave_no_majority_wait_for_the_records_after() -> None:
    holders = [HOLDER, OTHER, KEY]
    used = [credential(who, serial=f"{n}" * 16) for n, who in enumerate(holders)]
    state = POLICY.following(STATE, 5, used, [], [who.peer for who in holders])
    electors = [who.peer for who in (*holders, SECOND)]
    orders = [order(ISSUER, serial=f"{n}" * 16) for n in range(2)]
    first = POLICY.due(state, 6, orders, [], verify, electors=electors)
    assert len(first) == 1, "two of four are no majority"
    out = state.by_serial[first[0].serial].peer
    state = POLICY.following(state, 6, [], first, [peer for peer in electors if peer != out])
    left = [peer for peer in electors if peer != out]
    assert POLICY.due(state, 7, orders, [], verify, electors=left) == [one for one in orders if one not in first]


def test_one_whose_other_invite_counts_is_not_banned() -> None:
    state = POLICY.following(STATE, 5, [credential()], [order(ISSUER)], [])
    assert state.banned(state.void).keys() == {HOLDER.peer}
    state = POLICY.following(state, 6, [credential(serial="1" * 16, vote=False, until_step=8)], [], [HOLDER.peer])
    assert state.banned(state.void) == {}
    assert POLICY.mute(state, HOLDER.peer, None), "its newest says so"

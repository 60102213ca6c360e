"""What a running peer answers to swarm invite, revoke and issuers in a run that admits by invite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.console.words import CommandError, command_name
from peers.control.admitting import Admitting
from peers.invites.invite import Granted, Invite, parse_invite
from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy
from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.consensus.roster import Member, Roster
from swarm.errors import ConfigError
from swarm.ids import PeerId, RunId
from swarm.membership.gate import CallGate
from swarm.security.credentials import Order, check_credential
from swarm.security.signing import PrivateIdentity, verify
from tests.harness.rigs.clocks import FakeClock

RUN = RunId("ab" * 32)
GIVEN = 1_700_000_000
FIRST, SECOND, THIRD, HOST = (PrivateIdentity(bytes([number]) * 32) for number in range(1, 5))


def admitting(me: PrivateIdentity, tmp_path: Path, *issuers: PrivateIdentity, threshold: int = 1) -> Admitting:
    """A peer of a run whose members are the first three."""
    config = AdmissionConfig(mode="token", issuers=tuple(str(one.peer) for one in issuers), threshold=threshold)
    policy = AdmissionPolicy(RUN, config)
    roster = tuple(
        Member(peer=one.peer, role="stage", name=name, part="stage-0", addresses=())
        for one, name in ((FIRST, "first"), (SECOND, "second"), (THIRD, "third"))
    )
    head = CloseRecord(
        run=RUN, step=4, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0, digests={}, cursors={},
        roster=roster, previous=NO_RECORD, admissions=policy.first(),
    )  # fmt: skip
    gate = CallGate(policy, me.peer, None, verify)
    at = SimpleNamespace(
        head=head, open=SimpleNamespace(ballot=SimpleNamespace(vote=None)), forking=SimpleNamespace(fork=None)
    )
    gate.follow(cast(Any, at), me.peer)
    manifest = SimpleNamespace(run_id=RUN, admission=config, run=SimpleNamespace(steps=100, copies=0), batch=None)
    clock = FakeClock()
    clock.now = GIVEN
    return Admitting(
        manifest=cast(Any, manifest),
        identity=me,
        service=cast(Any, SimpleNamespace(gate=gate, give=gate.take)),
        membership=cast(Any, SimpleNamespace(situation=SimpleNamespace(tokens_per_s=0.0), roster=Roster(roster))),
        issued=tmp_path / f"{me.peer}.json",
        clock=clock,
    )


def invite(granted: Granted) -> str:
    return Invite(run=RUN, name="tiny", at=(f"/ip4/127.0.0.1/tcp/4001/p2p/{FIRST.peer}",), granted=granted).text()


def revoked(peer: Admitting, name: str) -> str:
    return peer.revoke(name, {}, sure=True).said


def used_by(peer: Admitting, *names: tuple[str, PrivateIdentity]) -> None:
    """Have these used an invite for that name, in the newest record."""
    granted = [peer.grant({"for": name, "id": str(one.peer)}) for name, one in names]
    used = [one.credential(PeerId(one.grant.grant.key)) for one in granted]
    gate, at = peer.service.gate, cast(Any, peer.service.gate._at)
    roster = [member.peer for member in at.head.roster]
    state = gate.rules.following(gate.state, 4, used, [], [*roster, HOST.peer])
    at.head = at.head.model_copy(update={"admissions": state})


def carried_out(peer: Admitting) -> Sequence[Order]:
    return peer.service.gate.orders


def test_invite_that_two_issuers_signed_admits_where_two_must(tmp_path: Path) -> None:
    first = admitting(FIRST, tmp_path, FIRST, SECOND, threshold=2)
    second = admitting(SECOND, tmp_path, FIRST, SECOND, threshold=2)
    alone = first.grant({"for": "ana", "role": "trainer"})
    both = parse_invite(second.countersign(invite(alone))).granted
    assert both is not None
    assert both.seed == alone.seed
    issuers = (FIRST.peer, SECOND.peer)
    check_credential(both.credential(HOST.peer), run=RUN, issuers=issuers, threshold=2, named=False, verify=verify)
    said = revoked(second, "ana")
    assert "ana is revoked" not in said, "one of two issuers takes back nothing alone"
    assert "2 issuers decide it (1 signed): " in said


def test_invite_to_another_run_and_one_of_no_issuer_are_not_signed(tmp_path: Path) -> None:
    first, other = admitting(FIRST, tmp_path, FIRST), admitting(THIRD, tmp_path, FIRST)
    granted = first.grant({"for": "ana"})
    elsewhere = Invite(run=RunId("cd" * 32), name="x", at=(f"/ip4/127.0.0.1/tcp/1/p2p/{FIRST.peer}",))
    with pytest.raises(CommandError, match="not for the run"):
        first.countersign(elsewhere.text())
    with pytest.raises(CommandError, match="no issuer"):
        other.countersign(invite(granted))
    with pytest.raises(ConfigError):
        first.countersign("swarm1:nothing")


def test_invite_without_an_organisation_is_refused_where_microbatches_stay_in_one(tmp_path: Path) -> None:
    first = admitting(FIRST, tmp_path, FIRST)
    first.service.gate.rules = dataclasses.replace(first.service.gate.rules, own_routes=True)
    with pytest.raises(CommandError, match="needs an organisation") as refused:
        first.grant({"for": "ana"})
    assert refused.value.next.endswith("invite --for ana --organisation NAME")
    assert first.grant({"for": "ana", "organisation": "st-mary"}).grant.grant.organisation == "st-mary"
    first.grant({"for": "eve", "role": "observer"})


def test_invite_for_a_peer_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--id = 'foo': expected a peer id"):
        admitting(FIRST, tmp_path, FIRST).grant({"for": "zoe", "id": "foo"})


def test_issuer_appoints_another_alone(tmp_path: Path) -> None:
    first = admitting(FIRST, tmp_path, FIRST)
    assert first.issuers({}) == FIRST.peer
    assert "is an issuer with the next record" in first.issuers({"appoint": SECOND.peer})
    assert [(one.verb, one.peer) for one in carried_out(first)] == [("appoint", SECOND.peer)]
    assert "is no issuer with the next record" in admitting(FIRST, tmp_path, FIRST, SECOND).issuers(
        {"dismiss": SECOND.peer}
    )


def test_members_appoint_an_issuer_by_more_than_half_of_the_votes(tmp_path: Path) -> None:
    voters = [admitting(one, tmp_path, HOST) for one in (SECOND, THIRD)]
    assert "1 of the 3 that vote has agreed, and it takes 2" in voters[0].issuers({"appoint": SECOND.peer})
    assert not carried_out(voters[0])
    (vote,) = voters[0].service.gate.votes
    voters[1].service.gate.take(vote)
    assert "is an issuer with the next record" in voters[1].issuers({"appoint": SECOND.peer})
    assert [one.peer for one in carried_out(voters[1])] == [SECOND.peer]


def test_member_that_revokes_is_told_that_a_vote_began_who_can_agree_and_what_they_type(tmp_path: Path) -> None:
    issuer = admitting(HOST, tmp_path, HOST)
    granted = issuer.grant({"for": "ana", "id": str(THIRD.peer)})
    used = [granted.credential(THIRD.peer)]
    voters = [admitting(one, tmp_path, HOST) for one in (FIRST, SECOND)]
    for voter in voters:
        at = cast(Any, voter.service.gate._at)
        state = voter.service.gate.rules.following(
            voter.service.gate.state, 4, used, [], [FIRST.peer, SECOND.peer, THIRD.peer]
        )
        at.head = at.head.model_copy(update={"admissions": state})
    said = revoked(voters[0], "ana")
    assert "a vote to revoke ana was begun: 1 of the 3 that vote has agreed, and it takes 2" in said
    agreed, can = said.splitlines()[1].split("; of those that vote, ")
    assert agreed.strip() == "agreed: first"
    assert set(can.split(" can agree")[0].split(" and ")) == {"second", "third"}
    assert "or one issuer decides it alone: 12D3Ko…" in can
    assert f"{command_name()} revoke ana" in said.splitlines()[2]
    assert f"{command_name()} status --peer first" in said
    assert voters[0].report().votes == (("revoke", "ana", 1, 3),)
    (vote,) = voters[0].service.gate.votes
    voters[1].service.gate.take(vote)
    assert voters[1].report().votes == (("revoke", "ana", 1, 3),), "it is seen where nobody has agreed yet"
    assert "ana is revoked" in revoked(voters[1], "ana")
    assert voters[1].report().votes == ()


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        ({"appoint": "12D3"}, "expected a peer id"),
        ({"appoint": str(FIRST.peer)}, "already an issuer"),
        ({"dismiss": str(SECOND.peer)}, "not an issuer"),
        ({"appoint": str(SECOND.peer), "dismiss": str(FIRST.peer)}, "given together"),
        ({"dismiss": str(FIRST.peer)}, "last issuer"),
    ],
)
def test_what_cannot_be_ordered_is_refused_with_the_cause(tmp_path: Path, request_: dict[str, str], cause: str) -> None:
    with pytest.raises((CommandError, ConfigError), match=cause):
        admitting(FIRST, tmp_path, FIRST).issuers(request_)


def test_who_neither_issues_nor_votes_orders_nothing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="was refused"):
        admitting(HOST, tmp_path, FIRST).issuers({"appoint": str(PeerId(HOST.peer))})


def test_revocation_tells_an_unused_invite_from_a_member_and_from_one_that_left(tmp_path: Path) -> None:
    issuer = admitting(FIRST, tmp_path, FIRST)
    issuer.grant({"for": "unused"})
    used_by(issuer, ("member", SECOND), ("left", HOST))
    unused = "the invite for unused is revoked: by the newest record nobody had joined with it, and now nobody can"
    assert revoked(issuer, "unused") == unused
    assert "out of the roster with the next record" in revoked(issuer, "member")
    assert revoked(issuer, "left") == "left is revoked: it is no member now, and cannot come back with its invite"
    with pytest.raises(CommandError, match="'unused' is revoked already"):
        revoked(issuer, "unused")


@pytest.mark.parametrize("called", ["second", str(SECOND.peer), str(SECOND.peer)[:14]])
def test_peer_is_revoked_by_what_it_is_called_too_and_no_other_with_it(tmp_path: Path, called: str) -> None:
    issuer = admitting(FIRST, tmp_path, FIRST)
    used_by(issuer, ("ana", SECOND), ("ana", THIRD))
    assert f"{called}, who has the invite for ana, is revoked" in revoked(issuer, called)
    by_serial = issuer.service.gate.state.by_serial
    assert [by_serial[one.serial].peer for one in carried_out(issuer)] == [SECOND.peer]
    with pytest.raises(CommandError, match="is revoked already"):
        revoked(issuer, called)


def test_name_that_is_of_an_invite_and_of_another_peer_is_not_revoked_but_asked_about(tmp_path: Path) -> None:
    issuer = admitting(FIRST, tmp_path, FIRST)
    used_by(issuer, ("third", SECOND), ("ana", THIRD))
    with pytest.raises(CommandError, match="'third' fits several peers") as caught:
        revoked(issuer, "third")
    assert str(THIRD.peer) in caught.value.check
    assert not carried_out(issuer)
    with pytest.raises(CommandError, match="'first' is an issuer") as caught:
        revoked(issuer, "first")
    assert caught.value.next == f"{command_name()} issuers --dismiss {FIRST.peer}"


def test_revocation_that_takes_the_last_holder_of_a_part_asks_first(tmp_path: Path) -> None:
    issuer = admitting(FIRST, tmp_path, FIRST)
    used_by(issuer, ("ana", SECOND), ("zoe", THIRD))
    assert issuer.revoke("ana", {}, sure=False).said
    away: dict[PeerId, str] = {FIRST.peer: "it is silent", SECOND.peer: "it is silent"}
    asked = issuer.revoke("zoe", away, sure=False)
    assert asked.said == ""
    assert asked.asks.startswith("nobody but third holds stage-0: the run would wait for a replica of stage-0: ")
    assert len(carried_out(issuer)) == 1
    assert "zoe is to be revoked" in issuer.revoke("zoe", away, sure=True).said


def test_report_tells_invites_that_nobody_used_and_when_they_were_given_also_after_a_restart(tmp_path: Path) -> None:
    issuer = admitting(FIRST, tmp_path, FIRST)
    for role in ("stage", "trainer"):
        issuer.grant({"for": "ana", "role": role})
    issuer.grant({"for": "zoe"})
    waiting = (("ana", "stage", 100, GIVEN), ("ana", "trainer", 100, GIVEN), ("zoe", "any", 100, GIVEN))
    assert issuer.report().invited == waiting
    again = admitting(FIRST, tmp_path, FIRST)
    assert again.report().invited == waiting
    revoked(again, "zoe")
    assert again.report().invited == waiting[:2]
    at = cast(Any, again.service.gate._at)
    at.head = at.head.model_copy(update={"step": 100})
    assert again.report().invited == (), "they have expired"


def test_grants_that_were_noted_without_their_time_are_known(tmp_path: Path) -> None:
    signed = admitting(FIRST, tmp_path, FIRST).grant({"for": "ana"}).grant
    again = admitting(FIRST, tmp_path, FIRST)
    again.issued.write_text(f"{signed.model_dump_json()}\n")
    assert again.report().invited == (("ana", "any", 100, 0),)


def test_expired_invite_that_nobody_used_is_not_revoked(tmp_path: Path) -> None:
    issuer = admitting(FIRST, tmp_path, FIRST)
    issuer.grant({"for": "ana"})
    at = cast(Any, issuer.service.gate._at)
    at.head = at.head.model_copy(update={"step": 100})
    with pytest.raises(CommandError, match="fits no peer"):
        revoked(issuer, "ana")

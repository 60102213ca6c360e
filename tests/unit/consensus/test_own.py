"""Parts that an organisation keeps to itself: who may hold, feed, copy or move to them, and what becomes of them while
nobody holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.consensus.admissions import AdmissionConfig, AdmissionPolicy, Admissions, Holder
from swarm.consensus.changes import (
    Admission,
    ChangeRules,
    Changes,
    OpenStepFacts,
    Reassign,
    RosterRules,
    admission_bytes,
)
from swarm.consensus.copies import copy_duties
from swarm.consensus.placement import Candidate, assign_stages, without_memory
from swarm.consensus.records import CloseRecord, Contribution
from swarm.consensus.roster import ROUTES, Member, Roster, lost_parts, part_lost
from swarm.errors import Refused, Violation
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.security.credentials import Credential, Grant, SignedGrant
from swarm.step.blocked import awaited_holders, awaited_near
from swarm.step.decisions import given_up, gone_back, kept_digests
from swarm.step.leader.requests import ChangeRequests
from swarm.step.moves import MoveRules
from swarm.step.rules import StepRules
from tests.harness.rigs.consensus import RUN
from tests.harness.rigs.consensus import record as any_record

SPLIT = SplitConfig(
    stages=2, variants=(1, 2), route_by="domain", domains=("law", "code"), own={"code": "acme"}, ends="private"
)
FIRST, LAW, CODE = SPLIT.parts[:3]
HELD = {"a1": FIRST, "a2": FIRST, "w1": LAW, "w2": LAW, "c1": CODE, "tw": ENDS, "tc": ENDS}
OWNERS = {str(part): organisation for part, organisation in SPLIT.owners.items()}
POLICY = AdmissionPolicy(RUN, AdmissionConfig(mode="token", issuers=("F",)), owners=OWNERS)
ANY, STATE = bytes(64), "d" * 64
RULES = ChangeRules(RosterRules(RUN, 20, admission=POLICY), lambda peer, data, signature: True)


def member(peer: str, part: PartName | None = None, **more: int) -> Member:
    part = HELD[peer] if part is None else part
    role = "trainer" if part == ENDS else "stage"
    return Member(peer=peer, role=role, name=peer, part=part, addresses=(), choice=int(peer == "tc"), **more)


def grant(peer: str, organisation: str) -> Credential:
    made = Grant(run=RUN, serial=peer.encode().hex().ljust(16, "0"), name=peer, organisation=organisation, role="any",
                 until_step=99, key="K")  # fmt: skip
    return Credential(signed=SignedGrant(grant=made, signatures={"F": "0" * 128}), peer=peer)


def roster(*left_out: str, **moved: PartName) -> Roster:
    holders = tuple(Holder.of(grant(peer, "acme" if peer in ("c1", "tc") else "mary")) for peer in HELD)
    state = Admissions(issuers=("F",), holders=holders, owners=OWNERS)
    return Roster((member(peer, moved.get(peer)) for peer in HELD if peer not in left_out), state)


def now(*left_out: str, lost: tuple[str, ...] = ()) -> OpenStepFacts:
    return OpenStepFacts(9, roster(*left_out), "0" * 64, lost=[PeerId(peer) for peer in lost])


def join(peer: str, part: PartName, organisation: str, state: str | None = None, choice: int = 0) -> Admission:
    role = "trainer" if part == ENDS else "stage"
    who = Member(peer=peer, role=role, name=peer, part=part, addresses=(), choice=choice)
    return Admission(step=9, member=who, signature=ANY, credential=grant(peer, organisation), state=state)


STEP_RULES = StepRules(run=RUN, steps=9, target=1, max_share=1.0, max_tokens=9, max_members=9, reproducible=False,
                       optimizer=OptimizerConfig(), choices=2)  # fmt: skip


def done(trainer: str, *hosts: str, choice: int) -> Contribution:
    microbatch = MicrobatchId(PeerId(trainer), "0" * 16, 0, 0)
    return Contribution(microbatch=microbatch, tokens=5, loss_sum=1.0, route=("a1", *hosts), choice=choice)


def test_variant_is_kept_by_who_keeps_all_domains_that_pass_it() -> None:
    assert SPLIT.owners == {CODE: "acme"}
    more = {"domains": ("law", "code", "poems", "trade"), "own": {"code": "acme", "trade": "acme", "law": "mary"}}
    assert SPLIT.model_copy(update=more).owners == {CODE: "acme"}, "law and poems pass one"
    more["own"] = {"code": "acme", "trade": "mary"}
    assert SPLIT.model_copy(update=more).owners == {}
    assert SplitConfig(stages=2).owners == {}


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (join("x", CODE, "mary"), "keeps to itself, and x is not of acme"),
        (join("x", CODE, ""), "x is not of acme"),
        (join("x", ENDS, "mary", choice=1), "keeps to itself, and x is not of acme"),
        (join("x", CODE, "acme", STATE), "is held by others, who give its state"),
        (join("x", LAW, "mary", STATE), "is held by others, who give its state"),
    ],
)
def test_who_is_not_of_its_owner_neither_holds_nor_feeds_it(request_: Admission, why: str) -> None:
    for fine in (join("x", CODE, "acme"), join("x", LAW, "acme"), join("x", ENDS, "acme", choice=1)):
        RULES.check_admission(now(), fine)
    with pytest.raises(Refused, match=why):
        RULES.check_admission(now(), request_)


def test_issuer_is_of_no_organisation_by_what_it_shows_of_itself() -> None:
    forged = join("F", CODE, "acme")
    with pytest.raises(Refused, match="F is not of acme"):
        RULES.check_admission(now(), forged)
    assert POLICY.may_hold(POLICY.first(), [grant("F", "acme"), grant("x", "acme")]) == {CODE: {"x"}}


def test_host_of_a_part_that_nobody_holds_says_which_state_it_has_and_signs_that() -> None:
    away = now("c1")
    assert away.roster.paused == (CODE,)
    with pytest.raises(Refused, match="does not say which state it has"):
        RULES.check_admission(away, join("x", CODE, "acme"))
    RULES.check_admission(away, join("x", CODE, "acme", STATE))
    with pytest.raises(Refused, match="not of acme"):
        RULES.check_admission(away, join("x", CODE, "mary", STATE))
    said = {admission_bytes(RUN, 9, "", member("c1"), state) for state in (None, STATE, "e" * 64)}
    assert len(said) == 3
    RULES.check_admission(now(lost=("c1",)), join("c1", CODE, "acme", STATE))
    with pytest.raises(Refused, match="does not say which state it has"):
        RULES.check_admission(now(lost=("c1",)), join("c1", CODE, "acme"))


def test_of_two_that_join_with_different_states_of_it_the_first_is_taken() -> None:
    one, alike, other = (
        join(peer, CODE, "acme", state) for peer, state in zip("xyz", (STATE, STATE, "e" * 64), strict=True)
    )
    changes = RULES.gather(roster("c1"), [other, alike, one], ())
    assert [join.member.peer for join in changes.joins] == ["x", "y"]
    with pytest.raises(Violation, match="two states"):
        RULES.apply(now("c1"), Changes(joins=(one, other)))


def test_nobody_else_moves_to_it_copies_it_or_has_its_hosts_moved() -> None:
    there = roster()
    for peer, fine in (("w1", False), ("c1", True)):
        wanted = Reassign(step=9, peer=peer, part=CODE if peer == "w1" else LAW, signature=ANY)
        if fine:
            RULES.check_reassign(now(), wanted)
        else:
            with pytest.raises(Refused, match="keeps to itself"):
                RULES.check_reassign(now(), wanted)
    assert set(copy_duties(there, 4)) == {FIRST, LAW, ENDS}
    before = any_record(roster=there.members, admissions=there.admissions, passed={CODE: 1 << 20})
    planned = MoveRules(on=True, copies=4, steps=99).planned(before, Changes())
    joins = Changes(joins=(join("x", CODE, "acme"), join("y", LAW, "mary")))
    assert CODE not in {*planned.values(), *MoveRules(on=True, copies=4, steps=99).planned(before, joins).values()}
    assert PeerId("c1") not in planned


def test_step_that_lost_its_last_host_is_given_up_without_it_and_its_trainers_wait_while_others_feed() -> None:
    there, lost = roster(), (PeerId("c1"),)
    assert there.feeding() == ("tc", "tw")
    assert there.feeding(lost) == ("tw",)
    following = RULES.give_up(now(), Changes(absent=lost))
    assert CODE not in following.parts
    after = Roster(following.members, there.admissions)
    assert (after.paused, after.feeding()) == ((CODE,), ("tw",))
    assert awaited_near(after, PeerId("tc"), ()).startswith(f"a host of {CODE}, which acme keeps to itself")
    assert "next: acme starts one" in awaited_near(after, PeerId("tc"), ())
    assert awaited_near(after, PeerId("tw"), ()) == ""
    said = awaited_holders(there, {PeerId("c1"): "gone"}, 4)
    assert said == f"a host of {CODE}: c1 (gone); acme keeps it to itself; next: acme starts one where it was"
    with pytest.raises(Refused, match="nobody holds stage-0"):
        RULES.give_up(now(), Changes(absent=(PeerId("a1"), PeerId("a2"))))
    alone = replace(now("tw"))
    with pytest.raises(Refused, match="no trainer's microbatches have a way"):
        RULES.give_up(alone, Changes(absent=lost))


def test_run_does_not_go_on_without_a_stage_of_which_every_expert_is_kept_and_nobody_has_one() -> None:
    owners = {str(LAW): "mary", str(CODE): "acme"}
    there = roster()
    assert there.admissions is not None
    said = there.admissions.model_copy(update={"owners": owners})
    rules = ChangeRules(
        RosterRules(RUN, 20, admission=replace(POLICY, owners={LAW: "mary", CODE: "acme"})), lambda *_: True
    )
    both, one = Roster(there.members, said), Roster(roster("c1").members, said)
    assert one.feeding() == ("tw",)
    for before, absent in ((both, ("c1", "w1", "w2")), (one, ("w1", "w2"))):
        lost = tuple(map(PeerId, absent))
        with pytest.raises(Refused, match="no trainer's microbatches have a way"):
            rules.give_up(OpenStepFacts(9, before, "0" * 64), Changes(absent=lost))
        without = Roster((one for one in before.members if one.peer not in absent), said)
        assert (without.feeding(), without.columns()[1]) == ((), ())
        with pytest.raises(Violation, match="a route of 1 replicas through 2 stages"):
            STEP_RULES.check_contribution(without, done("tw", choice=0))


def test_run_in_which_nobody_feeds_any_more_waits_for_a_trainer_or_its_owners_host() -> None:
    away = now("c1")
    assert lost_parts(away.roster, ()) == ()
    assert lost_parts(away.roster, ("tw",)) == (ROUTES,)
    said = awaited_holders(away.roster, {PeerId("tw"): "gone"}, 4)
    assert said.startswith("a trainer to join (as a trainer): tc, tw are lost or waiting; or a host of stage-1.v1of2")
    assert "the last trainer with a way is lost" in str(part_lost(away.roster, ROUTES, {PeerId("tw"): "gone"}))
    lost = (PeerId("tw"),)
    with pytest.raises(Refused, match="no trainer's microbatches have a way"):
        RULES.give_up(away, Changes(absent=lost))
    saves = Changes(absent=lost, joins=(join("x", CODE, "acme", STATE),))
    following = RULES.give_up(away, saves)
    assert following.replicas(CODE) == ("x",)
    digests = {str(part): "e" * 64 for part in SPLIT.parts}
    before = any_record(roster=away.roster.members, admissions=away.roster.admissions, digests=digests)
    assert given_up(before, before.hash(), 0, following, saves, 20).digests == digests | {CODE: STATE}


def test_step_that_lost_its_last_host_while_nobody_else_feeds_is_given_up_once_one_is_back() -> None:
    alone, lost = now("tw"), (PeerId("c1"),)
    saves = Changes(absent=lost, joins=(join("c1", CODE, "acme", STATE),))
    following = RULES.give_up(alone, saves)
    assert (following.replicas(CODE), Roster(following.members, roster().admissions).feeding()) == (("c1",), ("tc",))
    digests = {str(part): "e" * 64 for part in SPLIT.parts}
    before = any_record(roster=alone.roster.members, admissions=alone.roster.admissions, digests=digests)
    assert given_up(before, before.hash(), 0, following, saves, 20).digests == digests | {CODE: STATE}


def test_of_two_that_come_back_to_a_lost_one_with_different_states_one_is_taken() -> None:
    alone = now("tw")
    requests = ChangeRequests(replace(STEP_RULES, admission=POLICY, max_members=20), lambda *_: True, alone)
    asked = [join("y", CODE, "acme", "e" * 64), join("x", CODE, "acme", STATE)]
    changes, following = requests.give_up((), asked, (PeerId("c1"),))
    assert ([one.member.peer for one in changes.joins], following.replicas(CODE)) == (["x"], ("x",))


def test_its_last_host_may_leave_where_others_feed() -> None:
    assert RULES.spared(roster(), [], "c1") is None
    assert "no other trainer's microbatches have a way" in str(RULES.spared(roster("tw"), [], "c1"))
    assert "only replica" in str(RULES.spared(roster("a2"), [], "a1"))
    assert "no other trainer's microbatches have a way" in str(RULES.spared(roster("c1"), [], "tw"))


def test_its_digest_stays_until_a_host_says_another() -> None:
    away = roster("c1")
    before: CloseRecord = any_record(
        roster=away.members, admissions=away.admissions, digests={CODE: STATE, LAW: "e" * 64}
    )
    assert kept_digests(before, Changes()) == {CODE: STATE}
    assert kept_digests(before, Changes(joins=(join("x", CODE, "acme", "f" * 64),))) == {CODE: "f" * 64}


def test_run_goes_back_to_no_checkpoint_without_its_host_whoever_else_could_be_given_it() -> None:
    digests = {str(part): "e" * 64 for part in SPLIT.parts}
    away, whole = roster("c1"), roster()
    to = any_record(roster=whole.members, admissions=whole.admissions, digests=digests)
    head = any_record(step=to.step + 2, roster=away.members, admissions=away.admissions, digests=digests)
    with pytest.raises(Refused, match=f"no host of {CODE} is there, which acme keeps to itself"):
        gone_back(head, 0, Roster(away.members), (), 9, to)
    back = gone_back(head, 0, Roster(whole.members), (), 9, to)
    assert back.members.replicas(CODE) == ("c1",)


def test_trainer_feeds_the_domain_that_it_joined_with_alone() -> None:
    STEP_RULES.check_contribution(roster(), done("tc", "c1", choice=1))
    with pytest.raises(Violation, match="of a trainer of choice 0"):
        STEP_RULES.check_contribution(roster(), done("tw", "c1", choice=1))


def candidates(*hosts: str, choice: int | None = None) -> list[Candidate]:
    return [Candidate(peer=peer, role="stage", name=peer, stage=1, addresses=(), choice=choice) for peer in hosts]


@pytest.mark.parametrize("choice", [None, 0, 1])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_first_roster_gives_it_to_its_owner_whoever_wishes_for_it(place: int, choice: int | None) -> None:
    own: dict[PartName, set[str]] = {CODE: {f"h{place}"}}
    hosts = candidates("h0", "h1", "h2", "h3", choice=choice)
    found, _ = assign_stages(hosts, SPLIT.parts[:3], own=own)
    assert found.replicas(CODE) == (f"h{place}",)
    assert {member.choice for member in found.members} == {0}, "that of trainers alone"
    none = without_memory(candidates("h0", "h1", "h2"), SPLIT.parts[:3], own={CODE: set()})
    assert none.endswith("an organisation keeps it to itself")


@pytest.mark.parametrize("owners", [{}, {CODE: "mary"}])
def test_run_begins_with_the_owners_that_its_manifest_names(owners: dict[str, str]) -> None:
    members = roster().members
    shown = [grant(one.peer, "acme" if one.peer in ("c1", "tc") else "mary") for one in members]
    said = POLICY.founding(None, 0, shown, [one.peer for one in members])
    assert said is not None
    POLICY.check_founding(said, 0, members, shown, lambda *_: True)
    with pytest.raises(Refused, match="what the manifest does not"):
        POLICY.check_founding(said.model_copy(update={"owners": owners}), 0, members, shown, lambda *_: True)


def test_run_does_not_begin_with_a_stranger_as_its_host() -> None:
    members = roster().members
    shown = [grant(one.peer, "mary") for one in members]
    said = POLICY.founding(None, 0, shown, [one.peer for one in members])
    with pytest.raises(Refused, match="keeps to itself, and"):
        POLICY.check_founding(said, 0, members, shown, lambda *_: True)

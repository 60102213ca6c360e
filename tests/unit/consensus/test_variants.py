"""Variants of a stage: which replicas a microbatch may pass, what counts for whom, and who judges whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from swarm.columns import RECENT, loads, passed_by
from swarm.consensus.faults import auditors
from swarm.consensus.ledger import assigned, is_reassigned, reassigned, weights
from swarm.consensus.placement import Candidate, Places, Wish, assign_stages, choose_place
from swarm.consensus.records import Contribution, rows_bytes
from swarm.consensus.roster import Member, Roster, lost_parts
from swarm.errors import Refused, Violation
from swarm.ids import ENDS, JourneyKey, MicrobatchId, PartName, PeerId, stage_part
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.step.rules import StepRules
from tests.harness.rigs.consensus import RUN

PARTS = SplitConfig(stages=2, variants=(1, 2)).parts
FIRST, LAW, CODE = PARTS[:3]
HELD = {"a1": FIRST, "a2": FIRST, "w1": LAW, "w2": LAW, "c1": CODE, "c2": CODE, "t": ENDS}


def roster(*left_out: str, **moved: PartName) -> Roster:
    return Roster(
        Member(peer=peer, role="trainer" if part == ENDS else "stage", name=peer, part=part, addresses=())
        for peer, part in (HELD | moved).items()
        if peer not in left_out
    )


def done(position: int, *route: str, choice: int = 0, early: bool = False) -> Contribution:
    microbatch = MicrobatchId(PeerId("t"), "0" * 16, 0, position)
    return Contribution(microbatch=microbatch, tokens=5, loss_sum=1.0, route=route, early=early, choice=choice)


RULES = StepRules(run=RUN, steps=9, target=1, max_share=1.0, max_tokens=9, max_members=9,
                  reproducible=False, optimizer=OptimizerConfig(), choices=4)  # fmt: skip


def test_choice_leads_to_the_replicas_of_one_variant_and_to_all_of_a_stage_that_has_one() -> None:
    there = roster()
    assert there.columns() == (("a1", "a2"), ("w1", "w2", "c1", "c2"))
    assert [there.columns(choice=choice)[1] for choice in range(4)] == [("w1", "w2"), ("c1", "c2")] * 2
    assert there.columns(out=("c1",), choice=3) == (("a1", "a2"), ("c2",))
    assert lost_parts(there, ("c1", "c2")) == (CODE,)


@pytest.mark.parametrize(
    ("one", "error", "words"),
    [
        (done(0, "a1", "c1"), Refused, "c1 is not a replica of stage 1 for choice 0"),
        (done(0, "a1", "w1", choice=3), Refused, "w1 is not a replica of stage 1 for choice 3"),
        (done(0, "a1", "w1", choice=4), Violation, "choice 4 of variants, of which there are 4"),
    ],
)
def test_contribution_of_another_variant_than_the_microbatch_chose_is_refused(
    one: Contribution, error: type[Exception], words: str
) -> None:
    RULES.check_contribution(roster(), done(0, "a1", "w1", choice=2))
    RULES.check_contribution(roster(), done(0, "a1", "c2", choice=1))
    with pytest.raises(error, match=words):
        RULES.check_contribution(roster(), one)


def test_each_variant_weighs_what_passed_it_and_holds_nothing_else() -> None:
    committed = [done(0, "a1", "w1"), done(1, "a1", "c1", choice=1), done(2, "a2", "w1", choice=2)]
    there = roster()
    assert weights(committed, there.replicas(LAW), LAW) == {"w1": 10, "w2": 0}
    assert weights(committed, there.replicas(CODE), CODE) == {"c1": 5, "c2": 0}
    assert weights(committed, there.replicas(FIRST), FIRST) == {"a1": 10, "a2": 5}
    assert [work.microbatch.position for work in assigned(1, committed, PeerId("w1"), LAW)] == [0, 2]


def test_work_of_one_that_is_gone_or_moved_to_another_variant_is_computed_again_by_its_own() -> None:
    committed = [done(at, "a1", "c1" if at % 2 else "w1", choice=at % 2, early=True) for at in range(8)]
    now = roster("w1", c1=LAW)  # c1 holds the other variant since
    counted = reassigned(committed, now.columns(), able=lambda one, peer: now.holds(peer, one.choice))
    assert {one.route[1] for one in counted if one.choice} == {"c2"}
    assert {one.route[1] for one in counted if not one.choice} == {"w2", "c1"}
    for said, one in zip(committed, counted, strict=True):
        assert is_reassigned(said, one, now.columns(choice=one.choice))
    alone = roster("c1", "c2")
    with pytest.raises(Refused, match="nobody is left at stage 1"):
        reassigned(committed, alone.columns(), able=lambda one, peer: alone.holds(peer, one.choice))


def test_what_a_trainer_signs_says_which_variants_its_microbatches_passed() -> None:
    first, other = done(0, "a1", "w1"), done(0, "a1", "w1", choice=2)
    assert rows_bytes("run", 1, "", [first]) != rows_bytes("run", 1, "", [other])


def test_only_replicas_of_the_same_variant_judge_a_hop() -> None:
    key = JourneyKey(1, done(0).microbatch, 0)
    assert auditors(roster(), key, 1, "w1") == ("w2",)
    assert set(auditors(roster(), key, 0, "a1")) == {"a2"}


def test_hosts_are_dealt_over_variants_and_a_wish_for_a_stage_is_one_for_the_variant_with_fewest() -> None:
    hosts = [Candidate(peer=f"h{at}", role="stage", name="h", stage=None if at else 1, addresses=()) for at in range(6)]
    first, why = assign_stages(hosts, PARTS[:3])
    assert sorted(map(len, map(first.replicas, PARTS[:3]))) == [2, 2, 2]
    assert (first.part_of("h0"), why[PeerId("h0")]) == (LAW, "asked for")
    with pytest.raises(Refused, match="2 stage hosts cannot hold 3"):
        assign_stages(hosts[:2], PARTS[:3])
    part, reason = choose_place(roster("c2", "a1"), PeerId("new"), "stage", Wish(1), Places(parts=PARTS))
    assert (part, reason) == (CODE, "it has the fewest replicas (1)")


def test_wish_for_a_stage_is_one_for_the_variant_with_the_fewest_replicas_for_its_load() -> None:
    busy = [done(at, "a1", "c1" if at % 4 else "w1", choice=min(at % 4, 1)) for at in range(8)]
    load = loads(PARTS, passed_by({}, PARTS, busy))
    assert load == {LAW: 3 / 10, CODE: 7 / 10}
    places = Places(parts=PARTS, load=load)
    assert choose_place(roster(), PeerId("new"), "stage", Wish(1), places)[0] == CODE
    part, reason = choose_place(roster("w2"), PeerId("new"), "stage", Wish(1), places)
    assert (part, reason) == (CODE, "it has the fewest replicas for its load (2)")
    lost = replace(places, lost=(LAW,))
    assert choose_place(roster("w1", "w2"), PeerId("new"), "stage", Wish(1), lost)[0] == LAW


def test_host_of_a_domain_holds_the_variants_that_its_microbatches_pass() -> None:
    parts = SplitConfig(stages=3, variants=(1, 2, 4), ends="hosted").parts
    of_third = Wish(choice=3)
    assert of_third.among(parts) == (stage_part(1, 1, 2), stage_part(2, 3, 4)), "no stage that all pass"
    assert Wish(0, 3).among(parts) == (FIRST,)
    assert Wish(2, 5).among(parts) == (stage_part(2, 1, 4),)
    assert Wish().among(parts) == parts
    hosts = [Candidate(peer=f"h{at}", role="stage", name="h", stage=None, addresses=()) for at in range(4)]
    says = hosts[0].model_copy(update={"choice": 1})
    first, why = assign_stages([says, *hosts[1:]], PARTS[:3])
    assert (first.part_of("h0"), why[PeerId("h0")]) == (CODE, "asked for")
    part, reason = choose_place(roster("w1", "w2"), PeerId("new"), "stage", Wish(choice=1), Places(parts=PARTS))
    assert (part, reason) == (CODE, "asked for"), "though nobody holds the other"


def test_load_of_a_variant_is_that_of_many_steps_and_one_step_moves_it_little() -> None:
    evenly = [done(at, "a1", "c1" if at % 2 else "w1", choice=at % 2) for at in range(8)]
    passed = dict[str, int]()
    for _ in range(5 * RECENT // len(evenly)):
        passed = passed_by(passed, PARTS, evenly)
    assert loads(PARTS, passed) == {LAW: 0.5, CODE: 0.5}
    one_sided = passed_by(passed, PARTS, [one.model_copy(update={"choice": 0}) for one in evenly])
    assert loads(PARTS, one_sided)[LAW] == pytest.approx(0.5 + 0.5 * len(evenly) / RECENT, rel=0.01)


@pytest.mark.parametrize("part", ["stage-1.v0of0", "stage-1.v0of1", "stage-1.v", "stage-1.v0", "stage-1.v100of200"])
def test_name_of_no_variant_is_no_part_of_a_member(part: str) -> None:
    with pytest.raises(ValidationError):
        Member(peer="a", role="stage", name="a", part=part, addresses=())

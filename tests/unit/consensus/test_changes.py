"""Who may join and leave with a step: whatever was asked, the run keeps what it needs and nobody is moved against its
will."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.consensus.changes import (
    MAX_CHANGES,
    NO_CHANGES,
    ChangeRules,
    Changes,
    Departure,
    OpenStepFacts,
    Reassign,
    RosterRules,
    reassign_bytes,
)
from swarm.consensus.roster import Roster
from swarm.errors import PeerError, Refused, Violation
from swarm.ids import PeerId, stage_part
from tests.harness.rigs.consensus import (
    BEFORE,
    CHANGE_RULES,
    NOW,
    PARTS,
    RUN,
    SEVEN,
    STEP,
    admission,
    departure,
    listed,
    sign,
    verify,
)

PLACES = [("stage", "stage-0"), ("stage", "stage-1"), ("trainer", "ends"), ("bootstrap", None)]


def reassign(peer: str, part: str, *, step: int = STEP, previous: str = BEFORE, signer: str | None = None) -> Reassign:
    signed = reassign_bytes(RUN, step, previous, peer, part)
    return Reassign(step=step, peer=peer, part=part, signature=sign(PeerId(signer or peer), signed))


def test_roster_follows_the_requests() -> None:
    changes = Changes(joins=(admission(listed("C")),), leaves=(departure("A1"), departure("F")))
    after = CHANGE_RULES.apply(NOW, changes)
    assert after.peers == ("A2", "B1", "B2", "C", "T1", "T2")
    assert CHANGE_RULES.apply(NOW, NO_CHANGES).members == SEVEN.members


def test_member_holds_another_part_from_the_record_on() -> None:
    changes = Changes(joins=(admission(listed("C")),), leaves=(departure("F"),), reassigns=(reassign("A1", "stage-1"),))
    after = CHANGE_RULES.apply(NOW, changes)
    assert after.replicas(stage_part(0)) == ("A2", "C")
    assert after.replicas(stage_part(1)) == ("A1", "B1", "B2")
    assert after["A1"].model_copy(update={"part": "stage-0"}) == SEVEN["A1"]


def test_run_does_not_end_with_a_record_that_moves_somebody() -> None:
    agreed = tuple(all_agree())
    assert Changes(leaves=agreed).end(SEVEN)
    assert not Changes(leaves=agreed, reassigns=(reassign("A1", "stage-1"),)).end(SEVEN)


FORGED: list[tuple[str, Changes, type[PeerError], str]] = [
    ("join signed by another", Changes(joins=(admission(listed("C"), signer="A1"),)), Violation, "C to join is forged"),
    ("leave signed by another", Changes(leaves=(departure("A1", signer="A2"),)), Violation, "A1 to leave is forged"),
    ("join of the step before", Changes(joins=(admission(listed("C"), step=4),)), Refused, "step 4, step 5 is open"),
    ("leave of the step before", Changes(leaves=(departure("A1", step=4),)), Refused, "A1 asks to leave in step 4"),
    ("join after another record", Changes(joins=(admission(listed("C"), previous="0" * 64),)), Violation, "forged"),
    ("leave after another record", Changes(leaves=(departure("A1", previous="0" * 64),)), Violation, "forged"),
    (
        "join dressed up as of this step",
        Changes(joins=(admission(listed("C"), step=4).model_copy(update={"step": STEP}),)),
        Violation,
        "forged",
    ),
    (
        "join moved to another part",
        Changes(joins=(admission(listed("C")).model_copy(update={"member": listed("C", part="stage-1")}),)),
        Violation,
        "forged",
    ),
    (
        "join with other addresses",
        Changes(joins=(admission(listed("C")).model_copy(update={"member": listed("C", addresses=("/ip4/1",))}),)),
        Violation,
        "forged",
    ),
    ("join of a member", Changes(joins=(admission(listed("A1")),)), Refused, "A1 is in the roster already"),
    ("leave of a stranger", Changes(leaves=(departure("X"),)), Refused, "X asks to leave"),
    ("join twice", Changes(joins=(admission(listed("C")),) * 2), Violation, "twice"),
    ("leave twice", Changes(leaves=(departure("A1"),) * 2), Violation, "twice"),
    (
        "join twice in two places",
        Changes(joins=(admission(listed("C")), admission(listed("C", part="stage-1")))),
        Violation,
        "twice",
    ),
    (
        "a member moves by leaving and joining at once",
        Changes(joins=(admission(listed("A1", part="stage-1")),), leaves=(departure("A1"),)),
        Refused,
        "in the roster already",
    ),
    ("every replica leaves", Changes(leaves=(departure("A1"), departure("A2"))), Refused, "only replica of stage-0"),
    ("every trainer leaves", Changes(leaves=(departure("T1"), departure("T2"))), Refused, "only replica of ends"),
    (
        "a replica is relieved by who joins",
        Changes(joins=(admission(listed("C")),), leaves=(departure("A1"), departure("A2"))),
        Refused,
        "only replica of stage-0",
    ),
    ("move signed by another", Changes(reassigns=(reassign("A1", "stage-1", signer="A2"),)), Violation, "forged"),
    ("move of the step before", Changes(reassigns=(reassign("A1", "stage-1", step=4),)), Refused, "cannot hold"),
    (
        "move after another record",
        Changes(reassigns=(reassign("A1", "stage-1", previous="0" * 64),)),
        Violation,
        "forged",
    ),
    (
        "move to another part than was signed",
        Changes(reassigns=(reassign("A1", "stage-0").model_copy(update={"part": "stage-1"}),)),
        Violation,
        "forged",
    ),
    ("move of a stranger", Changes(reassigns=(reassign("X", "stage-1"),)), Refused, "X cannot hold stage-1"),
    ("move to its own part", Changes(reassigns=(reassign("A1", "stage-0"),)), Refused, "holds stage-0 already"),
    ("stage host moves to the ends", Changes(reassigns=(reassign("A1", "ends"),)), Refused, "does not hold ends"),
    ("trainer moves to a stage", Changes(reassigns=(reassign("T1", "stage-0"),)), Refused, "does not hold stage-0"),
    ("move twice", Changes(reassigns=(reassign("A1", "stage-1"),) * 2), Violation, "twice"),
    (
        "move and leave",
        Changes(leaves=(departure("A1"),), reassigns=(reassign("A1", "stage-1"),)),
        Violation,
        "leaves or moves twice",
    ),
    (
        "move of one that was lost",
        Changes(reassigns=(reassign("A1", "stage-1"),), absent=(PeerId("A1"),)),
        Violation,
        "leaves or moves twice",
    ),
    (
        "every replica moves",
        Changes(reassigns=(reassign("A1", "stage-1"), reassign("A2", "stage-1"))),
        Refused,
        "A2 cannot leave its part: it holds the only replica of stage-0",
    ),
    (
        "the other replica leaves",
        Changes(leaves=(departure("A2"),), reassigns=(reassign("A1", "stage-1"),)),
        Refused,
        "only replica of stage-0",
    ),
    (
        "a replica is relieved by who moves",
        Changes(leaves=(departure("B1"), departure("B2")), reassigns=(reassign("A1", "stage-1"),)),
        Refused,
        "only replica of stage-1",
    ),
    ("more than there is room for", Changes(joins=tuple(admission(listed(p)) for p in "CDE")), Refused, "room for 9"),
]


@pytest.mark.parametrize(("changes", "error", "words"), [case[1:] for case in FORGED], ids=[case[0] for case in FORGED])
def test_changes_that_no_honest_leader_makes_are_refused(changes: Changes, error: type[PeerError], words: str) -> None:
    with pytest.raises(error, match=words):
        CHANGE_RULES.apply(NOW, changes)


def all_agree(*but: str) -> list[Departure]:
    return [departure(peer, ends=peer not in but) for peer in SEVEN.peers]


def test_when_all_members_agree_the_run_ends_with_them_in_its_roster() -> None:
    changes = CHANGE_RULES.end(SEVEN, all_agree())
    assert changes is not None
    assert changes.end(SEVEN)
    assert CHANGE_RULES.apply(NOW, changes).members == SEVEN.members


@pytest.mark.parametrize(
    ("leaves", "more"),
    [
        (all_agree()[1:], {}),
        (all_agree("F"), {}),
        (all_agree(), {"joins": (admission(listed("C")),)}),
        (all_agree()[1:], {"absent": (SEVEN.peers[0],)}),
    ],
    ids=["one stays", "one does not agree", "one joins", "one is lost"],
)
def test_run_does_not_end_unless_all_members_are_there_and_agree(leaves: list[Departure], more: dict[str, Any]) -> None:
    changes = Changes(leaves=tuple(leaves), **more)
    assert not changes.end(SEVEN)
    assert more or CHANGE_RULES.end(SEVEN, leaves) is None
    with pytest.raises(Refused, match="only replica of"):
        CHANGE_RULES.apply(NOW, changes)


def test_nobody_ends_a_run_with_what_others_signed_to_leave() -> None:
    signed_to_leave = departure("A1").model_copy(update={"ends": True})
    forged = Changes(leaves=(signed_to_leave, *all_agree()[1:]))
    assert forged.end(SEVEN)
    with pytest.raises(Violation, match="A1 to leave is forged"):
        CHANGE_RULES.apply(NOW, forged)


def test_request_that_does_not_end_the_run_is_what_peers_of_before_understand() -> None:
    assert set(departure("A1").model_dump()) == {"step", "peer", "signature"}
    assert departure("A1", ends=True).model_dump()["ends"] is True


def test_more_than_a_record_takes_leave_one_after_the_other_before_the_run_ends() -> None:
    many = Roster([listed("A"), listed("B", part="stage-1"), *(listed(f"T{i}", "trainer", "ends") for i in range(90))])
    rules, leaves = (
        ChangeRules(RosterRules(RUN, 500), verify),
        [departure(peer, ends=True) for peer in many.peers],
    )
    assert rules.end(many, leaves) is None
    after = rules.apply(OpenStepFacts(STEP, many, BEFORE), rules.gather(many, (), leaves))
    assert len(after) == len(many) - MAX_CHANGES + 2, "A and B are not spared"
    assert rules.end(after, [leave for leave in leaves if leave.peer in after]) is not None


@pytest.mark.parametrize(
    ("role", "part"),
    [
        ("stage", "stage-2"),
        ("stage", "ends"),
        ("stage", None),
        ("trainer", None),
        ("trainer", "stage-0"),
        ("bootstrap", "ends"),
    ],
)
def test_member_that_would_hold_what_its_role_does_not_is_refused(role: str, part: str | None) -> None:
    with pytest.raises(Refused, match="does not hold"):
        CHANGE_RULES.apply(NOW, Changes(joins=(admission(listed("C", role, part)),)))


def test_trainer_of_a_run_with_hosted_ends_holds_nothing_and_the_last_one_stays() -> None:
    roster = Roster([listed("A1"), listed("B1", part="stage-1"), listed("T1", "trainer", None)])
    now, rules = OpenStepFacts(STEP, roster, BEFORE), ChangeRules(RosterRules(RUN, 9), verify)
    with pytest.raises(Refused, match="only trainer"):
        rules.apply(now, Changes(leaves=(departure("T1"),)))
    with pytest.raises(Refused, match="does not hold ends"):
        rules.apply(now, Changes(joins=(admission(listed("C", "trainer", "ends")),)))
    assert "C" in rules.apply(now, Changes(joins=(admission(listed("C", "trainer", None)),)))


def test_leader_grants_no_more_than_a_record_takes() -> None:
    many = Roster([listed("A"), listed("B", part="stage-1"), *(listed(f"T{i}", "trainer", "ends") for i in range(90))])
    rules = ChangeRules(RosterRules(RUN, 500), verify)
    now = OpenStepFacts(STEP, many, BEFORE)
    leaves = [departure(f"T{i}") for i in range(90)]
    joins = [admission(listed(f"N{i}")) for i in range(90)]
    changes = rules.gather(many, joins, leaves)
    assert (len(changes.joins), len(changes.leaves)) == (MAX_CHANGES, MAX_CHANGES)
    assert len(rules.apply(now, changes)) == len(many)


def test_roster_that_is_too_large_already_shrinks_and_does_not_grow() -> None:
    rules = ChangeRules(RosterRules(RUN, 5), verify)
    changes = rules.gather(SEVEN, [admission(listed("C"))], [departure("F")])
    assert changes == Changes(leaves=(departure("F"),))
    assert len(rules.apply(NOW, changes)) == 6


places = st.sampled_from(PLACES)
rosters = st.lists(places, max_size=12).map(
    lambda more: Roster(listed(f"M{index}", role, part) for index, (role, part) in enumerate([*PLACES[:3], *more]))
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), roster=rosters, room=st.integers(0, 20))
def test_whatever_was_asked_the_leaders_changes_are_accepted_and_the_run_can_go_on(
    data: st.DataObject, roster: Roster, room: int
) -> None:
    """The checked requests of any peers, in any order: everybody applies them, and every part keeps a replica that was
    there before, the run a trainer, and the record its size."""
    leaving = data.draw(st.lists(st.sampled_from(roster.peers), unique=True))
    joining = data.draw(st.lists(places, max_size=8))
    now, rules = OpenStepFacts(STEP, roster, BEFORE), ChangeRules(RosterRules(RUN, room), verify)
    joins = [admission(listed(f"N{index}", role, part)) for index, (role, part) in enumerate(joining)]
    leaves = [departure(peer) for peer in leaving]
    for join in joins:
        rules.check_admission(now, join)

    changes = rules.gather(roster, joins, leaves)
    after = rules.apply(now, changes)

    assert len(after) <= max(room, len(roster))
    stayed = [peer for peer in roster.peers if peer in after]
    assert {roster[peer].part for peer in stayed} >= set(PARTS)
    assert any(roster[peer].role == "trainer" for peer in stayed)
    assert set(roster.peers) - set(after.peers) <= set(leaving)
    assert set(after.peers) - set(roster.peers) <= {join.member.peer for join in joins}
    for refused in set(leaving) & set(after.peers):
        assert rules.spared(roster, [leave.peer for leave in changes.leaves], refused) is not None
    # Anyone who gathers the same requests in another order grants the same.
    assert rules.gather(roster, joins[::-1], leaves[::-1]) == changes

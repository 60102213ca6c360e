"""Parts in which nobody can be called: who goes on, who waits, and what they are told."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pydantic import ValidationError

from swarm.consensus.changes import ChangeRules, Changes, RosterRules
from swarm.consensus.placement import Candidate, Places, assign_stages, choose_place
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster, can_be_called, lacks_server, serves_alone, unserved, without_server
from swarm.errors import Refused
from swarm.ids import PartName, PeerId
from swarm.models.spec import SplitConfig
from tests.harness.rigs.consensus import GENESIS, NOW, RUN, admission, listed, verify

TWO_STAGES = SplitConfig(stages=2).parts


def roster(*outgoing: bool, **more: Any) -> Roster:
    """Replicas A, B, C … of stage 0, and a trainer."""
    hosts = [listed("ABCD"[index], outgoing=each, **more) for index, each in enumerate(outgoing)]
    return Roster([*hosts, listed("T", "trainer", "ends", outgoing=True)])


def test_part_whose_replicas_only_call_others_goes_on_with_the_first_that_is_there() -> None:
    found = unserved(roster(True, False, True, True), {"A", "B"})
    assert set(found) == {"D"}
    assert "no replica of stage-0" in found["D"]
    assert "C goes on alone" in found["D"]
    assert unserved(roster(True, True), {"A", "B"}) == {}


def test_replica_that_nobody_can_call_joins_only_those_that_can_be() -> None:
    late = listed("Z", outgoing=True)
    assert lacks_server(roster(True, False), late) == ""
    assert "(as a host of stage 0, at a port opened in its firewall)" in lacks_server(roster(True), late)
    assert lacks_server(roster(True), listed("Z")) == ""
    assert lacks_server(roster(), late) == "", "the first of a part"
    assert "as a trainer" in lacks_server(roster(True), listed("Z", "trainer", "ends", outgoing=True))


def test_peer_that_only_calls_takes_a_stage_that_lets_it_in() -> None:
    there = Roster([listed("A", outgoing=True), listed("B", part="stage-1"), listed("C", part="stage-1")])
    choose = functools.partial(choose_place, there, PeerId("Z"), "stage", None)
    assert choose(Places(parts=TWO_STAGES))[0] == "stage-0"
    assert choose(Places(parts=TWO_STAGES, barred=("stage-0",)))[0] == "stage-1"
    assert choose(Places(parts=TWO_STAGES, barred=("stage-0", "stage-1")))[0] == "stage-0", "it waits there"
    assert not can_be_called(there, PartName("stage-0"))
    assert can_be_called(there, PartName("stage-1"))


def test_joining_without_a_server_is_refused_only_where_the_strategy_needs_one() -> None:
    behind = Roster([m.model_copy(update={"outgoing": True}) for m in NOW.roster.members])
    now = type(NOW)(NOW.step, behind, NOW.previous)
    changes = Changes(joins=(admission(listed("C", outgoing=True)),))
    assert "C" in ChangeRules(RosterRules(RUN, 9), verify).apply(now, changes)
    with pytest.raises(Refused, match="no replica of stage-0 can be called"):
        ChangeRules(RosterRules(RUN, 9, served=True), verify).apply(now, changes)


def test_only_server_of_a_part_does_not_leave_but_may_be_lost() -> None:
    there = roster(False, True, True)
    assert serves_alone(Roster(there.members[1:]), there["A"])
    assert not serves_alone(roster(False, True), listed("Z"))
    assert not serves_alone(roster(True), listed("Z")), "one goes on alone"
    assert not serves_alone(roster(True, True), listed("Z", outgoing=True))
    served, plain = (ChangeRules(RosterRules(RUN, 9, served=one), verify) for one in (True, False))
    assert "only replica of stage-0 that others can call" in str(served.spared(there, [], "A"))
    assert served.spared(there, [], "A", lost=True) is None
    assert plain.spared(there, [], "A") is None


def test_run_is_not_begun_without_a_server() -> None:
    assert without_server(roster(True, False)) == ""
    assert "no replica of stage-0" in without_server(roster(True, True))


def test_what_a_candidate_says_of_its_site_is_in_the_roster() -> None:
    told = Candidate(peer="A", role="stage", name="a", stage=None, addresses=(), region="eu-west", outgoing=True)
    found, _ = assign_stages([told], SplitConfig(stages=1).parts)
    assert (found["A"].region, found["A"].outgoing) == ("eu-west", True)


def test_record_in_which_nobody_says_where_it_is_has_the_hash_that_it_always_had() -> None:
    plain = GENESIS.model_dump(mode="json")
    assert all(not {"region", "outgoing"} & one.keys() for one in plain["roster"])
    assert CloseRecord.model_validate_json(GENESIS.model_dump_json()).hash() == GENESIS.hash()
    said = GENESIS.model_copy(update={"roster": (listed("A", region="eu"), *GENESIS.roster[1:])})
    assert said.hash() != GENESIS.hash()
    assert CloseRecord.model_validate_json(said.model_dump_json()) == said


@pytest.mark.parametrize("region", ["EU", "a b", "x" * 33, "ü"])
def test_region_is_short_and_plain(region: str) -> None:
    with pytest.raises(ValidationError):
        listed("A", region=region)

"""Peers on one machine: one vote, one death, no copy of what is held there; believed only where both say it."""

from __future__ import annotations

from functools import partial

import pytest
from pydantic import ValidationError

from swarm.consensus.copies import copies_of, copy_holders, fewer_copies
from swarm.consensus.placement import Candidate, Places, Wish, assign_stages, choose_place
from swarm.consensus.records import voters
from swarm.consensus.roster import Member, Roster, machines_of, tail
from swarm.ids import ENDS, PartName, PeerId, stage_part
from swarm.models.spec import SplitConfig
from swarm.schema import ID_TAIL

TWO_STAGES = SplitConfig(stages=2).parts


def peer(name: str) -> PeerId:
    return PeerId(name * ID_TAIL)


def member(name: str, part: PartName | None, beside: str = "") -> Member:
    said = tuple(tail(peer(other)) for other in beside)
    return Member(peer=peer(name), role="stage", name=name, part=part, addresses=(), beside=said)


def names(peers: tuple[PeerId, ...]) -> str:
    return "".join(one[0] for one in peers)


FIRST, SECOND = stage_part(0), stage_part(1)


def test_machine_is_what_both_say_of_each_other() -> None:
    said = {peer("a"): [tail(peer("b"))], peer("b"): [tail(peer("a"))], peer("c"): [tail(peer("a"))], peer("d"): []}
    found = machines_of(said)
    assert names(tuple(found[peer(name)] for name in "abcd")) == "aacd"


def test_member_without_others_beside_it_is_written_as_ever() -> None:
    assert "beside" not in member("a", FIRST).model_dump()
    assert member("a", FIRST, "b").model_dump()["beside"] == (tail(peer("b")),)


@pytest.mark.parametrize("bad", [("x" * 13,), ("<b>",), ("",), ("a",) * 16])
def test_what_others_say_is_bounded(bad: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        Member.model_validate(member("a", FIRST).model_dump() | {"beside": bad})


def test_machine_has_one_vote_and_keeps_it_when_its_first_peer_leaves() -> None:
    together = {"a": "bc", "b": "ac", "c": "ab", "d": "", "e": "a"}  # e says so alone
    roster = Roster(member(name, FIRST, beside) for name, beside in together.items())
    assert names(voters(roster, "")) == "ade"
    left = Roster(one for one in roster.members if one.name != "a")
    assert names(voters(left, "")) == "bde"


def test_machine_keeps_no_copy_of_what_is_held_there_nor_two_of_one() -> None:
    parts = {"a": FIRST, "b": SECOND, "c": FIRST, "d": SECOND}
    apart = Roster(member(name, part) for name, part in parts.items())
    assert {names(tuple(sorted(copy_holders(apart, part, 2)))) for part in (FIRST, SECOND)} == {"ac", "bd"}
    beside = {"a": "b", "b": "a", "c": "d", "d": "c"}
    pairs = Roster(member(name, part, beside[name]) for name, part in parts.items())
    assert fewer_copies(pairs, 2) == {FIRST: 0, SECOND: 0}  # each machine has both parts
    three = Roster([*pairs.members, member("e", None, "f"), member("f", None, "e")])
    for part in (FIRST, SECOND):
        assert len(copy_holders(three, part, 2)) == 1
    assert sum(len(copies_of(three, peer(name), 2)) for name in "ef") == 2


def test_part_is_spread_over_machines_not_peers() -> None:
    roster = Roster([member("a", FIRST, "b"), member("b", FIRST, "a"), member("c", SECOND), member("d", SECOND)])
    assert [roster.spread(part) for part in (FIRST, SECOND, ENDS)] == [1, 2, 0]


def test_who_joins_takes_a_stage_that_fits_before_one_that_is_lost() -> None:
    roster = Roster([member("a", FIRST), member("b", FIRST)])
    places = partial(Places, parts=TWO_STAGES, lost=(SECOND,))
    choose = partial(choose_place, roster, peer("c"), "stage")
    assert choose(Wish(), places())[0] == SECOND
    assert choose(Wish(), places(unfit=(SECOND,)))[0] == FIRST
    assert choose(Wish(), places(unfit=(FIRST, SECOND)))[0] == SECOND, "none fits: it says so of the one it would take"
    assert choose(Wish(1), places(unfit=(SECOND,)))[0] == SECOND, "a wish is a wish"


def test_stages_of_one_machine_differ_where_they_may() -> None:
    def candidate(name: str, beside: str) -> Candidate:
        said = tuple(tail(peer(other)) for other in beside)
        return Candidate(peer=peer(name), role="stage", name=name, stage=None, addresses=(), beside=said)

    together = [candidate("a", "c"), candidate("b", ""), candidate("c", "a"), candidate("d", "")]
    roster, _ = assign_stages(together, SplitConfig(stages=2, ends="hosted").parts)
    assert roster[peer("a")].part != roster[peer("c")].part
    assert [len(roster.replicas(stage_part(stage))) for stage in (0, 1)] == [2, 2]


def test_who_joins_takes_of_equal_stages_one_that_its_machine_does_not_hold() -> None:
    roster = Roster([member("a", FIRST, "c"), member("b", SECOND), member("t", ENDS)])
    beside = roster.parts_beside(peer("c"), (tail(peer("a")), tail(peer("b"))))
    assert beside == (FIRST,)  # b says nothing of c
    for name in "cdefg":
        places = Places(parts=TWO_STAGES, beside=beside)
        assert choose_place(roster, peer(name), "stage", Wish(), places)[0] == SECOND

"""Which parts stand in which columns of a route, and who on a route is whose neighbour."""

from __future__ import annotations

import pytest

from swarm.columns import columns, held_columns, host_parts, passes, replaced, stage_parts, standing_at, stranger, takes
from swarm.consensus.roster import Member, Roster
from swarm.ids import ENDS, PeerId, stage_part, variant_of

ANN = PeerId("ann")
A, B, C = map(PeerId, "abc")
PARTS = (ENDS, *(stage_part(at) for at in (10, 2, 0, 1, *range(3, 10))))


def test_columns_are_in_the_order_of_stages_and_private_ends_are_none() -> None:
    assert columns(PARTS) == tuple((stage_part(at),) for at in range(11))
    assert columns((ENDS, stage_part(2))) == ((), (), (stage_part(2),)), "nobody holds what is before"
    assert columns((ENDS,)) == ()


def test_parts_of_some_columns_and_their_columns_are_inverse() -> None:
    assert host_parts(PARTS, (2, 10, 11)) == (stage_part(2), stage_part(10))
    assert held_columns(host_parts(PARTS, (2, 10, 11))) == (2, 10)
    assert host_parts(PARTS) == tuple(stage_part(at) for at in range(11))
    assert held_columns((ENDS,)) == ()


def test_variants_of_a_stage_stand_in_its_column_in_their_order() -> None:
    parts = stage_parts(3, (1, 11, 2))
    eleven = tuple(stage_part(1, variant, 11) for variant in range(11))
    assert columns(reversed(parts)) == ((stage_part(0),), eleven, (stage_part(2, 0, 2), stage_part(2, 1, 2)))
    assert host_parts(parts, (2,)) == (stage_part(2, 0, 2), stage_part(2, 1, 2))
    assert [variant_of(part) for part in (*parts[:3], ENDS)] == [(0, 1), (0, 11), (1, 11), (0, 1)]
    assert [part for part in parts if takes(part, 12)] == [stage_part(0), stage_part(1, 1, 11), stage_part(2, 0, 2)]
    assert takes(ENDS, 12)
    assert stage_parts(2) == stage_parts(2, (1, 1)) == (stage_part(0), stage_part(1)), "one is called as ever"


def test_before_the_first_column_and_behind_the_last_stands_the_trainer() -> None:
    assert [standing_at((A, B), column, ANN) for column in range(-1, 3)] == [ANN, A, B, ANN]
    assert replaced((A, B), 0, C) == (C, B)


def test_route_of_another_length_passes_nobody() -> None:
    assert passes((A, B), 2, 1, B)
    assert not passes((A, B), 2, 0, B)
    assert not passes((A, B), 3, 1, B)
    assert not passes((A, B, C), 2, 1, B)


def test_stranger_is_the_first_who_may_not_stand_where_it_is_named() -> None:
    assert stranger((A, B), ((A,), (B, C))) is None
    assert stranger((B, A), ((A,), (B, C))) == (0, B)
    with pytest.raises(ValueError, match="zip"):
        stranger((A,), ((A,), (B,)))


def test_roster_finds_who_may_stand_in_its_columns_once() -> None:
    roster = Roster(Member(peer=peer, role="stage", name=peer, part="stage-0", addresses=()) for peer in (A, B))
    assert roster.columns() == ((A, B),)
    assert roster.columns() is roster.columns(), "each microbatch of a record is compared with them"
    assert roster.columns(out=[A]) == ((B,),)

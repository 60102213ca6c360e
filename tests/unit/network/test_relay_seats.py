"""What a relay gives to whom, bound by bound."""

from __future__ import annotations

import pytest

from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.network.reach.seats import RESERVED_S, RelayLimits, Seat, Seats

LIMITS = RelayLimits(
    reservations=4,
    stranger_reservations=2,
    handshakes=8,
    handshakes_per_peer=5,
    stranger_handshakes=4,
    handshakes_per_stranger=2,
    circuits=8,
    circuits_per_peer=5,
    stranger_circuits=3,
    circuits_per_stranger=2,
)


def seats_of(*members: str) -> Seats:
    made = Seats(LIMITS)
    made.may = lambda peer: peer in members
    return made


def sitting(seats: Seats, *callers: str) -> list[Seat | None]:
    return [seats.sit(PeerId(caller)) for caller in callers]


def circuits(seats: Seats, *pairs: str) -> list[bool]:
    """Whether each pair of one-letter names becomes a circuit, all at a time."""
    made = []
    for caller, target in pairs:
        seat = seats.sit(PeerId(caller))
        made.append(seats.aim(seat, PeerId(target)))
        if made[-1]:
            seat.shaking = False
        else:
            seats.leave(seat)
    return made


def test_strangers_share_few_reservations_and_members_keep_theirs() -> None:
    seats = seats_of("A", "B")
    for peer in "xy":
        seats.reserve(PeerId(peer), now=0)
    with pytest.raises(Busy, match="not members"):
        seats.reserve(PeerId("z"), now=1)
    for peer in "xAB":
        seats.reserve(PeerId(peer), now=1)
    assert set(seats.holders(now=1)) == set("xyAB")
    seats.reserve(PeerId("z"), now=RESERVED_S)  # y did not renew
    assert not seats.holds(PeerId("y"), now=RESERVED_S)


def test_nobody_is_a_member_before_the_run_says_so() -> None:
    seats = Seats(LIMITS)
    assert seats.bounded(PeerId("A"), PeerId("B"))
    seats.may = lambda peer: True
    assert not seats.bounded(PeerId("A"), PeerId("B"))


def test_streams_that_say_nothing_are_few_per_peer_and_leave_room_for_members() -> None:
    seats = seats_of("A")
    assert [seat is not None for seat in sitting(seats, "x", "x", "x", "y", "y", "z")] == [
        True, True, False, True, True, False,
    ]  # fmt: skip
    known = sitting(seats, "A", "A", "A", "A")
    assert all(known)
    assert sitting(seats, "A") == [None], "eight in all"
    assert known[0] is not None
    seats.leave(known[0])
    assert sitting(seats, "A") != [None]
    assert seats.circuits == 0, "none of these is one"


def test_streams_that_say_nothing_take_no_circuits() -> None:
    seats = seats_of("A", "B")
    assert all(sitting(seats, "x", "x", "y", "y"))
    assert circuits(seats, "AB", "AB") == [True, True]
    assert seats.circuits == 2


def test_circuits_of_strangers_are_few_each_and_together() -> None:
    seats = seats_of(*"ABCDE")
    assert circuits(seats, "xA", "xB", "xC") == [True, True, False]
    assert circuits(seats, "By", "Cz") == [True, False], "three of strangers together, whoever calls"
    assert circuits(seats, "BC", "BC", "BC", "BC") == [True, True, True, False], "five per member"


def test_circuits_in_all_are_bounded_and_come_back() -> None:
    seats = seats_of(*"ABCDEF")
    assert all(circuits(seats, *["AB"] * 4, *["CD"] * 4))
    seat = seats.sit(PeerId("E"))
    assert seat is not None
    assert not seats.aim(seat, PeerId("F"))
    seats.leave(next(each for each in seats._taken if each.caller == "A"))
    assert seats.aim(seat, PeerId("F"))

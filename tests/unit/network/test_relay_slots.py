"""What a relay gives to whom, bound by bound."""

from __future__ import annotations

import pytest

from swarm.errors import Busy
from swarm.ids import PeerId
from swarm.network.reach.relay_slots import RESERVED_S, RelayLimits, RelaySlot, RelaySlots

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


def slots_of(*members: str) -> RelaySlots:
    made = RelaySlots(LIMITS)
    made.may = lambda peer: peer in members
    return made


def sitting(slots: RelaySlots, *callers: str) -> list[RelaySlot | None]:
    return [slots.sit(PeerId(caller)) for caller in callers]


def circuits(slots: RelaySlots, *pairs: str) -> list[bool]:
    """Whether each pair of one-letter names becomes a circuit, all at a time."""
    made = []
    for caller, target in pairs:
        slot = slots.sit(PeerId(caller))
        made.append(slots.aim(slot, PeerId(target)))
        if made[-1]:
            slot.shaking = False
        else:
            slots.leave(slot)
    return made


def test_strangers_share_few_reservations_and_members_keep_theirs() -> None:
    slots = slots_of("A", "B")
    for peer in "xy":
        slots.reserve(PeerId(peer), now=0)
    with pytest.raises(Busy, match="not members"):
        slots.reserve(PeerId("z"), now=1)
    for peer in "xAB":
        slots.reserve(PeerId(peer), now=1)
    assert set(slots.holders(now=1)) == set("xyAB")
    slots.reserve(PeerId("z"), now=RESERVED_S)  # y did not renew
    assert not slots.holds(PeerId("y"), now=RESERVED_S)


def test_nobody_is_a_member_before_the_run_says_so() -> None:
    slots = RelaySlots(LIMITS)
    assert slots.bounded(PeerId("A"), PeerId("B"))
    slots.may = lambda peer: True
    assert not slots.bounded(PeerId("A"), PeerId("B"))


def test_streams_that_say_nothing_are_few_per_peer_and_leave_room_for_members() -> None:
    slots = slots_of("A")
    assert [slot is not None for slot in sitting(slots, "x", "x", "x", "y", "y", "z")] == [
        True, True, False, True, True, False,
    ]  # fmt: skip
    known = sitting(slots, "A", "A", "A", "A")
    assert all(known)
    assert sitting(slots, "A") == [None], "eight in all"
    assert known[0] is not None
    slots.leave(known[0])
    assert sitting(slots, "A") != [None]
    assert slots.circuits == 0, "none of these is one"


def test_streams_that_say_nothing_take_no_circuits() -> None:
    slots = slots_of("A", "B")
    assert all(sitting(slots, "x", "x", "y", "y"))
    assert circuits(slots, "AB", "AB") == [True, True]
    assert slots.circuits == 2


def test_circuits_of_strangers_are_few_each_and_together() -> None:
    slots = slots_of(*"ABCDE")
    assert circuits(slots, "xA", "xB", "xC") == [True, True, False]
    assert circuits(slots, "By", "Cz") == [True, False], "three of strangers together, no matter who calls"
    assert circuits(slots, "BC", "BC", "BC", "BC") == [True, True, True, False], "five per member"


def test_circuits_in_all_are_bounded_and_come_back() -> None:
    slots = slots_of(*"ABCDEF")
    assert all(circuits(slots, *["AB"] * 4, *["CD"] * 4))
    slot = slots.sit(PeerId("E"))
    assert slot is not None
    assert not slots.aim(slot, PeerId("F"))
    slots.leave(next(each for each in slots._taken if each.caller == "A"))
    assert slots.aim(slot, PeerId("F"))

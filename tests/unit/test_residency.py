"""Whose work a shared device does next, and who has to leave it."""

from __future__ import annotations

import asyncio

from swarm.clock import SystemClock
from swarm.device import DeviceThread, MeteredDevice, Seat, TakingTurns, resolve_device
from swarm.residency import Residents, TurnOrder


def served(turns: TurnOrder) -> list[str]:
    """Everybody, in the order in which they have their turn."""
    found = []
    while (part := turns.next()) is not None:
        found.append(part)
    return found


def test_part_keeps_the_device_for_a_lease_and_those_who_wait_longest_come_next() -> None:
    turns = TurnOrder(lease=2)
    for part in "abcaaabb":
        turns.wait(part)
    assert "".join(served(turns)) == "aabbcaab"


def test_part_that_nobody_else_waits_for_goes_on_beyond_its_lease() -> None:
    turns = TurnOrder(lease=1)
    for part in "aaa":
        turns.wait(part)
    assert served(turns) == ["a", "a", "a"]
    turns.wait("a")
    turns.wait("b")
    turns.give_up("a")
    assert served(turns) == ["b"]


class _Part:
    here = True

    def depart(self) -> None:
        """See Resident."""
        self.here = False


def test_two_parts_at_most_are_on_the_device_and_the_one_used_last_stays() -> None:
    first, second, third, residents = _Part(), _Part(), _Part(), Residents()
    assert [residents.use(one) for one in (first, second, first, third, first)] == [True, True, False, True, False]
    assert [first.here, second.here, third.here] == [True, False, True]
    assert residents.moves == 3


async def test_seats_have_a_device_in_leases_and_one_who_gives_up_takes_no_turn() -> None:
    device = MeteredDevice(DeviceThread(resolve_device("cpu")), SystemClock())
    turns, done = TakingTurns(), list[str]()
    seats = {name: Seat(device, turns, name) for name in "ab"}

    async def work(name: str, pieces: int) -> None:
        for _ in range(pieces):
            await seats[name].run(done.append, name)

    gives_up = asyncio.create_task(work("b", 1))
    others = [asyncio.create_task(work("a", 3)), asyncio.create_task(work("b", 2))]
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.gather(*others)
    await device.close()
    assert gives_up.cancelled()
    assert "".join(done) == "bbaaa"

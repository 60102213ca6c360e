from __future__ import annotations

import random
from collections.abc import Mapping

from swarm.consensus.roster import Role
from swarm.ids import PeerId
from swarm.membership.founder import NEWCOMERS, WaitingRoom

NOBODY: frozenset[PeerId] = frozenset()


def _crowd(stages: int = 0, trainers: int = 0) -> dict[PeerId, Role]:
    crowd: dict[PeerId, Role] = {PeerId(f"s{number}"): "stage" for number in range(stages)}
    return crowd | {PeerId(f"t{number}"): "trainer" for number in range(trainers)}


def _room(stages: int = 2, trainers: int = 1) -> WaitingRoom:
    return WaitingRoom({"stage": stages, "trainer": trainers}, random.Random(1))


def _poll(room: WaitingRoom, waiting: Mapping[PeerId, Role], here: frozenset[PeerId], now: float) -> list[PeerId]:
    asked = room.to_ask(waiting, NOBODY, now)
    for peer in asked:
        (room.answered if peer in here else room.silent)(peer, now)
    return asked


def test_waiting_room_calls_few_however_many_announce_themselves() -> None:
    room, crowd = _room(), _crowd(stages=16_000)
    assert len(room.to_ask(crowd, NOBODY, 0.0)) == NEWCOMERS


def test_waiting_room_finds_the_honest_among_the_forged() -> None:
    room, crowd = _room(), _crowd(stages=200, trainers=50)
    here = frozenset({PeerId("s3"), PeerId("s150"), PeerId("t49")})
    for poll in range(40):
        _poll(room, crowd, here, poll * 0.5)
    assert set(room.first(crowd)) == here


def test_waiting_room_first_come_first_served_and_no_more_than_places() -> None:
    room, crowd = _room(), _crowd(stages=4, trainers=2)
    for now, peer in enumerate(("s3", "t1", "s0", "s1", "t0")):
        room.answered(PeerId(peer), float(now))
    assert room.first(crowd) == ["s3", "t1", "s0"]
    assert room.to_ask(crowd, NOBODY, 9.0) == ["s3", "t1", "s0"]  # nothing is lacking: no newcomer is called

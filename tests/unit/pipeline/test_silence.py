"""Who has fallen silent: decided by one journey, for all of them."""

from __future__ import annotations

import pytest

from swarm.events import HopMoved
from swarm.ids import PeerId
from swarm.pipeline.trainer.hops import RouteState
from swarm.pipeline.trainer.pace import JourneyDeadlines, UnresponsivePeers, Work
from tests.harness.rigs.pipeline import Crew, FakeLeader

A, B = ([PeerId(f"{stage}{number}") for number in range(2)] for stage in "ab")
SLOW, OTHER = B


def test_silence_is_a_turn_without_any_word() -> None:
    silence = UnresponsivePeers()
    silence.heard(SLOW, 5.0)
    assert not silence.passed(SLOW, 4.0)
    assert SLOW not in silence
    assert silence.passed(SLOW, 5.5)
    assert SLOW in silence
    assert OTHER not in silence
    assert not silence.passed(SLOW, 5.7)  # that is no news


@pytest.mark.parametrize("how", ["heard", "tried", "forgotten"])
def test_silence_ends_with_a_word_or_another_try(how: str) -> None:
    silence = UnresponsivePeers()
    silence.lost(SLOW)
    if how == "heard":
        silence.heard(SLOW, 9.0)
    elif how == "tried":
        silence.tried(SLOW)
    else:
        silence.follow([OTHER])
    assert SLOW not in silence


def test_itinerary_does_not_wait_for_the_silent() -> None:
    way = RouteState([A[0], SLOW])
    way.begin_turn(1, 0.0, 60.0, "forward")
    assert way.overdue(1.0) == []
    assert way.overdue(1.0, {SLOW}) == [1]
    assert way.overdue(1.0, {A[0]}) == []  # it is not its turn


class FirstShort(JourneyDeadlines):
    """The first piece of each kind of work has a fifth of a second at each replica, all others a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: set[tuple[PeerId, Work]] = set()

    def seconds(self, peer: PeerId, work: Work) -> float:
        """See :class:`JourneyDeadlines`."""
        first = (peer, work) not in self._asked
        self._asked.add((peer, work))
        return 0.2 if first else 60.0


@pytest.mark.parametrize("phase", ["forward", "backward"])
async def test_replica_that_one_journey_finds_silent_is_replaced_in_all(phase: str) -> None:
    quota = 4
    crew = await Crew.of([A, B], in_flight=quota, pace=FirstShort())
    crew.strike(1, phase, crew.silence)
    leader = FakeLeader(quota)
    async with crew.working():
        await leader.fed_by(crew.side.trainer)
        await crew.settle(crew.assigned(leader))
    assert len(crew.struck) == 1, "the fault did not fire"
    moves = crew.side.events.of(HopMoved)
    assert {move.old for move in moves} == set(crew.struck)
    assert len(moves) == 2  # half of the journeys led through it
    assert len(leader.finished) == len(crew.sums()[1]) == quota


async def test_replica_that_is_doubted_or_proven_wrong_is_chosen_only_where_nobody_else_is_left() -> None:
    doubted = {B[0]}
    crew = await Crew.of([A, B], doubted=lambda: doubted)
    await crew.feed(4)
    assert crew.held(B[0]) == set()
    crew = await Crew.of([A, B])
    crew.side.trainer.avoid(B[0])
    await crew.feed(4)
    assert crew.held(B[0]) == set()
    doubted.add(B[1])
    crew = await Crew.of([A, B], doubted=lambda: doubted)
    leader = await crew.feed(4)
    assert len(leader.finished) == 4

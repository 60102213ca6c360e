"""The watch: whom it loses and why, and whom it does not. In virtual time: an hour takes no time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from swarm.errors import Refused
from swarm.ids import PeerId, RunId
from swarm.network.protocols import Answer, Method, Request
from swarm.pipeline.health import MISSES_TO_LOSE, PING_EVERY_S, PING_TIMEOUT_S, Lost, Ping, Watch, watched
from swarm.schema import Empty
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.unit.averaging.world import LoopClock, in_virtual_time

ME = PeerId("me")
OTHERS = tuple(PeerId(f"p{number}") for number in range(5))
EVERYBODY = (ME, *OTHERS)
HOUR = 3600.0
NEAR = watched(ME, EVERYBODY)
FAR = tuple(peer for peer in OTHERS if peer not in NEAR)


class Neighbour:
    """Answers pings unless ``silent``, counts them, and keeps what it is told."""

    def __init__(self, endpoint: SimEndpoint) -> None:
        self.endpoint, self.silent = endpoint, False
        self.pings = 0
        self.told: list[Lost] = []
        endpoint.mount(self)

    def methods(self) -> list[Method]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            Method(name="health/1/ping", request=Ping, handle=self._ping),
            Method(name="health/1/lost", request=Lost, handle=self._lost),
        ]

    async def _ping(self, request: Request) -> Answer:
        self.pings += 1
        if self.silent:
            await asyncio.get_running_loop().create_future()
        return Answer(Empty())

    async def _lost(self, request: Request) -> Answer:
        self.told.append(request.body)
        return Answer(Empty())

    async def tell(self, lost: PeerId, reason: str = "silent") -> None:
        await self.endpoint.call(ME, "health/1/lost", Lost(peer=lost, reason=reason), Empty, timeout_s=5)


class Ring:
    """A watch and five neighbours."""

    async def open(self) -> None:
        self.network = SimNetwork(LoopClock())
        self.neighbours: dict[PeerId, Neighbour] = {}
        for peer in EVERYBODY:
            endpoint = self.network.endpoint(peer)
            await endpoint.enter(RunId("ab" * 32))
            if peer == ME:
                self.watch = Watch(endpoint, LoopClock())
                endpoint.mount(self.watch)
            else:
                self.neighbours[peer] = Neighbour(endpoint)
        self.watch.follow(EVERYBODY)

    async def verdict(self, within_s: float = HOUR) -> tuple[PeerId, str] | None:
        try:
            async with asyncio.timeout(within_s):
                return await self.watch.run()
        except TimeoutError:
            return None


def play(story: Any, *args: Any) -> None:
    async def told() -> None:
        ring = Ring()
        await ring.open()
        work: Coroutine[Any, Any, None] = story(ring, *args)
        await work

    in_virtual_time(told())


def test_watch_with_everybody_well_loses_nobody_and_pings_only_its_neighbours() -> None:
    async def story(ring: Ring) -> None:
        assert await ring.verdict(60.0) is None
        assert all(ring.neighbours[peer].pings == pytest.approx(60 / PING_EVERY_S, abs=1) for peer in NEAR)
        assert all(ring.neighbours[peer].pings == 0 for peer in FAR)

    play(story)


@pytest.mark.parametrize("dead", [True, False], ids=["dead", "silent"])
def test_watch_loses_a_neighbour_that_does_not_answer_and_tells_the_others(dead: bool) -> None:
    async def story(ring: Ring) -> None:
        victim = NEAR[1]
        if dead:
            ring.network.kill(victim)
        ring.neighbours[victim].silent = True
        lost, reason = await ring.verdict() or (ME, "")
        assert lost == victim
        assert f"no answer to {MISSES_TO_LOSE} pings in a row" in reason
        bound = MISSES_TO_LOSE * (PING_TIMEOUT_S + PING_EVERY_S)
        assert asyncio.get_running_loop().time() <= bound
        for peer, neighbour in ring.neighbours.items():
            assert [message.peer for message in neighbour.told] == ([] if peer == victim else [victim])

    play(story)


def test_watch_leaves_a_peer_alone_that_answers_again() -> None:
    async def story(ring: Ring) -> None:
        victim = ring.neighbours[NEAR[0]]

        async def stall() -> None:
            for _ in range(20):
                victim.silent = True
                await asyncio.sleep(0.9 * (MISSES_TO_LOSE - 1) * PING_TIMEOUT_S)
                victim.silent = False
                await asyncio.sleep(2 * (PING_TIMEOUT_S + PING_EVERY_S))

        stalling = asyncio.create_task(stall())
        assert await ring.verdict(200.0) is None
        await stalling

    play(story)


def test_watch_asks_a_suspect_for_itself() -> None:
    async def story(ring: Ring) -> None:
        well, dead = FAR
        ring.network.kill(dead)
        ring.watch.suspect(well, "a call failed")
        ring.watch.suspect(dead, "a call failed")
        assert (await ring.verdict() or (ME, ""))[0] == dead
        assert ring.neighbours[well].pings == 1

    play(story)


def test_watch_suspecting_everybody_asks_everybody() -> None:
    async def story(ring: Ring) -> None:
        ring.watch.suspect_all("nobody knows")
        assert await ring.verdict(0.5) is None
        assert all(neighbour.pings == 1 for neighbour in ring.neighbours.values())

    play(story)


def test_watch_asks_at_once_whom_it_suspects_while_it_pings() -> None:
    async def story(ring: Ring) -> None:
        stalled = ring.neighbours[NEAR[0]]
        stalled.silent = True
        running = asyncio.create_task(ring.verdict(PING_TIMEOUT_S + 0.5))
        await asyncio.sleep(1.0)
        ring.watch.suspect(FAR[0], "a call failed")
        stalled.silent = False
        await running
        assert ring.neighbours[FAR[0]].pings == 1

    play(story)


def test_watch_does_not_suspect_strangers_or_itself() -> None:
    async def story(ring: Ring) -> None:
        ring.watch.suspect(PeerId("stranger"), "whoever that is")
        ring.watch.suspect(ME, "me?")
        assert await ring.verdict(10.0) is None

    play(story)


def test_watch_told_of_a_loss_checks_and_names_the_lost_one() -> None:
    async def story(ring: Ring) -> None:
        teller, dead = FAR
        ring.network.kill(dead)
        await ring.neighbours[teller].tell(dead)
        assert (await ring.verdict() or (ME, ""))[0] == dead

    play(story)


@pytest.mark.parametrize("accused", [FAR[0], ME])
def test_watch_told_of_a_loss_that_is_none_takes_the_teller_as_gone(accused: PeerId) -> None:
    async def story(ring: Ring) -> None:
        teller = FAR[1]
        await ring.neighbours[teller].tell(accused, "it does not answer me")
        lost, reason = await ring.verdict() or (ME, "")
        assert lost == teller
        assert f"saying that {accused} is gone: it does not answer me" in reason

    play(story)


def test_watch_takes_no_word_from_strangers() -> None:
    async def story(ring: Ring) -> None:
        endpoint = ring.network.endpoint("stranger")
        await endpoint.enter(RunId("ab" * 32))
        await Neighbour(endpoint).tell(NEAR[0])
        assert await ring.verdict(10.0) is None

    play(story)


def test_watch_believes_a_peer_that_leaves() -> None:
    async def story(ring: Ring) -> None:
        leaver = FAR[0]
        running = asyncio.create_task(ring.verdict())
        await asyncio.sleep(5.1)
        await ring.neighbours[leaver].tell(leaver, "it was stopped by SIGTERM")
        assert await running == (leaver, "it was stopped by SIGTERM")
        assert asyncio.get_running_loop().time() < 5.5

    play(story)


def test_watch_told_by_two_that_the_other_is_gone_takes_one_as_gone() -> None:
    async def story(ring: Ring) -> None:
        first, second = FAR
        await ring.neighbours[first].tell(second)
        await ring.neighbours[second].tell(first)
        lost, _ = await ring.verdict() or (ME, "")
        assert lost in FAR

    play(story)


def test_watch_prefers_the_one_that_left_by_itself_to_those_who_noticed() -> None:
    async def story(ring: Ring) -> None:
        noticed, left = FAR
        await ring.neighbours[noticed].tell(left)
        await ring.neighbours[left].tell(left, "stopped")
        assert await ring.verdict() == (left, "stopped")

    play(story)


def test_watch_with_a_new_roster_forgets_what_it_held_against_anyone() -> None:
    async def story(ring: Ring) -> None:
        victim = NEAR[0]
        ring.neighbours[victim].silent = True
        almost = (MISSES_TO_LOSE - 1) * (PING_TIMEOUT_S + PING_EVERY_S)
        assert await ring.verdict(almost) is None
        ring.watch.follow(EVERYBODY)
        assert await ring.verdict(PING_TIMEOUT_S + 0.5) is None
        assert (await ring.verdict() or (ME, ""))[0] == victim

    play(story)


def test_watch_of_a_roster_without_the_dead_loses_nobody() -> None:
    async def story(ring: Ring) -> None:
        ring.network.kill(NEAR[0])
        ring.watch.suspect(NEAR[0], "a call failed")
        ring.watch.follow([peer for peer in EVERYBODY if peer != NEAR[0]])
        assert await ring.verdict(60.0) is None
        ring.watch.follow(())
        ring.network.kill(NEAR[1])
        assert await ring.verdict(60.0) is None

    play(story)


def test_watch_saying_goodbye_to_a_dead_peer_does_not_fail() -> None:
    async def story(ring: Ring) -> None:
        ring.network.kill(NEAR[0])
        await ring.watch.tell_all(ME, "x" * 1000)
        for peer, neighbour in ring.neighbours.items():
            assert [(m.peer, len(m.reason)) for m in neighbour.told] == ([] if peer == NEAR[0] else [(ME, 400)])
        with pytest.raises(Refused):
            await ring.neighbours[FAR[0]].endpoint.call(ME, "health/1/nothing", Ping(), Empty, timeout_s=5)

    play(story)

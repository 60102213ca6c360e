"""The watch: whom it loses and finds again, and why, and whom it does not. In virtual time: an hour takes no time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from swarm.errors import DeadlineMissed, Unreachable
from swarm.health.heartbeat import BEAT, LONGEST_TALK_S, LOST, Heartbeat, HeartbeatReply, Lost
from swarm.health.verdicts import (
    MISSES_TO_LOSE,
    SHORTEST_LOSS_S,
    STRANGER_BEATS,
    WATCHED_PEERS,
    watched,
    watchers,
)
from swarm.health.watch import CHECK_S, PING_EVERY_S, PING_TIMEOUT_S, PROBE_EVERY_S, HealthWatch
from swarm.ids import PeerId, RunId
from swarm.network.protocols import AnyMethod
from swarm.schema import Empty
from swarm.sim.network import SimEndpoint, SimNetwork
from tests.harness.rigs.clocks import LoopClock, in_virtual_time

ME = PeerId("me")
OTHERS = tuple(PeerId(f"p{number}") for number in range(5))
EVERYBODY = (ME, *OTHERS)
NEAR = watched(ME, EVERYBODY)
FAR = tuple(peer for peer in OTHERS if peer not in NEAR)
SILENT_LOSS_S = PING_EVERY_S + MISSES_TO_LOSE * PING_TIMEOUT_S + 0.1
REFUSED_LOSS_S = PING_EVERY_S + SHORTEST_LOSS_S + PROBE_EVERY_S + 0.1


class Neighbour:
    """Answers beats unless ``silent``, counts them, and keeps what it is told."""

    def __init__(self, endpoint: SimEndpoint) -> None:
        self.endpoint, self.silent, self.late_s = endpoint, False, 0.0
        self.standing = HeartbeatReply(step=0, member=True, incarnation=1)
        self.pings = 0
        self.told: list[Lost] = []
        endpoint.mount(self)

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            BEAT.handled(self._beat),
            LOST.handled(self._lost),
        ]

    async def _beat(self, caller: PeerId, body: Heartbeat) -> HeartbeatReply:
        self.pings += 1
        if self.silent:
            await asyncio.get_running_loop().create_future()
        if self.late_s:
            await asyncio.sleep(self.late_s)
        return self.standing

    async def _lost(self, caller: PeerId, body: Lost) -> Empty:
        self.told.append(body)
        return Empty()

    async def tell(self, lost: PeerId, reason: str = "silent", *, life: int = 0) -> None:
        message = Lost(peer=lost, reason=reason, incarnation=life)
        await self.endpoint.call(ME, LOST, message, timeout_s=5)


class Ring:
    """A watch and five neighbours. ``news`` is what the watch told, with the time."""

    async def open(self) -> None:
        self.network = SimNetwork(LoopClock())
        self.neighbours: dict[PeerId, Neighbour] = {}
        self.news: list[tuple[Any, ...]] = []
        for peer in EVERYBODY:
            endpoint = self.network.endpoint(peer)
            await endpoint.enter(RunId("ab" * 32))
            if peer == ME:
                self.watch = HealthWatch(endpoint, LoopClock(), incarnation=3)
                endpoint.mount(self.watch)
            else:
                self.neighbours[peer] = Neighbour(endpoint)
        self.watch.follow(EVERYBODY)
        self.stands = (0, True)
        self.watch.report_to(self)

    # --- see :class:`swarm.health.watch.WatchListener` -----------------------------------------------------------

    def standing(self) -> tuple[int, bool]:
        return self.stands

    def lineage(self) -> int:
        return 0

    def lost(self, peer: PeerId, reason: str) -> None:
        self.news.append(("lost", peer))

    def back(self, peer: PeerId) -> None:
        self.news.append(("back", peer))

    def ahead(self, peer: PeerId, step: int) -> None:
        self.news.append(("ahead", peer, step))

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.watch.run())
        await asyncio.sleep(0)
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def watch_for(self, seconds: float) -> None:
        async with self.watching():
            await asyncio.sleep(seconds)


def ringed(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Have a test, whose first parameter is a ring, run in virtual time."""

    @functools.wraps(story)
    def play(**given: Any) -> None:
        async def told() -> None:
            ring = Ring()
            await ring.open()
            await story(ring, **given)

        in_virtual_time(told())

    seen = inspect.signature(story)
    play.__signature__ = seen.replace(parameters=list(seen.parameters.values())[1:])  # type: ignore[attr-defined]
    return play


# --- losing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [PING_TIMEOUT_S + 0.5, 2 * PING_TIMEOUT_S + 0.5])
@ringed
async def test_watch_keeps_a_neighbour_whose_every_answer_comes_late(ring: Ring, late_s: float) -> None:
    ring.neighbours[NEAR[0]].late_s = late_s
    await ring.watch_for(60.0)
    assert (ring.news, dict(ring.watch.gone)) == ([], {})
    assert NEAR[0] not in ring.watch.doubted


@ringed
async def test_watch_keeps_a_silent_neighbour_while_it_sends_and_no_longer_than_a_while(ring: Ring) -> None:
    talker = ring.neighbours[NEAR[0]]
    talker.silent = True
    async with ring.watching():
        for _ in range(int(LONGEST_TALK_S)):
            await talker.tell(FAR[0], "it says")
            await asyncio.sleep(1.0)
        assert ("lost", NEAR[0]) not in ring.news
        for _ in range(int(SILENT_LOSS_S)):
            await talker.tell(FAR[0], "it says")
            await asyncio.sleep(1.0)
        assert ("lost", NEAR[0]) in ring.news


@ringed
async def test_watch_checks_no_longer_than_some_seconds_who_sends_and_does_not_answer(ring: Ring) -> None:
    talker, time = ring.neighbours[NEAR[0]], asyncio.get_running_loop().time
    talker.silent = True

    async def talk() -> None:
        while True:
            await talker.tell(FAR[0], "it says")
            await asyncio.sleep(1.0)

    talking = asyncio.create_task(talk())
    async with ring.watching():
        for _ in range(2):
            began = time()
            await ring.watch.check([NEAR[0], NEAR[1]], "a call failed")
            assert time() - began == pytest.approx(CHECK_S)
            assert not ring.watch.gone
            assert set(ring.watch.doubted) == {NEAR[0]}
        await asyncio.sleep(LONGEST_TALK_S + SILENT_LOSS_S - time())
        assert set(ring.watch.gone) == {NEAR[0]}
    talking.cancel()


@pytest.mark.parametrize(("how", "bound_s"), [("dead", REFUSED_LOSS_S), ("silent", SILENT_LOSS_S)])
@ringed
async def test_watch_loses_a_neighbour_that_does_not_answer_tells_the_others_and_goes_on(
    ring: Ring, how: str, bound_s: float
) -> None:
    victim = NEAR[1]
    if how == "dead":
        ring.network.kill(victim)
    ring.neighbours[victim].silent = True
    async with ring.watching():
        await asyncio.sleep(bound_s)
        assert ring.news == [("lost", victim)]
        assert f"no answer to {MISSES_TO_LOSE} pings in a row" in ring.watch.gone[victim] or how == "dead"
        error = ring.watch.unanswered[victim]
        assert isinstance(error, Unreachable if how == "dead" else DeadlineMissed)
        assert ring.watch.gone[victim].endswith(f"{error.code}, {error.reason}")
        for peer, neighbour in ring.neighbours.items():
            assert [message.peer for message in neighbour.told] == ([] if peer == victim else [victim])
        second = NEAR[0]
        ring.network.kill(second)
        await asyncio.sleep(bound_s)
        assert set(ring.watch.gone) == {victim, second}


@ringed
async def test_watch_leaves_a_peer_alone_that_answers_again_in_time(ring: Ring) -> None:
    victim = ring.neighbours[NEAR[0]]
    async with ring.watching():
        for _ in range(20):
            victim.silent = True
            await asyncio.sleep(0.9 * (MISSES_TO_LOSE - 1) * PING_TIMEOUT_S)
            victim.silent = False
            await asyncio.sleep(2 * (PING_TIMEOUT_S + PING_EVERY_S))
    assert ring.news == []
    assert victim.pings > 20


# --- what others say of themselves -----------------------------------------------------------------------------------


@ringed
async def test_watch_loses_a_peer_that_was_started_anew_and_does_not_find_it_again(ring: Ring) -> None:
    victim = ring.neighbours[NEAR[0]]
    async with ring.watching():
        await asyncio.sleep(3.0)
        victim.standing = victim.standing.model_copy(update={"incarnation": 2})
        await asyncio.sleep(60.0)
        assert dict(ring.watch.gone) == {NEAR[0]: "it was started anew"}
        assert ring.news == [("lost", NEAR[0])]
        ring.watch.follow([peer for peer in EVERYBODY if peer != NEAR[0]])
        ring.watch.follow(EVERYBODY)
        await asyncio.sleep(60.0)
        assert not ring.watch.gone


@ringed
async def test_watch_told_that_a_stranger_was_started_anew_does_not_find_it_until_it_takes_part(ring: Ring) -> None:
    victim = ring.neighbours[FAR[0]]
    victim.standing = HeartbeatReply(step=0, member=False, incarnation=2)
    async with ring.watching():
        tellers = watchers(FAR[0], EVERYBODY)
        await ring.neighbours[tellers[0]].tell(FAR[0], "it was started anew")
        await asyncio.sleep(60.0)
        assert not ring.watch.gone, "one alone may speak of a former life, or lie"
        await ring.neighbours[tellers[1]].tell(FAR[0], "it was started anew")
        await asyncio.sleep(60.0)
        assert dict(ring.watch.gone) == {FAR[0]: "it was started anew"}
        victim.standing = victim.standing.model_copy(update={"member": True})
        await asyncio.sleep(2 * PING_EVERY_S)
    assert ring.news == [("lost", FAR[0]), ("back", FAR[0])]


@ringed
async def test_watch_loses_a_peer_that_does_not_take_part_any_more_and_finds_it_when_it_does(ring: Ring) -> None:
    victim = ring.neighbours[NEAR[0]]
    async with ring.watching():
        victim.standing = victim.standing.model_copy(update={"member": False})
        await asyncio.sleep((STRANGER_BEATS - 2) * PING_EVERY_S)
        assert not ring.watch.gone
        await asyncio.sleep(3 * PING_EVERY_S)
        assert dict(ring.watch.gone) == {NEAR[0]: "it does not take part any more"}
        victim.standing = victim.standing.model_copy(update={"member": True})
        await asyncio.sleep(2 * PING_EVERY_S)
    assert ring.news == [("lost", NEAR[0]), ("back", NEAR[0])]


@ringed
async def test_watch_tells_of_members_that_are_ahead(ring: Ring) -> None:
    ring.stands = (4, True)
    for peer, standing in [(NEAR[0], (5, True)), (NEAR[1], (9, False)), (NEAR[2], (4, True))]:
        step, member = standing
        ring.neighbours[peer].standing = HeartbeatReply(step=step, member=member, incarnation=1)
    await ring.watch_for(0.5)
    assert ring.news == [("ahead", NEAR[0], 5)]


# --- suspecting ------------------------------------------------------------------------------------------------------


@ringed
async def test_watch_that_does_not_run_checks_nobody(ring: Ring) -> None:
    ring.network.kill(NEAR[0])
    await ring.watch.check([NEAR[0]], "a call failed")
    ring.watch.suspect(NEAR[0], "a call failed")
    assert not ring.watch.gone


@pytest.mark.parametrize(
    "lives", [{}, {FAR[0]: 1}, dict.fromkeys(FAR, 0)], ids=["asked before", "by the roster", "old"]
)
@ringed
async def test_watch_takes_who_said_that_it_leaves_for_gone_though_it_answers_until_it_has_closed(
    ring: Ring, lives: dict[PeerId, int]
) -> None:
    leaving = ring.neighbours[FAR[0]]
    ring.watch.follow(EVERYBODY, lives)
    async with ring.watching():
        ring.watch.suspect(FAR[0], "for its life to be known")
        await asyncio.sleep(1.0)
        await leaving.tell(FAR[0], "Ctrl-C")
        await asyncio.sleep(10.0)
        assert ring.watch.gone == {FAR[0]: "Ctrl-C"}
        assert ring.news == [("lost", FAR[0])]
        leaving.standing = HeartbeatReply(step=0, member=True, incarnation=2)
        ring.watch.follow(EVERYBODY, {FAR[0]: 2})
        await asyncio.sleep(10.0)
        assert ring.watch.gone == {}


@ringed
async def test_watch_that_never_asked_who_says_that_it_leaves_takes_it_for_gone_all_the_same(ring: Ring) -> None:
    ring.watch.follow(EVERYBODY, dict.fromkeys(EVERYBODY, 0))
    async with ring.watching():
        await asyncio.sleep(1.0)
        await ring.neighbours[FAR[0]].tell(FAR[0], "Ctrl-C", life=1)
        await asyncio.sleep(10.0)
        assert ring.watch.gone == {FAR[0]: "Ctrl-C"}
        assert ring.news == [("lost", FAR[0])]


@pytest.mark.parametrize("lives", [{}, dict.fromkeys(EVERYBODY, 1)], ids=["asked before", "by the roster"])
@ringed
async def test_watch_does_not_take_a_member_for_gone_when_its_twin_gives_up(
    ring: Ring, lives: dict[PeerId, int]
) -> None:
    ring.watch.follow(EVERYBODY, lives)
    async with ring.watching():
        await asyncio.sleep(1.0)
        await ring.neighbours[NEAR[0]].tell(NEAR[0], "Ctrl-C", life=2)
        await asyncio.sleep(10.0)
        assert (ring.watch.gone, ring.news) == ({}, [])


@ringed
async def test_watch_does_not_suspect_strangers_or_itself(ring: Ring) -> None:
    async with ring.watching():
        ring.watch.suspect(PeerId("stranger"), "whoever that is")
        ring.watch.suspect(ME, "me?")
        await asyncio.sleep(10.0)
    assert ring.news == []


# --- being told ------------------------------------------------------------------------------------------------------


@ringed
async def test_watch_told_of_a_loss_by_two_needs_one_miss_of_its_own(ring: Ring) -> None:
    dead = FAR[0]
    ring.neighbours[dead].silent = True
    async with ring.watching():
        for teller in NEAR[:2]:
            await ring.neighbours[teller].tell(dead)
        assert not ring.watch.gone
        await asyncio.sleep(PING_TIMEOUT_S + 0.1)
        assert set(ring.watch.gone) == {dead}
    assert "nor to 2 others" in ring.watch.gone[dead]


@ringed
async def test_watch_takes_those_of_one_machine_for_one_witness_of_a_loss(ring: Ring) -> None:
    dead = FAR[0]
    ring.neighbours[dead].silent = True
    ring.watch.follow(EVERYBODY, machines=dict.fromkeys(NEAR[:2], NEAR[0]))
    async with ring.watching():
        for teller in NEAR[:2]:
            await ring.neighbours[teller].tell(dead)
        await asyncio.sleep(PING_TIMEOUT_S + 0.1)
        assert not ring.watch.gone
        await asyncio.sleep(MISSES_TO_LOSE * PING_TIMEOUT_S)
        assert set(ring.watch.gone) == {dead}
    assert "others" not in ring.watch.gone[dead]


@ringed
async def test_watch_told_of_a_loss_by_one_whose_word_it_is_not_tells_those_whose_it_is(ring: Ring) -> None:
    dead = next(peer for peer in FAR if ME not in watchers(peer, EVERYBODY))
    watching = watchers(dead, EVERYBODY)
    liar = next(peer for peer in OTHERS if peer not in (dead, *watching))
    ring.neighbours[dead].silent = True
    async with ring.watching():
        await ring.neighbours[liar].tell(dead)
        await asyncio.sleep(MISSES_TO_LOSE * PING_TIMEOUT_S + 1.0)
        assert set(ring.watch.gone) == {dead}
    assert all([one.peer for one in ring.neighbours[peer].told] == [dead] for peer in watching)


@pytest.mark.parametrize("accused", [FAR[0], ME])
@ringed
async def test_watch_told_of_a_loss_that_is_none_believes_nothing_and_keeps_the_teller(
    ring: Ring, accused: PeerId
) -> None:
    async with ring.watching():
        await ring.neighbours[FAR[1]].tell(accused, "it does not answer me")
        await asyncio.sleep(20.0)
    assert ring.news == []
    assert ring.neighbours[FAR[0]].pings == (1 if accused == FAR[0] else 0)


@ringed
async def test_watch_takes_no_word_from_strangers(ring: Ring) -> None:
    endpoint = ring.network.endpoint("stranger")
    await endpoint.enter(RunId("ab" * 32))
    async with ring.watching():
        stranger = Neighbour(endpoint)
        await stranger.tell(FAR[0])
        await stranger.tell(PeerId("stranger"), "I leave")
        await asyncio.sleep(10.0)
    assert ring.news == []
    assert ring.neighbours[FAR[0]].pings == 0


@ringed
async def test_watch_keeps_no_rumour_of_those_that_it_does_not_watch(ring: Ring) -> None:
    async with ring.watching():
        for number in range(50):
            await ring.neighbours[FAR[1]].tell(PeerId(f"nobody{number}"))
        assert ring.watch._roster.rumours == {}
        await ring.neighbours[watchers(FAR[0], EVERYBODY)[0]].tell(FAR[0])
        assert set(ring.watch._roster.rumours) == {FAR[0]}


@ringed
async def test_watch_believes_a_peer_that_leaves(ring: Ring) -> None:
    leaver = FAR[0]
    async with ring.watching():
        await ring.neighbours[leaver].tell(leaver, "it was stopped by SIGTERM")
        assert dict(ring.watch.gone) == {leaver: "it was stopped by SIGTERM"}
        await ring.neighbours[leaver].tell(leaver, "again")
    assert ring.news == [("lost", leaver)]


@ringed
async def test_watch_told_by_two_that_the_other_is_gone_keeps_both(ring: Ring) -> None:
    first, second = FAR
    async with ring.watching():
        await ring.neighbours[first].tell(second)
        await ring.neighbours[second].tell(first)
        await asyncio.sleep(20.0)
    assert ring.news == []


# --- rosters ---------------------------------------------------------------------------------------------------------


@ringed
async def test_watch_with_a_new_life_of_a_peer_in_the_roster_takes_it_for_who_it_is(ring: Ring) -> None:
    victim = ring.neighbours[NEAR[0]]
    lives = dict.fromkeys(EVERYBODY, 1)
    async with ring.watching():
        ring.watch.follow(EVERYBODY, lives)
        await asyncio.sleep(3.0)
        victim.standing = victim.standing.model_copy(update={"incarnation": 2})
        await asyncio.sleep(60.0)
        assert set(ring.watch.gone) == {NEAR[0]}
        ring.watch.follow(EVERYBODY, lives)
        assert set(ring.watch.gone) == {NEAR[0]}
        changed = ring.watch.changed()
        ring.watch.follow(EVERYBODY, lives | {NEAR[0]: 2})
        await changed
        await asyncio.sleep(60.0)
        assert not ring.watch.gone
    assert ring.news == [("lost", NEAR[0])]


@ringed
async def test_watch_of_a_roster_without_the_dead_loses_nobody(ring: Ring) -> None:
    async with ring.watching():
        ring.network.kill(NEAR[0])
        ring.watch.suspect(NEAR[0], "a call failed")
        ring.watch.follow([peer for peer in EVERYBODY if peer != NEAR[0]])
        await asyncio.sleep(60.0)
        ring.watch.follow(())
        ring.network.kill(NEAR[1])
        await asyncio.sleep(60.0)
    assert ring.news == []


# --- who tells whom --------------------------------------------------------------------------------------------------


def test_ring_has_everybody_watched_by_as_many_and_each_knows_by_whom() -> None:
    for size in (1, 2, 3, 4, 5, 40):
        roster = [PeerId(f"p{number}") for number in range(size)]
        for peer in roster:
            assert {one for one in roster if peer in watched(one, roster)} == set(watchers(peer, roster))
            assert len(watchers(peer, roster)) == min(WATCHED_PEERS, size - 1)
    assert watchers(PeerId("stranger"), roster) == () == watched(PeerId("stranger"), roster)


class Crowd:
    """Watches of many peers on one network; counts what they tell each other."""

    def __init__(self, size: int) -> None:
        self.network = SimNetwork(LoopClock())
        self.peers = tuple(PeerId(f"p{number}") for number in range(size))
        self.messages = 0
        self.watches: dict[PeerId, HealthWatch] = {}

    async def open(self, group: asyncio.TaskGroup) -> dict[PeerId, asyncio.Task[None]]:
        for peer in self.peers:
            endpoint = self.network.endpoint(peer)
            await endpoint.enter(RunId("ab" * 32))
            self.watches[peer] = watch = HealthWatch(endpoint, LoopClock(), incarnation=3)
            endpoint.mount(watch)
            watch.follow(self.peers)
            self._count(watch)
        return {peer: group.create_task(watch.run()) for peer, watch in self.watches.items()}

    def _count(self, watch: HealthWatch) -> None:
        tell = watch._tell_one

        async def counted(peer: PeerId, message: Lost) -> None:
            self.messages += 1
            await tell(peer, message)

        watch._tell_one = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("size", [8, 20])
@pytest.mark.parametrize("beside", ["alone", "with its watchers", "suspected by all"])
def test_crowd_learns_of_a_death_by_few_messages_also_when_the_watchers_die_with_it(size: int, beside: str) -> None:
    async def story() -> None:
        crowd = Crowd(size)
        async with asyncio.TaskGroup() as group:
            running = await crowd.open(group)
            await asyncio.sleep(5.0)
            victim = crowd.peers[0]
            dead = {victim, *(watchers(victim, crowd.peers) if beside == "with its watchers" else ())}
            for peer in dead:
                crowd.network.kill(peer)
                running.pop(peer).cancel()
            if beside == "suspected by all":
                for peer in running:
                    crowd.watches[peer].suspect(victim, "a call failed")
            await asyncio.sleep(20.0)
            assert all(set(crowd.watches[peer].gone) == dead for peer in running)
            for task in running.values():
                task.cancel()
        bound = {"alone": 3, "with its watchers": 4 * len(dead), "suspected by all": 6}[beside]
        assert 0 < crowd.messages <= bound * size

    in_virtual_time(story())

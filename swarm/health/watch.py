"""Watch which peers are there. A verdict needs evidence, not a rumour, and is taken back when the peer answers again.

:class:`~swarm.health.verdicts.Health` decides; :class:`HealthWatch` asks. Every peer asks the next few peers of a ring
over the roster once a second (cost O(k) questions a second, whatever the size), and whoever a failed call made it
suspect at once and quickly.
Those that are gone are asked too, and the next of the ring in their place: who is cut off finds out from how many.
A loss is told to all, and everybody who is told asks for himself before he believes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from swarm.clock import Clock
from swarm.errors import Busy, PeerError
from swarm.health.heartbeat import (
    BEAT,
    HEARD,
    LOST,
    PING,
    DuplicateIdentity,
    DuplicateQuery,
    Heartbeat,
    HeartbeatReply,
    Lost,
    Ping,
    Questions,
)
from swarm.health.verdicts import MISSES_TO_LOSE, Health
from swarm.ids import PeerId
from swarm.network.protocols import AnyMethod, Endpoint
from swarm.schema import Empty

WATCHED_PEERS = 3
PING_EVERY_S = 1.0
PING_TIMEOUT_S = 1.5
PROBE_EVERY_S = 0.25
CHECK_S = 8.0
"""How long whoever needs to know at once waits for it: what it takes to lose who has fallen silent, and to tell the
others. Who sends and does not answer is asked for longer; meanwhile it is doubted."""
TWIN_S = 1.5
"""How long a living twin is listened for: it asks whom it watches every second."""


@dataclass(slots=True)
class _Listening:
    """For another life than this one."""

    incarnation: int
    there: asyncio.Event = field(default_factory=asyncio.Event)


def watched(me: PeerId, roster: Sequence[PeerId], count: int = WATCHED_PEERS) -> tuple[PeerId, ...]:
    """The ``count`` peers after me on the hash ring of the roster: everybody is watched by as many."""
    ring = sorted(roster, key=lambda peer: hashlib.sha256(peer.encode()).digest())
    if me not in ring:
        return ()
    at = ring.index(me)
    following = ring[at + 1 :] + ring[:at]
    return tuple(following[:count])


class HealthWatch:
    """The ``health/1`` service and the asking. ``run`` asks until cancelled; :attr:`gone` is what it believes.

    ``stand`` gives our own standing, ``news`` is told of every change: ``lost(peer, reason)``, ``back(peer)``, and
    ``ahead(peer, step)`` of a member whose open step is beyond ours, in our ``lineage`` or the run's.
    A peer that leaves says so and why; what it says
    about another is checked, what it says about itself is believed.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock, *, incarnation: int = 1) -> None:
        self._endpoint, self._clock = endpoint, clock
        self.incarnation = incarnation
        self._health = Health()
        self._roster: tuple[PeerId, ...] = ()
        self._lives: Mapping[PeerId, int] = MappingProxyType({})
        self._gone: dict[PeerId, str] = {}
        self._rumours: dict[PeerId, str] = {}
        self._left: dict[PeerId, int | None] = {}
        self._probes: dict[PeerId, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Condition()
        self._version = 0
        self._listening: dict[PeerId, _Listening] = {}
        self.stand: Callable[[], tuple[int, bool]] = lambda: (0, True)
        self.lineage: Callable[[], int] = lambda: 0
        self.lost: Callable[[PeerId, str], None] = lambda peer, reason: None
        self.back: Callable[[PeerId], None] = lambda peer: None
        self.ahead: Callable[[PeerId, int], None] = lambda peer, step: None

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            PING.handled(self._on_ping),
            BEAT.handled(self._on_beat),
            LOST.handled(self._on_lost),
            HEARD.handled(self._on_heard),
        ]

    # --- what is believed ----------------------------------------------------------------------------------------

    @property
    def gone(self) -> Mapping[PeerId, str]:
        """Peers of the roster that do not answer, with the reason."""
        return MappingProxyType(self._gone)

    @property
    def doubted(self) -> Collection[PeerId]:
        """Peers that did not answer the last time they were asked, gone or not."""
        return self._health.missing

    def changed(self) -> Coroutine[None, None, None]:
        """Awaited, it returns when somebody is gone, or back, that was not when this was called."""
        return self._wait_changed(self._version)

    async def _wait_changed(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._version != version)

    async def check(self, peers: Collection[PeerId], reason: str) -> None:
        """Ask these at once; return when each has answered or is gone, after CHECK_S seconds at the latest: who has
        done neither by then is doubted, and is asked further."""
        probes = {peer: self._probe(peer, reason) for peer in peers if peer in self._roster}
        running = {probe: peer for peer, probe in probes.items() if probe is not None}
        if running:
            _, open_still = await asyncio.wait(running, timeout=CHECK_S)
            self._health.missing.update(running[probe] for probe in open_still)

    def follow(self, roster: Sequence[PeerId], lives: Mapping[PeerId, int] | None = None) -> None:
        """Watch this roster from now on; an empty one stops the watching. What is believed of those that stay in it is
        kept. ``lives`` says which life of each takes part: who was let in again by the very record in which it was lost
        never left the roster, and what is known of its former life would make it a stranger for ever."""
        before, others = set(self._roster), tuple(peer for peer in roster if peer != self._endpoint.peer)
        known, self._lives = self._lives, dict(lives or {})
        anew = {peer for peer, life in self._lives.items() if known.get(peer, life) != life}
        if others == self._roster and not anew:
            return
        self._roster = others
        left = (before - set(self._roster)) | (before & anew)
        self._health.forget(left)
        for peer in left:
            self._gone.pop(peer, None)
            self._rumours.pop(peer, None)
            self._left.pop(peer, None)
            probe = self._probes.pop(peer, None)
            if probe is not None:
                probe.cancel()
        self._tell()

    def suspect(self, peer: PeerId, reason: str) -> None:
        """Ask this peer too, at once."""
        self._probe(peer, reason)

    # --- asking --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask until cancelled."""
        async with self._asking():
            while True:
                me = self._endpoint.peer
                there = [peer for peer in self._roster if peer not in self._gone]  # who watched the next is gone, too
                for peer in dict.fromkeys((*watched(me, (me, *there)), *self._gone)):
                    self._ask_once(peer)
                await self._clock.sleep(PING_EVERY_S)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                for probe in self._probes.values():
                    probe.cancel()

    def _ask_once(self, peer: PeerId) -> None:
        if self._group is not None and peer not in self._probes:
            self._start(peer, self._look(peer))

    def _probe(self, peer: PeerId, reason: str) -> asyncio.Task[None] | None:
        """Ask until it answers or is lost; nothing to do for one that is lost already."""
        if peer not in self._roster or self._group is None or peer in self._gone:
            return None
        running = self._probes.get(peer)
        return running if running is not None else self._start(peer, self._look(peer))

    def _start(self, peer: PeerId, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        assert self._group is not None  # noqa: S101 - checked by both callers
        task = self._probes[peer] = self._group.create_task(work)
        task.add_done_callback(lambda done: self._ended(peer, done))
        return task

    def _ended(self, peer: PeerId, done: asyncio.Task[None]) -> None:
        if self._probes.get(peer) is done:
            del self._probes[peer]

    async def _look(self, peer: PeerId) -> None:
        """Ask; after a miss quickly again, until it answers or is lost."""
        questions = Questions(self._endpoint, peer, PING_TIMEOUT_S, MISSES_TO_LOSE * PING_TIMEOUT_S)
        try:
            await self._ask_until(peer, questions)
        finally:
            await questions.close()

    async def _ask_until(self, peer: PeerId, questions: Questions) -> None:
        while True:
            began = self._clock.monotonic()
            try:
                standing = await questions.ask(Heartbeat(incarnation=self.incarnation))
            except PeerError as error:
                verdict = self._health.missed(peer, f"{error.code}, {error.reason}", self._clock.monotonic())
                if verdict is not None or peer in self._gone:
                    return await self._lose(peer, verdict or self._gone[peer])
            else:
                if standing is not None:
                    return await self._heard(peer, standing)
                self._health.heard(peer)
            await self._clock.sleep(max(0.0, PROBE_EVERY_S - (self._clock.monotonic() - began)))

    async def _heard(self, peer: PeerId, standing: HeartbeatReply) -> None:
        if self._left.get(peer) == standing.incarnation:
            return  # it answered before its farewell, or while it closes
        verdict = self._health.answered(peer, standing, self._clock.monotonic(), judged=self.stand()[1])
        rumour = self._rumours.pop(peer, None)
        if verdict is None and not standing.member and self.stand()[1]:
            # Another has seen what we see for the first time: it is not who was in the roster. Nor is it later on:
            # who was lost is back when it says that it takes part.
            verdict = rumour or self._gone.get(peer)
        if verdict is not None:
            return await self._lose(peer, verdict)
        if self._gone.pop(peer, None) is not None:
            self._tell()
            self.back(peer)
        if standing.member and standing.step > self.stand()[0] and standing.lineage in (0, self.lineage()):
            self.ahead(peer, standing.step)

    async def _lose(self, peer: PeerId, reason: str) -> None:
        if peer in self._gone or peer not in self._roster:
            return
        self._gone[peer] = reason
        self._tell()
        self.lost(peer, reason)
        await self.tell_all(peer, reason)

    def _tell(self) -> None:
        self._version += 1
        if self._group is not None:
            self._group.create_task(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def twin(self, roster: Sequence[PeerId]) -> bool:
        """Return whether another process with our identity, which takes part in this roster, asks others in our name.
        Takes at most some TWIN_S. That nobody heard one is no proof that there is none."""
        asked = watched(self._endpoint.peer, roster, 2 * WATCHED_PEERS)  # of those that it watches some may be gone
        return any(await asyncio.gather(*map(self._hears_twin, asked)))

    async def _hears_twin(self, peer: PeerId) -> bool:
        body, timeout_s = DuplicateQuery(incarnation=self.incarnation), TWIN_S + PING_TIMEOUT_S
        try:
            answer, _ = await self._endpoint.call(peer, HEARD, body, timeout_s=timeout_s)
        except PeerError:
            return False
        return answer.there

    # --- telling -------------------------------------------------------------------------------------------------

    async def tell_all(self, lost: PeerId, reason: str) -> None:
        """Tell the roster that a peer is gone, or (our own id) that we are leaving; not those that may be gone as
        well, who would only keep us waiting. Never raises a PeerError."""
        message = Lost(peer=lost, reason=reason[:400], incarnation=self.incarnation)
        others = [peer for peer in self._roster if peer != lost and peer not in self._gone]
        await asyncio.gather(*(self._tell_one(peer, message) for peer in others))

    async def _tell_one(self, peer: PeerId, message: Lost) -> None:
        try:
            await self._endpoint.call(peer, LOST, message, timeout_s=PING_TIMEOUT_S)
        except PeerError:
            return  # it finds out by itself, or it is the next to be found lost

    async def _on_ping(self, caller: PeerId, body: Ping) -> Empty:
        return Empty()

    async def _on_beat(self, caller: PeerId, body: Heartbeat) -> HeartbeatReply:
        asked = self._listening.get(caller)
        if asked is not None and body.incarnation not in (0, asked.incarnation):
            asked.there.set()
        step, member = self.stand()
        return HeartbeatReply(step=step, member=member, incarnation=self.incarnation, lineage=self.lineage())

    async def _on_heard(self, caller: PeerId, body: DuplicateQuery) -> DuplicateIdentity:
        """Listen for another life of the caller, of whom one question at a time is answered."""
        if caller in self._listening or caller not in self._roster:
            raise Busy("it is being listened for, or nobody of that name takes part")
        asked = self._listening[caller] = _Listening(body.incarnation)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TWIN_S):
                    await asked.there.wait()
        finally:
            del self._listening[caller]
        return DuplicateIdentity(there=asked.there.is_set())

    async def _on_lost(self, caller: PeerId, body: Lost) -> Empty:
        if caller not in self._roster or body.peer not in self._roster:
            return Empty()
        if body.peer == caller:
            self._take_leave(caller, body)
        else:
            self._rumours[PeerId(body.peer)] = body.reason
            self._health.told(PeerId(body.peer), caller)
            self.suspect(PeerId(body.peer), body.reason)
        return Empty()

    def _take_leave(self, peer: PeerId, body: Lost) -> None:
        """It says farewell. Another process with its identity, which gave up, takes nobody out of the roster."""
        member = self._lives.get(peer) or self._health.life(peer)
        if member and body.incarnation not in (0, member):
            return
        self._left[peer] = body.incarnation or member
        if peer not in self._gone:
            self._gone[peer] = body.reason
            self._tell()
            self.lost(peer, body.reason)

"""Watch which peers are there. A verdict needs evidence, not a rumour, and is taken back when the peer answers again.

:class:`~swarm.health.verdicts.Health` decides; :class:`HealthWatch` asks. Every peer asks the next few peers of a ring
over the roster once a second (cost O(k) questions a second, whatever the size), and any peer that a failed call made it
suspect at once and quickly.
Those that are gone are asked too, and the next of the ring in their place: who is cut off finds out from how many.
A loss is told to all by those that watch the lost one, and everybody who is told asks for himself before he believes
it, and tells nobody: some 3 n messages a death, and nobody's word is passed on, which could not be told from a lie.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

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
from swarm.health.verdicts import MISSES_TO_LOSE, WATCHED_PEERS, Health, WatchedRoster, watched, watchers
from swarm.ids import PeerId
from swarm.network.protocols import AnyMethod, Endpoint
from swarm.schema import Empty

PING_EVERY_S = 1.0
PING_TIMEOUT_S = 1.5
PROBE_EVERY_S = 0.25
CHECK_S = 8.0
"""How long one that needs to know at once waits for it: what it takes to lose who has fallen silent, and to tell the
others. Who sends and does not answer is asked for longer; meanwhile it is doubted."""
TWIN_S = 1.5
"""How long a living twin is listened for: it asks whom it watches every second."""


@dataclass(slots=True)
class _Listening:
    """For another life than this one."""

    incarnation: int
    there: asyncio.Event = field(default_factory=asyncio.Event)


class WatchListener(Protocol):
    """A peer's place in the run, for those who ask it whether it is there; and what it hears of theirs."""

    def standing(self) -> tuple[int, bool]:
        """Return our open step, and whether we take part in it."""

    def lineage(self) -> int:
        """Return our lineage; 0: the run's."""

    def lost(self, peer: PeerId, reason: str) -> None:
        """A peer of the roster is gone."""

    def back(self, peer: PeerId) -> None:
        """One that was gone is there."""

    def ahead(self, peer: PeerId, step: int) -> None:
        """The open step of a member, in our lineage or the run's, is beyond ours."""


class _NotInRun:
    """A peer that knows no run yet."""

    def standing(self) -> tuple[int, bool]:
        return 0, True

    def lineage(self) -> int:
        return 0

    def lost(self, peer: PeerId, reason: str) -> None:
        return

    def back(self, peer: PeerId) -> None:
        return

    def ahead(self, peer: PeerId, step: int) -> None:
        return


class HealthWatch:
    """The ``health/1`` service and the asking. ``run`` asks until cancelled; :attr:`gone` is what it believes.

    A peer that leaves says so and why; what it says about another is checked, what it says about itself is believed.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock, *, incarnation: int = 1) -> None:
        self._endpoint, self._clock = endpoint, clock
        self.incarnation = incarnation
        self._health, self._roster = Health(), WatchedRoster()
        self._machines: Mapping[PeerId, PeerId] = {}
        self._listener: WatchListener = _NotInRun()
        self._probes: dict[PeerId, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Condition()
        self._version = 0
        self._listening: dict[PeerId, _Listening] = {}

    def report_to(self, listener: WatchListener) -> None:
        """Tell the listener of every change from here on, and others where it stands."""
        self._listener = listener

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
        return MappingProxyType(self._roster.gone)

    @property
    def unanswered(self) -> Mapping[PeerId, PeerError]:
        """Of those that are gone because a question failed, the error of it."""
        return MappingProxyType(self._roster.unanswered)

    @property
    def left(self) -> Collection[PeerId]:
        """Peers that said themselves that they leave."""
        return self._roster.departures.keys()

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
        probes = {peer: self._probe(peer, reason) for peer in peers if peer in self._roster.peers}
        running = {probe: peer for peer, probe in probes.items() if probe is not None}
        if running:
            _, open_still = await asyncio.wait(running, timeout=CHECK_S)
            self._health.missing.update(running[probe] for probe in open_still)

    async def taking_part(self, peers: Collection[PeerId]) -> set[PeerId]:
        """Return those that answer now that they take part, each asked once: for who watches nobody yet."""
        body = Heartbeat(incarnation=self.incarnation)

        async def takes_part(peer: PeerId) -> bool:
            try:
                said, _ = await self._endpoint.call(peer, BEAT, body, timeout_s=PING_TIMEOUT_S)
            except PeerError:
                return False
            return said.member

        return {peer for peer, does in zip(peers, await asyncio.gather(*map(takes_part, peers)), strict=True) if does}

    def follow(
        self,
        roster: Sequence[PeerId],
        lives: Mapping[PeerId, int] | None = None,
        machines: Mapping[PeerId, PeerId] | None = None,
    ) -> None:
        """Watch this roster from now on; an empty one stops the watching. What is believed of those that stay in it is
        kept. ``lives`` says which life of each takes part: who was let in again by the very record in which it was lost
        never left the roster, and what is known of its former life would make it a stranger for ever. ``machines`` says
        who stands for the machine of each: those of one are one witness."""
        self._machines = dict(machines or {})
        others = tuple(peer for peer in roster if peer != self._endpoint.peer)
        left = self._roster.follow(others, lives or {})
        if left is None:
            return
        self._health.forget(left)
        for peer in left:
            probe = self._probes.pop(peer, None)
            if probe is not None:
                probe.cancel()
        self._tell()

    def expel(self, peer: PeerId, reason: str) -> None:
        """Count this peer of the roster as lost for good, whatever it answers: it was told to go."""
        if peer not in self._roster.peers:
            return
        self._roster.expelled[peer] = reason
        if peer in self._roster.gone:
            return
        self._roster.gone[peer] = reason
        self._roster.told.add(peer)  # all are told otherwise
        self._tell()
        self._listener.lost(peer, reason)

    def suspect(self, peer: PeerId, reason: str) -> None:
        """Ask this peer too, at once."""
        self._probe(peer, reason)

    # --- asking --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask until cancelled."""
        looked = self._version
        async with self._asking() as group:
            while True:
                if looked != self._version:
                    looked = self._version
                    for peer in [peer for peer in self._roster.gone if peer not in self._roster.told]:
                        if self._endpoint.peer in self._watchers(peer):  # those that should have told died with it
                            self._roster.told.add(peer)
                            group.create_task(self.tell_all(peer, self._roster.gone[peer]))
                me = self._endpoint.peer
                there = [
                    peer for peer in self._roster.peers if peer not in self._roster.gone
                ]  # who watched the next is gone, too
                for peer in dict.fromkeys((*watched(me, (me, *there)), *self._roster.gone)):
                    self._ask_once(peer)
                await self._clock.sleep(PING_EVERY_S)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[asyncio.TaskGroup]:
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield group
            finally:
                self._group = None
                for probe in self._probes.values():
                    probe.cancel()

    def _ask_once(self, peer: PeerId) -> None:
        if self._group is not None and peer not in self._probes:
            self._start(peer, self._look(peer))

    def _probe(self, peer: PeerId, reason: str) -> asyncio.Task[None] | None:
        """Ask until it answers or is lost; nothing to do for one that is lost already."""
        if peer not in self._roster.peers or self._group is None or peer in self._roster.gone:
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
                if verdict is not None or peer in self._roster.gone:
                    rumoured = peer in self._roster.rumours
                    return await self._lose(peer, verdict or self._roster.gone[peer], error, rumoured=rumoured)
            else:
                if standing is not None:
                    return await self._heard(peer, standing)
                self._health.heard(peer)
            await self._clock.sleep(max(0.0, PROBE_EVERY_S - (self._clock.monotonic() - began)))

    async def _heard(self, peer: PeerId, standing: HeartbeatReply) -> None:
        if self._roster.departures.get(peer) == standing.incarnation or peer in self._roster.expelled:
            return  # it answered before it left, or while it closes
        verdict = self._health.answered(peer, standing, self._clock.monotonic(), judged=self._listener.standing()[1])
        rumour = self._roster.rumours.pop(peer, None)
        if verdict is None and not standing.member and self._listener.standing()[1]:
            # Others have seen what we see for the first time: it is not who was in the roster. Nor is it later on:
            # who was lost is back when it says that it takes part.
            verdict = (rumour if self._health.agreed(peer) else None) or self._roster.gone.get(peer)
        if verdict is not None:
            return await self._lose(peer, verdict, None, rumoured=rumour is not None)
        if self._roster.gone.pop(peer, None) is not None:
            self._roster.unanswered.pop(peer, None)
            self._roster.told.discard(peer)
            self._tell()
            self._listener.back(peer)
        if (
            standing.member
            and standing.step > self._listener.standing()[0]
            and standing.lineage in (0, self._listener.lineage())
        ):
            self._listener.ahead(peer, standing.step)

    async def _lose(self, peer: PeerId, reason: str, error: PeerError | None, *, rumoured: bool) -> None:
        """Believe it. Tell all, if it is ours to watch; else, unless somebody told us, those whose it is."""
        if peer in self._roster.gone or peer not in self._roster.peers:
            return
        watching = self._watchers(peer)
        self._roster.gone[peer] = reason
        if error is not None:
            self._roster.unanswered[peer] = error
        self._tell()
        self._listener.lost(peer, reason)
        if self._endpoint.peer in watching:
            self._roster.told.add(peer)
            await self.tell_all(peer, reason)
        elif not rumoured:
            await self._tell_these(watching, peer, reason)

    def _watchers(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Return who of those that are there watches a peer, gone or not."""
        there = [one for one in self._roster.peers if one == peer or one not in self._roster.gone]
        return watchers(peer, (self._endpoint.peer, *there))

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
        others = [peer for peer in self._roster.peers if peer != lost and peer not in self._roster.gone]
        await self._tell_these(others, lost, reason)

    async def _tell_these(self, others: Collection[PeerId], lost: PeerId, reason: str) -> None:
        message = Lost(peer=lost, reason=reason[:400], incarnation=self.incarnation)
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
        step, member = self._listener.standing()
        return HeartbeatReply(step=step, member=member, incarnation=self.incarnation, lineage=self._listener.lineage())

    async def _on_heard(self, caller: PeerId, body: DuplicateQuery) -> DuplicateIdentity:
        """Listen for another life of the caller, of whom one question at a time is answered."""
        if caller in self._listening or caller not in self._roster.peers:
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
        if caller not in self._roster.peers or body.peer not in self._roster.peers:
            return Empty()
        if body.peer == caller:
            self._take_leave(caller, body)
        else:
            lost = PeerId(body.peer)
            if caller in self._watchers(lost):  # all are told by these: who hears it from another tells them
                self._roster.rumours[lost] = body.reason
            self._health.told(lost, self._machines.get(caller, caller))
            self.suspect(lost, body.reason)
        return Empty()

    def _take_leave(self, peer: PeerId, body: Lost) -> None:
        """It leaves. Another process with its identity, which gave up, takes nobody out of the roster."""
        member = self._roster.life(peer) or self._health.life(peer)
        if member and body.incarnation not in (0, member):
            return
        self._roster.departures[peer] = body.incarnation or member
        if peer not in self._roster.gone:
            self._roster.gone[peer] = body.reason
            self._roster.told.add(peer)  # by itself
            self._tell()
            self._listener.lost(peer, body.reason)

"""Keeping a journey going: whoever fails or is late is replaced, and nothing that succeeded is done again.

On the way out the replica before the failed one sends its output again; where it is gone as well, it is replaced first,
and so on back to the trainer. On the way back a replacement fetches its input and its gradient from its neighbours and
goes on. Read :meth:`Repair.look` and the two ``_drive`` methods.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from swarm.errors import DeadlineMissed, PeerError, Refused, Unreachable
from swarm.events import HopMoved
from swarm.ids import JourneyKey, PeerId
from swarm.network.protocols import Payload
from swarm.pipeline.messages import Blocked, Direction
from swarm.pipeline.trainer.blame import GONE, POISON, JourneyFailures
from swarm.pipeline.trainer.context import JourneyContext
from swarm.pipeline.trainer.pace import Work
from swarm.pipeline.trainer.route import RouteState, StageClient
from swarm.waiting import ExponentialBackoff, doubled

FETCH_SHARE = 0.5
"""Part of the time of a takeover that fetching may take: so a stalled neighbour is named before the deadline."""
MAX_DOUBLINGS = 6
EXTRA_TURNS = 2
POSTPONE_S = 0.05


@dataclass(slots=True)
class JourneyPayloads:
    """What the trainer itself sends for a journey, wire-encoded: to the first stage; to the last stage the gradient
    (private ends, once the loss is computed) or the targets (hosted)."""

    first: Payload = b""
    gradient: Payload | None = None
    targets: Payload | None = None


@dataclass(frozen=True, slots=True)
class JourneyHooks:
    """What a trainer lends its journeys: ``attend`` notices the death of peers, ``spawn`` does small things beside,
    ``warn`` has all its journeys look again."""

    attend: Callable[[Iterable[PeerId]], None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    warn: Callable[[], None] = lambda: None


async def choose_route(context: JourneyContext) -> tuple[PeerId, ...]:
    """One replica per stage; waits while a stage has nobody."""
    route = []
    for stage in range(context.stages):
        patience = ExponentialBackoff(context.wiring.typical_seconds(stage))
        while (chosen := _choose(context, stage, set())) is None:
            await context.clock.sleep(patience.pause_s())
        route.append(chosen)
    return tuple(route)


def _choose(context: JourneyContext, stage: int, tried: set[PeerId]) -> PeerId | None:
    out, now = tried | set(context.gone()), context.clock.monotonic()
    for left_out in (out | set(context.doubted()), out):
        try:
            chosen = context.wiring.choose(stage, left_out, now=now)[0]
        except Refused:
            continue
        context.silence.tried(chosen)
        return chosen
    return None


class Repair:
    """One journey's. ``wake`` is called when something happened that :meth:`look` should see."""

    def __init__(
        self,
        context: JourneyContext,
        key: JourneyKey,
        route: tuple[PeerId, ...],
        escort: JourneyHooks,
        wake: Callable[[], None],
    ) -> None:
        self._context, self._key, self._escort, self._wake = context, key, escort, wake
        self.cargo, self.way, self.blame = JourneyPayloads(), RouteState(route), JourneyFailures(context)
        self.way.home = context.ends is None  # token ids have no gradient
        self._courier = StageClient(context.endpoint, context.clock, key, self.way)
        self._drives: dict[int, asyncio.Task[None]] = {}
        self._later: list[tuple[int, PeerId, PeerError | None]] = []
        self._broken: BaseException | None = None
        self._over = False
        self._blocked: dict[tuple[PeerId, int, Direction], Blocked] = {}
        self._tried: dict[int, set[PeerId]] = defaultdict(set)
        self._patience: dict[int, ExponentialBackoff] = {}
        self._nudged: set[int] = set()
        self._supplied: set[PeerId] = set()

    # --- beginning and end ---------------------------------------------------------------------------------------

    def set_out(self) -> None:
        """Send the microbatch on its way."""
        self._escort.attend(self.way.route)
        self._start(0, None)

    def turn_back(self) -> None:
        """Every stage has computed it: the way back begins."""
        self._stop_drives()
        self.way.back = True
        for hop in self.way.hops:
            hop.due, hop.misses = None, 0
        if self._context.ends is not None:
            self._start(self.way.last, None)
        self._wake()

    def rest(self) -> None:
        """Everything is here: nobody is called any more, and no late answer changes the route."""
        self._over = True
        self._stop_drives()

    def close(self) -> None:
        """The journey is over: stop, and tell those whose work is not needed."""
        self.rest()
        for at, hop in enumerate(self.way.hops):
            for peer in hop.named - {hop.replica} - set(hop.receipts) - set(self._context.gone()):
                self._escort.spawn(self._courier.drop(at, peer, self.way.attempt, 5.0))

    def _stop_drives(self) -> None:
        for task in self._drives.values():
            task.cancel()
        self._drives.clear()
        self._later.clear()

    # --- looking -------------------------------------------------------------------------------------------------

    def look(self) -> float | None:
        """Deal with what happened. Returns the seconds until the next deadline, None when there is none.

        Raises Poisoned, and what broke off a piece of repair: a bug.
        """
        if self._broken is not None:
            raise self._broken
        now = self._context.clock.monotonic()
        gone = self._context.gone()
        for peer in set(self.way.route) & set(gone):
            self.lost(peer, "it is believed to be gone")
        later, self._later = self._later, []
        for at, peer, error in later:
            if self.way.hops[at].replica == peer and not self.way.done(at):
                self._start(at, error)
        waiting, self._blocked = self._blocked, {}
        for (caller, _, _), blocked in waiting.items():
            self._on_blocked(caller, blocked)
        for at in self.way.overdue(now, self._context.silence):
            self._on_overdue(at)
        due = self.way.next_due()
        return None if due is None else max(0.0, due - now)

    def lost(self, peer: PeerId, reason: str) -> None:
        """A replica is gone, with what it held."""
        for at in self.way.lost(peer):
            self.blame.gone(at, peer, Unreachable(reason, peer=peer))
            self._start(at, Unreachable(reason, peer=peer))

    def blocked(self, caller: PeerId, body: Blocked) -> None:
        """A replica could not go on, or could not hand on. Looked at in turn; of what one says of a hop the newest."""
        self._blocked[caller, body.hop, body.direction] = body
        self._wake()

    def awaits(self, at: int, work: Work) -> None:
        """The hop's turn begins, without anything to be sent by us."""
        driven = self.way.back and at in self._drives  # on the way out a drive may be about an earlier hop
        if not driven and not self.way.done(at):
            self._begin(at, work)

    def failed(self, at: int, error: PeerError) -> None:
        """What the replica did is of no use: another does it again. Raises Poisoned."""
        peer = self.way.hops[at].replica
        self.blame.on(at, peer, error)
        self.way.hops[at].receipts.pop(peer, None)
        self.way.hops[at].forwarded = False
        self._start(at, error)

    def _on_blocked(self, caller: PeerId, body: Blocked) -> None:
        back = body.direction == "backward"
        if back and not self.way.back:
            self._blocked[caller, body.hop, body.direction] = body  # hosted: the last stage's receipt is still to come
            return
        if not back and self.way.back:
            return
        at, peer = body.hop, PeerId(body.peer)
        stale = body.attempt < self.way.attempt and body.code not in (*GONE, *POISON)
        needed = back or not self.way.done(at)
        if peer == self.way.hops[at].replica and needed and not stale:
            if caller == peer:  # it has forgotten the microbatch, and the targets that came with it
                self._supplied.discard(peer)
            self.failed(at, PeerError.from_code(body.code, body.reason, body.peer))
        mine = next((hop for hop in (at - 1, at + 1) if self._waits(hop, caller)), None)
        if back and mine is not None:
            self._again(mine, after=at)

    def _waits(self, at: int, caller: PeerId) -> bool:
        if not 0 <= at <= self.way.last:
            return False
        hop = self.way.hops[at]
        return hop.replica == caller and not hop.contributed

    def _again(self, at: int, after: int) -> None:
        """Ask a replica once more to take its hop over, when its neighbour has been replaced."""
        task = self._drives.get(after)
        if task is None:
            self._start(at, None)
        else:
            task.add_done_callback(lambda done: None if done.cancelled() else self._start(at, None))

    def _on_overdue(self, at: int) -> None:
        """A turn has passed. Where others have gone on from there, only the news of it is missing: it is asked for once
        before the replica is replaced."""
        hop, silent = self.way.hops[at], self._context.silence
        if self._driving(at) and not self._withdrawn(at):  # its own call ends at about this time, and says why
            hop.due = self._context.clock.monotonic() + POSTPONE_S
            return
        late = hop.due is not None and hop.due <= self._context.clock.monotonic()
        if late:
            self._passed(at)
        hop.due, hop.misses = None, hop.misses + late
        if late and self._has_only_begun(at):
            self._begin(at, "backward" if self.way.back else "forward")
            return
        passed_on = hop.contributed or any(other.contributed for other in self.way.hops[:at])
        if self.way.back and passed_on and at not in self._nudged and hop.replica not in silent:
            self._nudged.add(at)
            self._start(at, None)
            return
        error = DeadlineMissed("no answer in the time that it has", peer=hop.replica)
        self.blame.gone(at, hop.replica, error)
        self._start(at, error)

    def _has_only_begun(self, at: int) -> bool:
        """Whether the run has, so that its queues still grow: then a replica that is late, and meanwhile told of other
        microbatches, is given another turn or two, twice as long each."""
        hop = self.way.hops[at]
        young = self._context.pace.young("backward" if self.way.back else "forward")
        return young and hop.misses <= EXTRA_TURNS and hop.replica not in self._context.silence

    def _passed(self, at: int) -> None:
        """A turn has passed: when its replica has said nothing meanwhile, that is news for other journeys, too."""
        replica = self.way.hops[at].replica
        asked = self.way.hops[at].asked.get(replica)
        if asked is not None and self._context.silence.passed(replica, asked[0]):
            self._escort.warn()

    def _withdrawn(self, at: int) -> bool:
        """Whether what is under way at the hop was a call to somebody silent, and is given up."""
        if self.way.hops[at].replica not in self._context.silence:
            return False
        task = self._drives.get(at)
        if task is None or (at > 0 and not self.way.back):  # on the way out only the first hop is called for itself
            return False
        del self._drives[at]
        task.cancel()
        return True

    # --- driving -------------------------------------------------------------------------------------------------

    def _start(self, at: int, error: PeerError | None) -> None:
        """Have a hop done: by another replica where there is an ``error``. On the way out one hop at a time is driven;
        what comes meanwhile is looked at when that has ended."""
        if self._over:
            return
        if self._driving(at):
            self._later.append((at, self.way.hops[at].replica, error))
            return
        drive = self._drive_back if self.way.back else self._drive_out
        task = self._drives[at] = asyncio.create_task(drive(at, error))
        task.add_done_callback(lambda done: self._driven(at, done))

    def _driving(self, at: int) -> bool:
        return at in self._drives if self.way.back else bool(self._drives)

    def _driven(self, at: int, task: asyncio.Task[None]) -> None:
        if self._drives.get(at) is task:
            del self._drives[at]
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
        self._wake()

    async def _drive_out(self, at: int, error: PeerError | None) -> None:
        while True:
            if error is not None and not await self._replace(at, error, "forward"):
                return
            within_s = self._begin(at, "forward")
            asked = self.way.hops[max(0, at - 1)].replica  # by the time that it fails another may have taken the hop
            try:
                if at == 0:
                    await self._courier.forward(self.cargo.first, within_s)
                else:
                    await self._courier.resend(at, within_s)
                break
            except PeerError as failure:
                self._failed_call(at, failure)
                at, error = max(0, at - 1), failure  # who was asked to send again is not there, or has nothing to send
                self.way.hops[at].forwarded = False
                self.blame.on(at, asked, failure)
        self._escort.spawn(self._supply())

    async def _supply(self) -> None:
        """Hosted ends: the last stage gets its targets, once. If it does not, it will miss its deadline."""
        last = self.way.route[-1]
        if self.cargo.targets is None or last in self._supplied:
            return
        self._supplied.add(last)
        try:
            await self._courier.targets(self.cargo.targets, self._context.send_timeout_s)
        except PeerError as error:
            self._supplied.discard(last)
            if error.code == "unreachable" and last == self.way.route[-1] and self.way.hops[-1].due is not None:
                self.lost(last, error.reason)

    async def _drive_back(self, at: int, error: PeerError | None) -> None:
        first_time = error is None and not self.way.hops[at].receipts and at == self.way.last and self._unasked(at)
        while True:
            if error is not None and not await self._replace(at, error, "backward"):
                return
            within_s = self._begin(at, "backward" if first_time else "adopt")
            asked = self.way.hops[at].replica
            try:
                if self.cargo.gradient is not None and at == self.way.last and (first_time or error is not None):
                    await self._courier.backward(self.cargo.gradient, within_s)
                else:
                    await self._courier.adopt(at, FETCH_SHARE * within_s)
                return
            except PeerError as failure:
                self._failed_call(at, failure)
                self.blame.on(at, asked, failure)
                first_time, error = False, failure

    def _failed_call(self, at: int, failure: PeerError) -> None:
        if isinstance(failure, DeadlineMissed) and failure.peer == self.way.hops[at].replica:
            self._passed(at)
        self.way.hops[at].due = None

    def _unasked(self, at: int) -> bool:
        return at not in self._nudged and self.way.hops[at].misses == 0

    def _begin(self, at: int, work: Work) -> float:
        """The replica's turn begins. Returns how many seconds it has: twice as many each time that the hop was late."""
        hop = self.way.hops[at]
        pace = self._context.pace
        seconds = doubled(pace.seconds(hop.replica, work), min(hop.misses, MAX_DOUBLINGS), pace.ceiling_s)
        self.way.begin_turn(at, self._context.clock.monotonic(), seconds, work)
        self._wake()
        return seconds

    async def _replace(self, at: int, error: PeerError, direction: Direction) -> bool:
        """Choose another replica; when all were tried, wait (longer each time) and start over. False when the hop was
        done meanwhile, by one that was thought to be lost."""
        old, tried = self.way.hops[at].replica, self._tried[at]
        self.way.hops[at].due = None
        tried.add(old)
        while True:
            if tried >= set(self._context.wiring.replicas(at)) - set(self._context.gone()):
                tried.clear()
                await self._pause(at)
            if self.way.done(at) and self.way.hops[at].replica not in self._context.gone():
                return False
            new = _choose(self._context, at, tried | self.blame.failed(at)) or _choose(self._context, at, tried)
            if new is not None:
                break
            tried.clear()
            await self._pause(at)
        self._move(at, new, error, direction)
        return True

    async def _pause(self, at: int) -> None:
        patience = self._patience.setdefault(at, ExponentialBackoff(self._context.wiring.typical_seconds(at)))
        await self._context.clock.sleep(patience.pause_s())

    def _move(self, at: int, new: PeerId, error: PeerError, direction: Direction) -> None:
        old = self.way.hops[at].replica
        self.way.move(at, new)
        self._nudged.discard(at)
        self._escort.attend([new])
        if new == old:
            return
        moved = HopMoved(
            step=self._key.step,
            microbatch=self._key.microbatch,
            stage=at,
            old=old,
            new=new,
            reason=f"{error.code}: {error.reason}",
            direction=direction,
            late=isinstance(error, DeadlineMissed),
        )
        self._context.events.emit(moved)

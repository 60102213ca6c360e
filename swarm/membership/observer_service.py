"""What members do for a peer that wants to join: the ``observe/1`` service.

An observer follows a run without being counted on: it downloads one pinned state of its part, from several replicas at
once, and then takes each step's decision together with the update that was decided, the mean gradient, which it applies
itself. So nobody waits for it, however slow its link is; when it has caught up it asks to be a member
(``swarm.consensus.changes``). A second replica keeps the updates for it, too, in case the first dies.

A member that keeps a copy of another part (``swarm.consensus.copies``) is such an observer for good; and of what it
copies it serves others, as a replica does. It gets an update before it is decided, and hears of the decision as members
do: what all replicas of a part have averaged before they died is not lost with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from swarm.clock import Clock
from swarm.consensus.copies import KEPT_UPDATES, Updates
from swarm.consensus.records import CloseRecord, Decision, RecentDecisions
from swarm.errors import Busy, Refused, WrongStep
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Payload
from swarm.schema import Empty
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import StateDonor
from swarm.step.observe_messages import (
    AHEAD,
    BACK,
    HASH,
    LEAVE,
    NEXT,
    STANDING,
    START,
    STAY,
    AheadRequest,
    BackRequest,
    Decided,
    HashRequest,
    LeaveRequest,
    NextRequest,
    RecordHash,
    RunStanding,
    StandingRequest,
    StartRequest,
    Staying,
    StayRequest,
)
from swarm.waiting import News

MAX_OBSERVERS, MAX_STRANGERS = 8, 64
LEASE_S, RECENT_S = 60.0, 15.0
"""An observer that has not asked, and neither downloads nor waits for an answer, for so long is forgotten; and is taken
for gone where nothing is lost if it is not."""


@dataclass(slots=True)
class _Observer:
    """``had``: it has the updates to this step; ``follows``: and the state that they led to, as it has asked for what
    comes after. ``asked``: it wanted something since the step before closed, so it has
    not got all of it from being a member. ``late``: it is a member that was late for a close, and no more than that."""

    had: int
    expires: float = 0.0
    waiting: int = 0
    asked: bool = True
    late: bool = False
    follows: bool = False


class Observers:
    """The peers that follow a part, each by (peer, part), and those that only asked where the run stands. A peer that
    leaves reads it too: as long as it helps somebody, the run does not end for want of others."""

    def __init__(self, donor: StateDonor, clock: Clock) -> None:
        self._donor, self._clock = donor, clock
        self._known: dict[tuple[PeerId, PartName], _Observer] = {}
        self._strangers: OrderedDict[PeerId, float] = OrderedDict()

    def beside(self, members: Collection[PeerId]) -> bool:
        """Return whether a peer that is none of these has just asked here where the run stands, fetches a part, or
        follows one."""
        recent = self._clock.monotonic() + LEASE_S - RECENT_S
        helped = {
            peer
            for (peer, part), seen in self._known.items()
            if seen.waiting or seen.expires > recent or self._donor.heard(peer, part, within_s=RECENT_S)
        }
        asked = {peer for peer, at in self._strangers.items() if at > self._clock.monotonic() - RECENT_S}
        return not (helped | asked) <= set(members)

    def asked_standing(self, peer: PeerId) -> None:
        """It asks where the run stands, and may be about to come."""
        self._strangers[peer] = self._clock.monotonic()
        self._strangers.move_to_end(peer)
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.popitem(last=False)

    def knows(self, peer: PeerId, part: PartName) -> bool:
        """Return whether it follows this part."""
        return (peer, part) in self._known

    def note(self, peer: PeerId, part: PartName, had: int) -> None:
        """It follows ``part`` from the state after step ``had`` on. Raises Busy when too many do."""
        key = peer, part
        known = self._known.get(key)
        if (known is None or known.late) and sum(not one.late for one in self._known.values()) >= MAX_OBSERVERS:
            raise Busy(f"{MAX_OBSERVERS} peers are joining with this one's help")
        observer = self._known.setdefault(key, _Observer(had))
        observer.had, observer.expires, observer.asked = had, self._clock.monotonic() + LEASE_S, True
        observer.late = observer.follows = False

    def behind(self, peer: PeerId, part: PartName, step: int) -> None:
        """A member was late for the close of ``step``: it has the updates before, and comes for this one. However many
        there are, each is owed it: the record names no more than the run has members."""
        known = self._known.setdefault((peer, part), _Observer(step - 1, late=True))
        known.expires, known.asked = self._clock.monotonic() + LEASE_S, True

    @contextmanager
    def waits(self, peer: PeerId, part: PartName, step: int) -> Iterator[None]:
        """While it waits for what comes of ``step``. Raises Refused for a peer that does not follow the part."""
        observer = self._known.get((peer, part))
        if observer is None:
            raise Refused("not an observer of this part: start first")
        self._donor.release(peer, part)  # it asks for what comes after that state: so it has it
        observer.had = step - 1
        observer.waiting, observer.asked, observer.follows = observer.waiting + 1, True, True
        try:
            yield
        finally:
            observer.waiting -= 1
            observer.expires = self._clock.monotonic() + LEASE_S

    def forget(self, peer: PeerId, part: PartName, *, unless_waiting: bool = False) -> None:
        """It follows the part no longer; ``unless_waiting``: but where it waits for an answer."""
        observer = self._known.get((peer, part))
        if observer is not None and not (unless_waiting and observer.waiting):
            del self._known[peer, part]

    def steps(self, part: PartName) -> list[int]:
        """Return how far the followers of a part have come, by what they asked for."""
        return [observer.had for (_, name), observer in self._known.items() if name == part]

    def followers(self, part: PartName) -> dict[PeerId, int]:
        """Return how far those have come, by their own word, that have a state of a part and lead it on."""
        return {peer: seen.had for (peer, name), seen in self._known.items() if name == part and seen.follows}

    def step_closed(self, before: CloseRecord | None, record: CloseRecord) -> None:
        """``record`` was decided after ``before``. Forget members that took part with the part that they observed and
        asked for nothing meanwhile: they have had what they needed. So have those that leave with this record."""
        for member in before.roster if before is not None else ():
            key = PeerId(member.peer), PartName(member.part or "")
            if key in self._known and not self._known[key].asked:
                del self._known[key]
        for observer in self._known.values():
            observer.asked = False
        stayed = before.members.peers if before is not None and record.follows(before) else ()
        gone = {peer for peer in stayed if peer not in record.members and peer not in record.absent}
        self._known = {key: seen for key, seen in self._known.items() if key[0] not in gone}

    def expire(self) -> None:
        """Forget those of whom nothing was heard for LEASE_S."""
        now = self._clock.monotonic()
        self._known = {
            key: seen
            for key, seen in self._known.items()
            if seen.waiting or seen.expires > now or self._donor.serves(*key)
        }


NO_RECORD_YET = "this peer has no record of the run yet"
"""Said before the genesis, and by a peer that was started anew: whether the run has begun it cannot know."""
SnapshotOf = Callable[[PartName], Awaitable[Snapshot | None]]
"""A part that is held here, as it is between two steps, our own or a copy; None for any other."""


@dataclass(frozen=True, slots=True)
class _Averaged:
    """What our part's replicas agreed on for the open step, and may have to agree on anew."""

    part: PartName
    step: int
    mean: torch.Tensor


class ObserverService:
    """Serves ``observers`` from what this member decides. ``publish`` it every decision, and :meth:`copied` every step
    of a part that is copied here. ``standing`` is told to anyone who asks where the run stands; its argument is the
    newest step that was published, None before the genesis. ``frozen`` parts, each with so many numbers, can be had of
    any member; ``returns`` are the decisions with which the run went back to a checkpoint, as far as this process saw
    them. It knows no roles: who may learn nothing of a part is refused by what it is mounted in
    (:func:`~swarm.membership.gate.given_by_role`).
    """

    def __init__(
        self,
        standing: Callable[[int | None], RunStanding],
        donor: StateDonor,
        snapshot: SnapshotOf,
        observers: Observers,
        frozen: Mapping[PartName, int] | None = None,
        returns: Sequence[Decision] = (),
    ) -> None:
        self._frozen, self._returns = frozen or {}, returns
        self._standing, self._donor, self._snapshot, self.observers = standing, donor, snapshot, observers
        self._own: PartName | None = None
        self._updates = Updates()
        self._averaged: _Averaged | None = None
        self._decisions = RecentDecisions(KEPT_UPDATES)
        self._published = News()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            STANDING.handled(self._on_standing),
            HASH.handled(self._on_hash),
            START.handled(self._on_start),
            NEXT.handled_with_payload(self._on_next),
            BACK.handled(self._on_back),
            AHEAD.handled_with_payload(self._on_ahead),
            STAY.handled(self._on_stay),
            LEAVE.handled(self._on_leave),
        ]

    @property
    def closed(self) -> int | None:
        """The newest closed step."""
        newest = self._decisions.newest
        return None if newest is None else newest.record.step

    def means(self) -> list[torch.Tensor]:
        """The means that are held for others: of the open step, and of those before that somebody still needs."""
        averaged = self._averaged
        return [*([] if averaged is None else [averaged.mean]), *self._updates.means()]

    async def publish(self, decision: Decision, part: PartName | None) -> None:
        """A step was decided and swapped here, where ``part`` is held. Its update is kept only when somebody follows
        that part, or was late for the close."""
        self._donor.tidy()
        self._donor.step_closed()
        newest = self._decisions.newest
        self.observers.step_closed(None if newest is None else newest.record, decision.record)
        if not self._decisions.add(decision):
            self._updates.clear()
        if self._own is not None and self._own != part:
            self._updates.forget(self._own)
        self._own, self._averaged = part, None
        if part is not None:
            self._keep(part, decision)
        for name, elements in self._frozen.items():
            if name != part:
                self._keep(name, replace(decision, mean=torch.zeros(elements)))
        await self._published.tell()

    async def averaged(self, part: PartName, step: int, mean: torch.Tensor) -> None:
        """Our part has a mean gradient for the open step: float32 on CPU, not written to any more. Copies may have it
        now; another attempt replaces it."""
        self._averaged = _Averaged(part, step, mean)
        await self._published.tell()

    async def copied(self, part: PartName, decision: Decision) -> None:
        """Our copy of another part has the result of this decision, whose mean is that part's."""
        self._keep(part, decision)
        await self._published.tell()

    async def dropped(self, part: PartName) -> None:
        """It is copied here no more: who follows it with our help is told so."""
        if part != self._own:
            self._updates.forget(part)
        await self._published.tell()

    def _keep(self, part: PartName, decision: Decision) -> None:
        self.observers.expire()
        for peer in decision.record.members.replicas(part):
            if peer in decision.record.late:
                self.observers.behind(peer, part, decision.record.step)
        followed = bool(self.observers.steps(part))
        self._updates.add(part, decision.record.step, decision.mean if followed else None)
        self._trim(part)

    def _trim(self, part: PartName) -> None:
        self._updates.trim(part, min(self.observers.steps(part), default=None))

    async def _on_standing(self, caller: PeerId, body: StandingRequest) -> RunStanding:
        self.observers.asked_standing(caller)
        return self._standing(self.closed)

    async def _on_hash(self, caller: PeerId, body: HashRequest) -> RecordHash:
        await self._wait_closed(body.step)
        return RecordHash(digest=self._decided(body.step).record.hash())

    async def _on_start(self, caller: PeerId, body: StartRequest) -> Decided:
        self.observers.expire()
        decision = self._decisions.newest
        if decision is None:
            raise Refused(NO_RECORD_YET)
        if body.part is not None:
            if body.spare and self._donor.serves_others(caller):
                raise Busy("another downloads from this peer")
            decision = await self._observed(caller, PartName(body.part), body.step)
        return Decided.of(decision)

    async def _observed(self, caller: PeerId, part: PartName, step: int | None) -> Decision:
        """Take an observer. It is noted before its state is pinned, so that no update after that state is lost."""
        known = self.observers.knows(caller, part)
        self.observers.note(caller, part, -1)
        try:
            decision = await self._pinned(caller, part, step)
        except BaseException:
            if not known:
                self.observers.forget(caller, part)
            raise
        self.observers.note(caller, part, decision.record.step)
        return decision

    async def _pinned(self, caller: PeerId, part: PartName, step: int | None) -> Decision:
        """Keep a state for the caller; returns the decision that attests it."""
        snapshot = None if step is None else self._donor.pinned(part, step)
        if snapshot is None:
            snapshot = await self._held(part)
            if step is not None and snapshot.step < step:
                await self._wait_reached(part, step)
                snapshot = await self._held(part)
            if step is not None and snapshot.step != step:
                raise WrongStep(f"{part} is at step {snapshot.step} here, not {step}")
        await self._wait_closed(snapshot.step)  # swapped already, and about to be published
        decision = self._decided(snapshot.step)
        self._donor.pin(caller, snapshot, decision.record.digests[part])
        return decision

    async def _held(self, part: PartName) -> Snapshot:
        snapshot = await self._snapshot(part)
        if snapshot is None:
            raise Refused(f"{part} is not held here")
        return snapshot

    async def _on_stay(self, caller: PeerId, body: StayRequest) -> Staying:
        part = PartName(body.part)
        self.observers.expire()
        closed = self._updates.reached(part)
        if closed is None:
            raise Refused(f"{part} is not held here" if self._decisions.newest else NO_RECORD_YET)
        self.observers.note(caller, part, body.had if self.observers.knows(caller, part) else closed)
        self._donor.release(caller, part)
        self._trim(part)
        return Staying(closed=closed)

    async def _on_leave(self, caller: PeerId, body: LeaveRequest) -> Empty:
        part = PartName(body.part)
        self._donor.release(caller, part)
        self.observers.forget(caller, part, unless_waiting=True)
        return Empty()

    async def _on_next(self, caller: PeerId, body: NextRequest, incoming: Incoming) -> Answer[Decided]:
        payload: Payload = b""
        if body.part is None:
            await self._wait_closed(body.step)
        else:
            payload = await self._update(caller, PartName(body.part), body.step)
        return Answer(Decided.of(self._decided(body.step)), payload)

    async def _update(self, caller: PeerId, part: PartName, step: int) -> Payload:
        with self._waits(caller, part, step):
            await self._wait_reached(part, step)
        if self._decided(step).record.void:
            return b""
        mean = self._updates.at(part, step)
        if mean is None:
            raise WrongStep(f"the update of step {step} is not kept here any more")
        return mean.numpy().data.cast("B")

    async def _on_ahead(self, caller: PeerId, body: AheadRequest, incoming: Incoming) -> Answer[Empty]:
        part = PartName(body.part)
        with self._waits(caller, part, body.step):
            mean = await self._wait_averaged(part, body.step)
        return Answer(Empty(), b"" if mean is None else mean.numpy().data.cast("B"))

    @contextmanager
    def _waits(self, caller: PeerId, part: PartName, step: int) -> Iterator[None]:
        """See :meth:`Observers.waits`."""
        with self.observers.waits(caller, part, step):
            self._trim(part)
            yield

    async def _on_back(self, caller: PeerId, body: BackRequest) -> Decided:
        later = [one for one in self._returns if one.record.returns > body.returns]
        exact = [one for one in later if one.record.previous == body.previous]
        found = next(iter([*exact, *reversed(later)]), None)
        if found is None:
            raise Refused("the run did not go back from there, as far as is known here")
        return Decided.of(found)

    def _decided(self, step: int) -> Decision:
        decision = self._decisions.at(step)
        if decision is None:
            raise WrongStep(f"the decision of step {step} is not kept here any more")
        return decision

    async def _wait_closed(self, step: int) -> None:
        """Until ``step`` is closed here; only the next one is waited for. The caller's deadline ends the waiting."""
        if step > (self.closed if self.closed is not None else -1) + 1:
            raise WrongStep(f"step {step} is far from closed here")
        await self._published.wait(lambda: self.closed is not None and self.closed >= step)

    async def _wait_reached(self, part: PartName, step: int) -> None:
        """Until ``step`` is closed here and ``part`` has its result; only the next one is waited for. Raises Refused
        when the part is held here no more."""
        await self._wait_closed(step)
        await self._published.wait(lambda: (at := self._updates.reached(part)) is None or at >= step)
        if self._updates.reached(part) is None:
            raise Refused(f"{part} is not held here any more")

    async def _wait_averaged(self, part: PartName, step: int) -> torch.Tensor | None:
        """Return what ``part``'s replicas agreed on for ``step``, which may be closed by now; None when it was given
        up, and when its update is not kept any more. Raises as :meth:`_wait_reached`; who asks may have closed the step
        before sooner than we."""

        def over() -> bool:
            return self.closed is None or self.closed >= step or self._updates.reached(part) is None

        def mean() -> torch.Tensor | None:
            found = self._averaged
            return found.mean if found is not None and (found.part, found.step) == (part, step) else None

        if self.closed is not None and step > self.closed + 2:
            raise WrongStep(f"step {step} is far from closed here")
        await self._published.wait(lambda: over() or mean() is not None)
        if self._updates.reached(part) is None:
            raise Refused(f"{part} is not held here any more")
        return mean() if self.closed is not None and self.closed < step else self._updates.at(part, step)

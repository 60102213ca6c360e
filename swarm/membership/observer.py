"""A peer that joins a run in progress: it observes, catches up, and asks to be a member. The other side of
``swarm.membership.observer_service``.

What is believed: the contact (the peer whose invite was followed) about which record is the newest, or when it has
left, and by a peer that comes back, more than half of a roster that was verified before; and nobody about anything
else. The state is verified against that record, every later record against the one before it and the signatures that
decided it, every update by the digest that its record names. So it does not matter who gives them, and any replica may
take another's place.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from swarm.consensus.copies import KEPT_UPDATES
from swarm.consensus.ledger import fed
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes, check_acceptances
from swarm.device import Executor
from swarm.errors import DeadlineMissed, OutOfSync, PeerError, Refused, StateError, Unreachable, Violation, WrongStep
from swarm.ids import PartName, PeerId, RunId
from swarm.membership.observer_sources import UpdateSources, UpdateTimeout
from swarm.network.protocols import Endpoint, ReplyT, Rpc
from swarm.optim.clipping import factor
from swarm.optim.part import PartState
from swarm.security.signing import Verify
from swarm.state.download import gravest
from swarm.step.observe_messages import (
    AHEAD,
    HASH,
    LEAVE,
    NEXT,
    STANDING,
    START,
    AheadRequest,
    Decided,
    HashRequest,
    LeaveRequest,
    NextRequest,
    StandingRequest,
    StartRequest,
)
from swarm.waiting import doubled, ended

ALIVE_S = 5.0
"""How long a donor that did not answer a question may take for the simplest one."""
MAX_PATIENCE_S = 60.0
"""How long an update may take that is fetched before it is decided: nobody can say yet whether it has just not come to
be, or needs so long. Once the step is closed that is known."""
MAX_ASKED = 8
"""How many peers may be asked at once whether they kept updates for us."""

Observe = Callable[[Decision], Awaitable[None]]
Known = Callable[[int], CloseRecord | None]
T = TypeVar("T")

logger = logging.getLogger(__name__)


def _knows_none(step: int) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverContext:
    """``observe`` is told of every verified decision, with its update, when our part is brought to it
    (``Member.observe``). ``known`` are records that this peer verified itself, by step: no other is believed;
    ``newest`` is the newest step of which it knows by itself that it was decided, -1 for none."""

    run: RunId
    endpoint: Endpoint
    device: Executor
    verify: Verify
    observe: Observe
    known: Known = _knows_none
    newest: Callable[[], int] = lambda: -1


class Observer:
    """Follows one run with the help of some of ``donors``. ``name`` is None for a peer that will hold nothing; and of
    one whose part nobody holds: that stays as it is from step to step."""

    def __init__(self, context: ObserverContext, donors: Sequence[PeerId], name: PartName | None) -> None:
        self._context, self._candidates, self._name = context, tuple(donors), name
        self._update_sources = UpdateSources(context.endpoint, name)
        self._part: PartState | None = None
        self._head: CloseRecord | None = None
        self._patience = UpdateTimeout()
        self._behind: tuple[PeerId, int] | None = None

    @property
    def head(self) -> CloseRecord:
        """The newest verified record. Raises OutOfSync before :meth:`start`."""
        if self._head is None:
            raise OutOfSync("nothing was observed yet")
        return self._head

    @property
    def donors(self) -> tuple[PeerId, ...]:
        """Those that keep the state of :attr:`head` for us: what it is downloaded from."""
        return self._update_sources.peers

    async def start(
        self,
        contact: PeerId | None,
        known: CloseRecord | None = None,
        wanted: CloseRecord | None = None,
        *,
        spare: bool = False,
    ) -> Decision:
        """Be taken by some donors, which pin the same state for us; returns the decision that attests that state.

        ``known`` is a record that was verified before: its members attest when the contact has gone, or there is none
        (None: nobody is believed alone). ``wanted`` is the
        verified record of the very state that is wanted, of which a part is here already. ``spare``: let those who join
        go first (see :class:`~swarm.step.observe_messages.StartRequest`). Raises the gravest PeerError of the donors,
        or the contact's when nobody else attests; Violation when they tell different histories.
        """
        context = self._context
        start = ObserverStart(context.run, context.endpoint, context.verify, self._name, contact, known, wanted, spare)
        decision, peers = await begin(start, self._candidates)
        self._head = decision.record
        self._update_sources.set(peers)
        return decision

    async def begin(self, decision: Decision, part: PartState | None) -> None:
        """``part`` holds the state that ``decision`` attests: follow from here."""
        self._part = part
        await self._context.observe(decision)

    def resume(self, part: PartState | None) -> None:
        """``part`` is at the donors' record already, which was observed with the help of others: follow from here."""
        self._part = part

    def go_on(self, head: CloseRecord, part: PartState | None) -> None:
        """Follow from ``head``, which was observed before and whose result ``part`` holds: those of the donors that
        keep updates for us since then lead on, without being asked to begin. When nobody does, :meth:`follow` says
        so."""
        self._head, self._part = head, part
        self._update_sources.set(self._candidates[:MAX_ASKED])

    async def close(self) -> None:
        """Tell those who helped that they need not keep anything for us any more. A courtesy: never raises."""
        await self._update_sources.leave()

    async def follow(self) -> CloseRecord:
        """Take the next step's decision, waiting for it as long as it takes, and bring our part to it, no matter who
        dies, falls silent or lies meanwhile, another goes on in his place.

        Raises, when nobody is left, the last one's PeerError (WrongStep: we fell too far behind, start again;
        DeadlineMissed: it fell silent; Violation: a record that does not follow, or an update of the wrong size), or
        StateError when the update does not give what the record says.
        Cancelled, our part is at the step before or after, never between.
        """
        decision = await self._led(self._take_step)
        await self._context.observe(decision)
        return decision.record

    async def ahead(self) -> torch.Tensor | None:
        """The update with which the next step closes, if it closes as its replicas agreed last, float32; None when it
        was given up. For a peer that hears itself of decisions: it applies this with :func:`take_update`, says so with
        :meth:`went_on`, or calls :meth:`follow` when another was decided. Raises as :meth:`follow`; waits as long as it
        takes. Cancel freely."""
        return await self._led(self._bring_ahead)

    def went_on(self, record: CloseRecord) -> None:
        """Our part was brought to the state after ``record``, which follows :attr:`head` and was verified."""
        self._head = record

    async def _led(self, ask: Callable[[PeerId], Awaitable[T]]) -> T:
        """Return what the first guide gives that can, while a stand-in is kept."""
        keeping = asyncio.create_task(self._update_sources.keep(self.head))
        try:
            while True:
                guide = self._update_sources.first
                try:
                    return await ask(guide)
                except (PeerError, StateError) as error:
                    logger.info("%s cannot lead on after step %d: %s", guide, self.head.step, error)
                    self._update_sources.drop(guide)
                    if not self._update_sources.peers:
                        raise
        finally:
            keeping.cancel()
            (ended,) = await asyncio.gather(keeping, return_exceptions=True)
            if isinstance(ended, Exception):
                logger.error("looking for a stand-in failed", exc_info=ended)

    async def _take_step(self, guide: PeerId) -> Decision:
        part, step = self._part, self.head.step + 1
        size = 0 if part is None or self._name is None else update_bytes(part, step)
        decided, payload = await self._asked(guide, NEXT, NextRequest(part=self._name, step=step), size)
        void = decided.record.void or self._name is None
        mean = update_in(payload, 0 if void else size, guide)
        self._check(decided, guide)
        decision = decided.decision()
        if part is not None:
            decision = replace(decision, mean=None if void else mean)
            await self._context.device.run(take_update, part, decided.record, decision.mean, guide)
        self._head = decided.record
        return decision

    async def _bring_ahead(self, guide: PeerId) -> torch.Tensor | None:
        part, step = self._part, self.head.step + 1
        if part is None:
            raise StateError("a peer that holds nothing needs no update")
        size = update_bytes(part, step)
        _, payload = await self._asked(guide, AHEAD, AheadRequest(part=part.spec.name, step=step), size)
        return update_in(payload, size, guide) if payload else None

    def _check(self, decided: Decided, guide: PeerId) -> None:
        """Raises Violation for a record that is not the run's next."""
        before, record = self.head, decided.record
        if (record.run, record.step, record.previous) != (before.run, before.step + 1, before.hash()):
            raise Violation(f"a record that does not follow that of step {before.step}", peer=guide)
        known = self._context.known(record.step)
        if known is not None:
            if known.hash() != record.hash():
                raise Violation(f"another record of step {record.step} than was decided here", peer=guide)
            return
        try:
            check_acceptances(record, before.members, decided.acceptances, self._context.verify, decided.term)
        except Refused as refused:
            raise Violation(refused.reason, peer=guide) from refused

    async def _asked(
        self, guide: PeerId, rpc: Rpc[Any, ReplyT], body: NextRequest | AheadRequest, size: int
    ) -> tuple[ReplyT, memoryview]:
        """Ask for an update of ``size`` bytes, again and again while the guide is alive and may yet have it."""
        self._patience.begin(guide)
        timeout_s = self._patience.seconds
        while True:
            before = self._heard(guide)
            try:
                return await self._context.endpoint.call(guide, rpc, body, timeout_s=timeout_s, max_reply_bytes=size)
            except DeadlineMissed:
                await self._check_alive(guide, body.step, size, timeout_s, self._heard(guide) - before)
                await self._update_sources.stay()
            longer_s = doubled(timeout_s, 1, MAX_PATIENCE_S) if rpc is AHEAD else 0.0
            timeout_s = max(self._patience.seconds, longer_s)

    async def _check_alive(self, guide: PeerId, step: int, size: int, waited_s: float, brought: int) -> None:
        """After a question without an answer in ``waited_s``, in which the guide ``brought`` so many bytes of whatever:
        the step is still open, or its update needs more time. Raises DeadlineMissed for a donor that has fallen silent,
        WrongStep for one that cannot have the update any more, does not bring it, or does not go on though the step was
        decided. Two that follow each other would else wait for ever."""
        standing, _ = await self._context.endpoint.call(guide, STANDING, StandingRequest(), timeout_s=ALIVE_S)
        closed, newest = -1 if standing.closed is None else standing.closed, self._context.newest()
        if closed >= step + KEPT_UPDATES:
            raise WrongStep(f"it closed step {closed}, and gives no update of step {step}", peer=guide)
        if closed >= step:
            if newest >= step + KEPT_UPDATES - 1:  # the others are about to let go of it
                raise WrongStep(f"step {newest} is decided, and it gives no update of step {step}", peer=guide)
            why = self._patience.late(waited_s, brought, size)
            if why:
                raise WrongStep(f"it closed step {closed}, and gives no update of step {step}: {why}", peer=guide)
        elif newest >= step:
            if self._behind == (guide, step):
                raise WrongStep(f"it has not closed step {step}, which is decided", peer=guide)
            self._behind = guide, step

    def _heard(self, guide: PeerId) -> int:
        """Bytes from it so far, of whatever."""
        return self._context.endpoint.statistics().bytes_received.get(guide, 0)


# --- what a part takes to come to the next step ----------------------------------------------------------------------


def update_bytes(part: PartState, step: int) -> int:
    """Return the size of the update with which the part comes to the state after ``step``."""
    averaged = part.averaged(step)
    elements: int = averaged.stop - averaged.start
    return 4 * elements


def update_in(payload: memoryview, size: int, guide: PeerId) -> torch.Tensor:
    """Return the update that ``guide`` brought, float32 on CPU. Raises Violation for one of another size."""
    if len(payload) != size:
        raise Violation(f"an update of {len(payload)} bytes instead of {size}", peer=guide)
    return torch.frombuffer(payload, dtype=torch.float32) if size else torch.empty(0)


def take_update(part: PartState, record: CloseRecord, mean: torch.Tensor | None, guide: str = "") -> None:
    """Bring the part to the state after ``record`` with this mean gradient; see :func:`prepare_update`. Without one the
    step was given up, and a copy may know that already."""
    if mean is None:
        if part.step < record.step:
            part.give_up()
        return
    prepare_update(part, record, mean, guide, part.prepare)
    part.swap()


def prepare_update(
    part: PartState, record: CloseRecord, mean: torch.Tensor, guide: str, prepare: Callable[..., str]
) -> str:
    """Prepare the part for the state after ``record`` with this mean gradient, which ``guide`` brought; return its
    digest, which the record names. Where the part is worked on. Raises Violation or StateError, with nothing changed,
    for a mean that does not give what the record says. ``prepare`` is a method of the part. Cost: one step of AdamW and
    a digest."""
    if not bool(torch.isfinite(mean).all()):
        raise Violation("an update that is not finite", peer=guide)
    name = part.spec.name
    clip = factor(record.clip, record.caps.get(name, 1.0))
    found = prepare(mean, lr=record.lr, clip=clip, step=record.step, fed=fed(record.committed, name))
    if found != record.told_of(name):
        part.discard()
        raise StateError(
            f"the update of {name} for step {record.step} from {guide or 'one of its replicas'} gives digest "
            f"{found[:12]}…, which the record does not name: it was not applied"
        )
    return found


MAX_DONORS = 4
START_S = 30.0
"""How long a donor may take to pin its state, and the contact to confirm it: either may be about to close a step."""
LAGGARD_S = 5.0
"""How long to wait for more donors when one is there, and for one that is a step behind the others."""

JURY = 33
"""Members that are asked at most whether a record is the run's, when the contact is gone."""


@dataclass(frozen=True, slots=True)
class ObserverStart:
    """What an observer knows when it begins; see :meth:`Observer.start`. Without a ``contact`` nobody is believed
    alone."""

    run: RunId
    endpoint: Endpoint
    verify: Verify
    name: PartName | None
    contact: PeerId | None
    known: CloseRecord | None
    wanted: CloseRecord | None
    spare: bool = False


async def begin(start: ObserverStart, candidates: Sequence[PeerId]) -> tuple[Decision, tuple[PeerId, ...]]:
    """Have several replicas pin one state for us, and make sure that it is the run's. Returns the decision that attests
    it, and the donors that keep just that state, MAX_DONORS at most.

    What one donor says about the newest record is not believed, nor what many say, for they may be one: the contact has
    to confirm it, or more than half of a roster that was verified before. The newest step that most of them can give is
    chosen. Raises the gravest of the candidates' PeerErrors, or the contact's; Violation when nobody tells the history
    that the contact knows. Cancelled or failed, it leaves no task behind.
    """
    if start.name is None:
        return await _begin_without(start, candidates)
    taken, failures = await _take(start, candidates, None if start.wanted is None else start.wanted.step)
    votes = Counter(decided.record.hash() for decided in taken.values())
    steps = {decided.record.hash(): decided.record.step for decided in taken.values()}
    for chosen in sorted(votes, key=lambda record: (votes[record], steps[record]), reverse=True):
        agreeing = [peer for peer, decided in taken.items() if decided.record.hash() == chosen]
        decided = taken[agreeing[0]]
        try:
            await _confirm(start, agreeing, decided)
        except Violation as violation:
            logger.warning("%s", violation)
            failures.append(violation)
            continue
        others = {peer: other for peer, other in taken.items() if peer not in agreeing}
        return decided.decision(), (*agreeing, *await _catch_up(start, others, decided.record))
    raise gravest(failures, f"nobody is known who holds {start.name}")


async def _begin_without(start: ObserverStart, candidates: Sequence[PeerId]) -> tuple[Decision, tuple[PeerId, ...]]:
    """For a peer that will hold nothing: one after the other, and those left may stand in."""
    failures: list[PeerError] = []
    for index, peer in enumerate(candidates):
        try:
            decided = await _ask(start, peer, None)
            await _confirm(start, [peer], decided)
        except PeerError as error:
            failures.append(error)
        else:
            return decided.decision(), tuple(candidates[index:])
    raise gravest(failures, "nobody is known to observe the run with")


async def _take(
    start: ObserverStart, candidates: Sequence[PeerId], step: int | None
) -> tuple[dict[PeerId, Decided], list[PeerError]]:
    """Those that pinned a state for us, and why others did not. A candidate that stalls holds nobody up for long."""
    taken: dict[PeerId, Decided] = {}
    failures: list[PeerError] = []
    left = list(candidates)
    while left and len(taken) < MAX_DONORS:
        batch, left = left[: MAX_DONORS - len(taken)], left[MAX_DONORS - len(taken) :]
        asking = {asyncio.create_task(_ask(start, peer, step)): peer for peer in batch}
        try:
            pending = set(asking)
            while pending and not _any_answer(asking):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=LAGGARD_S)
        finally:
            await ended(asking)
        for task, peer in asking.items():
            if task.cancelled():
                failures.append(DeadlineMissed("it did not begin to help in time", peer=peer))
            elif isinstance(error := task.exception(), PeerError):
                failures.append(error)
            else:
                taken[peer] = task.result()
    return taken, failures


def _any_answer(asking: dict[asyncio.Task[Decided], PeerId]) -> bool:
    return any(task.done() and task.exception() is None for task in asking)


async def _ask(start: ObserverStart, peer: PeerId, step: int | None) -> Decided:
    body = StartRequest(part=start.name, step=step, spare=start.spare)
    decided, _ = await start.endpoint.call(peer, START, body, timeout_s=START_S)
    if decided.record.run != start.run:
        raise Violation("a record of another run", peer=peer)
    return decided


async def _catch_up(start: ObserverStart, others: dict[PeerId, Decided], chosen: CloseRecord) -> tuple[PeerId, ...]:
    """Those of the others that close the chosen step in a moment. The rest need not keep anything for us."""

    async def follows(peer: PeerId) -> bool:
        if others[peer].record.step >= chosen.step:
            return False
        try:
            async with asyncio.timeout(LAGGARD_S):
                return (await _ask(start, peer, chosen.step)).record.hash() == chosen.hash()
        except (PeerError, TimeoutError):
            return False

    caught_up = await asyncio.gather(*map(follows, others))
    assert start.name is not None  # noqa: S101 - only donors of a part pin anything
    leaving = [peer for peer, there in zip(others, caught_up, strict=True) if not there]
    body = LeaveRequest(part=start.name)
    calls = (start.endpoint.notify(peer, LEAVE, body, timeout_s=LAGGARD_S) for peer in leaving)
    await asyncio.gather(*calls, return_exceptions=True)
    return tuple(peer for peer, there in zip(others, caught_up, strict=True) if there)


async def _confirm(start: ObserverStart, agreeing: Sequence[PeerId], decided: Decided) -> None:
    """Raises Violation naming a donor whose record is not the run's, and the contact's error when nobody can say."""
    record, asked = decided.record, HashRequest(step=decided.record.step)
    if start.wanted is not None:
        if record.hash() != start.wanted.hash():
            raise Violation(f"another record of step {record.step} than was verified before", peer=agreeing[0])
        return
    if start.contact is None:
        if start.known is None or not await _attested(start, start.known, decided):
            raise Violation(f"a record of step {record.step} that too few attest", peer=agreeing[0])
        return
    if start.contact in agreeing:
        return
    try:
        theirs, _ = await start.endpoint.call(start.contact, HASH, asked, timeout_s=START_S)
    except (Unreachable, DeadlineMissed):
        if start.known is None or not await _attested(start, start.known, decided):
            raise
        return
    if theirs.digest != record.hash():
        raise Violation(f"another record of step {record.step} than {start.contact} has", peer=agreeing[0])


async def _attested(start: ObserverStart, known: CloseRecord, decided: Decided) -> bool:
    """Return whether more than half of a roster that we trust (JURY of it by hash when it is larger) signed the record
    or say that they saw it decided; or it is that very record."""
    record, me = decided.record, start.endpoint.peer
    if record.hash() == known.hash():
        return True
    if record.age <= known.age:
        return False
    if record.previous == known.hash() and _decided_by(start, known, decided):
        return True
    electorate = [peer for peer in known.members.peers if peer != me]
    jury = sorted(electorate, key=lambda peer: hashlib.sha256(f"{me}|{peer}".encode()).digest())[:JURY]
    signed = acceptance_bytes(record, decided.term)
    attesting = {peer for peer in jury if start.verify(peer, signed, decided.acceptances.get(peer, b""))}
    if 2 * len(attesting) <= len(jury):
        silent = [peer for peer in jury if peer not in attesting and peer != start.contact]
        seen = await asyncio.gather(*(_saw(start, peer, record) for peer in silent))
        attesting.update(peer for peer, saw in zip(silent, seen, strict=True) if saw)
    return 2 * len(attesting) > len(jury)


def _decided_by(start: ObserverStart, known: CloseRecord, decided: Decided) -> bool:
    """Return whether those who take part after ``known`` decided the record that follows it."""
    try:
        check_acceptances(decided.record, known.members, decided.acceptances, start.verify, decided.term)
    except Refused:
        return False
    return True


async def _saw(start: ObserverStart, peer: PeerId, record: CloseRecord) -> bool:
    try:
        theirs, _ = await start.endpoint.call(peer, HASH, HashRequest(step=record.step), timeout_s=LAGGARD_S)
    except PeerError:
        return False
    return theirs.digest == record.hash()

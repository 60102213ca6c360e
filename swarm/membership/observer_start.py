"""How an observer begins: several replicas pin one state for it, and it is sure that the state is the run's.

What one donor says about the newest record is not believed, nor what many say, for they may be one: the contact has to
confirm it, or more than half of a roster that was verified before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.consensus.changes import Verify
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes, check_acceptances
from swarm.errors import DeadlineMissed, PeerError, Refused, Unreachable, Violation
from swarm.ids import PartName, PeerId, RunId
from swarm.network.protocols import Endpoint
from swarm.state.download import gravest
from swarm.step.observe_messages import HASH, LEAVE, START, Decided, HashRequest, LeaveRequest, StartRequest
from swarm.waiting import ended

MAX_DONORS = 4
START_S = 30.0
"""How long a donor may take to pin its state, and the contact to confirm it: either may be about to close a step."""
LAGGARD_S = 5.0
"""How long to wait for more donors when one is there, and for one that is a step behind the others."""

JURY = 33
"""Members that are asked at most whether a record is the run's, when the contact is gone."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObserverStart:
    """What an observer knows when it begins; see :meth:`swarm.membership.observer.Observer.start`. Without a
    ``contact`` nobody is believed alone."""

    run: RunId
    endpoint: Endpoint
    verify: Verify
    name: PartName | None
    contact: PeerId | None
    known: CloseRecord | None
    wanted: CloseRecord | None
    spare: bool = False


async def begin(start: ObserverStart, candidates: Sequence[PeerId]) -> tuple[Decision, tuple[PeerId, ...]]:
    """(the decision that attests the state, the donors that keep just that state for us, at most MAX_DONORS).

    The newest step that most of them can give is chosen. Raises the gravest of the candidates' PeerErrors, or the
    contact's; Violation when nobody tells the history that the contact knows. Cancelled or failed, it leaves no task
    behind.
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

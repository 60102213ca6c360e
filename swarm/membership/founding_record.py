"""How a run starts, and starts again: the founder waits for enough peers, and has the founding record accepted.

The founder is the peer that serves the manifest, and has the state that the run begins with: the initial weights, made
once, or a checkpoint that every peer of the run left when it died. After the founding record it is a member like any
other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarm.clock import Clock
from swarm.consensus.admissions import AdmissionPolicy, Admissions
from swarm.consensus.placement import Candidate, assign_stages
from swarm.consensus.records import NO_RECORD, CloseRecord
from swarm.consensus.roster import Roster
from swarm.consensus.slowness import Barred
from swarm.consensus.trials import Trial
from swarm.errors import DeadlineMissed, Ending, OutOfSync, PeerError, RunEnded, Unreachable
from swarm.ids import PartName, PeerId, RunId
from swarm.security.credentials import Credential
from swarm.step.calls import StepCalls
from swarm.step.messages import DECIDE, PROPOSE, Accepted, Decide, Propose

logger = logging.getLogger(__name__)

POLL_S, LATER_POLL_S, SOON_S = 0.2, 1.0, 30.0
"""How often the directory is asked for peers, and how often when they take longer than SOON_S to come."""

RETRY_S = 1.0
"""Pause before a member that did not accept the founding record is asked again."""

Candidates = Callable[[], Awaitable[Sequence[Candidate]]]
"""Who has announced itself in the directory."""


def _silent(waiting_for: str) -> None:
    return


Instead = Callable[[Collection[PeerId], float], Awaitable[Sequence[Candidate] | None]]
"""Those who found the run without these, who were asked first at that time and have not accepted within theirs; None as
long as they are too few."""


async def _nobody(late: Collection[PeerId], since: float) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundingTimeout:
    """How long the founder waits for the last member to accept its record (None: for ever), and who is told; after
    ``replace_s`` others are looked for in place of those who have not accepted."""

    clock: Clock
    seconds: float | None = None
    waiting: Callable[[str], None] = _silent
    replace_s: float = math.inf
    instead: Instead = _nobody


def enough(candidates: Sequence[Candidate], stage_hosts: int, trainers: int) -> tuple[bool, str]:
    """Return whether the run can start, and what it waits for."""
    hosts = sum(candidate.role == "stage" for candidate in candidates)
    feeding = sum(candidate.role == "trainer" for candidate in candidates)
    reason = f"{hosts} of {stage_hosts} stage hosts and {feeding} of {trainers} trainers are here"
    return hosts >= stage_hosts and feeding >= trainers, reason


async def gather_candidates(
    candidates: Candidates,
    clock: Clock,
    *,
    enough: Callable[[Sequence[Candidate]], tuple[bool, str]],
    patience_s: float | None,
    waiting: Callable[[str], None] = _silent,
) -> Sequence[Candidate]:
    """Poll the directory until there are ``enough`` peers; ``waiting`` is told who is missing. Raises RunEnded, saying
    the same, after ``patience_s`` (None: never)."""
    began = clock.monotonic()
    while True:
        found = await candidates()
        complete, reason = enough(found)
        if complete:
            return found
        waiting(reason)
        elapsed = clock.monotonic() - began
        if patience_s is not None and elapsed > patience_s:
            raise RunEnded(f"the run cannot start: after {patience_s:.0f} s {reason}", Ending.UNREACHABLE)
        await clock.sleep(POLL_S if elapsed < SOON_S else LATER_POLL_S)


class _Shows(Protocol):
    """What may show a credential."""

    @property
    def credential(self) -> Credential | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a run begins with: the digests of the state after ``step``, where its shards continue, and the hash of the
    record of that state (NO_RECORD for initial weights); what that record said of admission, and what the manifest
    does; and whom that record keeps out as proven wrong, and from feeding, and what is drawn for a run that is resumed
    (as :class:`CloseRecord`)."""

    digests: Mapping[PartName, str]
    step: int = 0
    cursors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    previous: str = NO_RECORD
    admissions: Admissions | None = None
    rules: AdmissionPolicy = AdmissionPolicy()
    barred: Mapping[str, Barred] = field(default_factory=dict)
    trials: Mapping[str, Trial] = field(default_factory=dict)
    resumed: int = 0

    def homes(self, candidates: Iterable[Candidate]) -> Mapping[str, str] | None:
        """Return the organisation of each of these, where microbatches stay in it; else None."""
        return self.rules.homes(self.admissions or self.rules.first(), _shown(candidates))

    def own(self, candidates: Iterable[_Shows]) -> Mapping[PartName, Collection[str]]:
        """Return those of these that may hold each part that an organisation keeps to itself."""
        return self.rules.may_hold(self.admissions or self.rules.first(), _shown(candidates))

    @staticmethod
    def after(record: CloseRecord) -> Origin:
        """The state that this record decided. A founding record decides the state of the one before it: a run that is
        resumed twice from one checkpoint follows the same record both times. After step 0 the run only begins: who was
        in that record as it was founded before has no part in it. What trainers were judged by is of the run before,
        and of its stages; when they may feed again is kept."""
        return Origin(
            digests={PartName(part): value for part, value in record.digests.items()},
            step=record.step,
            cursors=record.cursors,
            previous=record.previous if record.founding else record.hash(),
            admissions=record.admissions if record.step else None,
            barred=record.barred,
            trials={peer: one.rest for peer, one in record.trials.items() if one.times},
        )


def _shown(candidates: Iterable[_Shows]) -> list[Credential]:
    return [one.credential for one in candidates if one.credential is not None]


def founding_record(run: RunId, roster: Roster, origin: Origin, credentials: Sequence[Credential] = ()) -> CloseRecord:
    """The record that a run begins with: the state of its origin, no microbatch, and who takes part in the step after,
    with which ``credentials``.

    It keeps the cursors of trainers that have not come back: they may join later. A new one begins its shard."""
    rules, shown = origin.rules, {credential.peer: credential for credential in credentials}
    state = origin.admissions or rules.first()
    muted = {peer for peer in roster.peers if rules.mute(state, peer, shown.get(peer))}
    members = [m.model_copy(update={"mute": True}) if m.peer in muted else m for m in roster.members]
    return CloseRecord(
        run=run,
        step=origin.step,
        committed=(),
        tokens=0,
        loss_sum=0.0,
        grad_norm=0.0,
        clip=1.0,
        lr=0.0,
        digests={str(part): value for part, value in origin.digests.items()},
        cursors={trainer: (0, 0) for trainer in roster.trainers} | dict(origin.cursors),
        roster=tuple(members),
        admissions=rules.founding(origin.admissions, origin.step, credentials, roster.peers),
        barred=dict(origin.barred),
        trials=dict(origin.trials),
        resumed=origin.resumed,
        previous=origin.previous,
    )


def genesis(run: RunId, roster: Roster, digests: Mapping[PartName, str]) -> CloseRecord:
    """Record 0: the digests of the initial weights and who takes part in step 1."""
    return founding_record(run, roster, Origin(digests=digests))


async def found(
    calls: StepCalls,
    run: RunId,
    candidates: Sequence[Candidate],
    origin: Origin,
    patience: FoundingTimeout,
    *,
    timeout_s: float,
) -> tuple[CloseRecord, dict[PeerId, str]]:
    """Assign stages and have the founding record accepted by everybody, each having downloaded and verified its part.

    A member that fails meanwhile is asked again, and the others wait. Who has not accepted within its time is replaced
    as soon as somebody else is there: the others are asked to accept another record, in a later term. Only one can be
    decided, since all signatures come to us and only we announce. Returns the record and why each stage host got its
    stage. Raises RunEnded, naming who did not accept, when patience ends, our own PeerError.
    """
    began, term = patience.clock.monotonic(), 0
    while True:
        roster, reasons = assign_stages(candidates, origin.digests, origin.homes(candidates), origin.own(candidates))
        issuers = (origin.admissions or origin.rules.first()).issuers  # who need none
        shown = [one.credential for one in candidates if one.credential is not None and one.peer not in issuers]
        proposal = Propose(record=founding_record(run, roster, origin, shown), term=term, credentials=tuple(shown))
        outcome = await _accepted_by_all(calls, proposal, patience, began, timeout_s)
        if isinstance(outcome, Decide):
            await announce(calls, outcome, roster, timeout_s)
            return proposal.record, reasons
        candidates, term = outcome, term + 1


async def _accepted_by_all(
    calls: StepCalls, propose: Propose, patience: FoundingTimeout, began: float, timeout_s: float
) -> Decide | Sequence[Candidate]:
    """The decision, or with whom to try instead."""
    proposed, record = patience.clock.monotonic(), propose.record
    signatures: dict[str, bytes] = {}
    while True:
        missing = [peer for peer in record.members.peers if peer not in signatures]
        asking = (_ask(calls, peer, propose, timeout_s) for peer in missing)
        answers = dict(zip(missing, await asyncio.gather(*asking), strict=True))
        signatures |= {peer: each.signature for peer, each in answers.items() if isinstance(each, Accepted)}
        failed = {peer: each for peer, each in answers.items() if isinstance(each, PeerError)}
        if not failed:
            return Decide(step=record.step, record=record.hash(), term=propose.term, acceptances=signatures)
        if calls.me in failed:
            raise failed[calls.me]
        reason = "; ".join(f"{record.members[p].name} ({p}): {error.reason}" for p, error in failed.items())
        logger.warning("these did not accept the founding record: %s", reason)
        patience.waiting(f"all to accept the first record, which is not accepted by {reason}")
        if patience.seconds is not None and patience.clock.monotonic() - began > patience.seconds:
            raise RunEnded(f"the run cannot start: after {patience.seconds:.0f} s {reason}", Ending.UNREACHABLE)
        if patience.clock.monotonic() - proposed >= patience.replace_s:
            others = await patience.instead(failed, proposed)
            if others is not None:
                logger.warning("the run is founded without %s", ", ".join(sorted(failed)))
                return others
        await patience.clock.sleep(RETRY_S)


async def _ask(calls: StepCalls, peer: PeerId, propose: Propose, timeout_s: float) -> Accepted | PeerError:
    try:
        return await calls.ask(peer, PROPOSE, propose, timeout_s=timeout_s)
    except PeerError as error:
        return error


async def announce(calls: StepCalls, decision: Decide, roster: Roster, timeout_s: float) -> None:
    """Tell everybody what was decided.

    A member that accepted and then cannot be told, or was started anew and says no, is not waited for: the record is
    decided all the same, and the health watch deals with the member. Our own decision comes last, so that anyone who
    sees it knows all were told; a close here that takes longer than an answer may goes on, and who waits for the next
    step hears of its end. Raises OutOfSync, when all were told, when we say no ourselves.
    """
    others = [peer for peer in roster.peers if peer != calls.me]
    await asyncio.gather(*(_tell(calls, peer, decision, timeout_s) for peer in others))
    if (refusal := await _tell(calls, calls.me, decision, timeout_s)) is not None:
        raise OutOfSync(f"step {decision.step} is decided, but {refusal}")


async def _tell(calls: StepCalls, peer: PeerId, decision: Decide, timeout_s: float) -> str | None:
    """None when it was told, or could not be; what it said when it did not swap."""
    try:
        await calls.ask(peer, DECIDE, decision, timeout_s=timeout_s)
    except (Unreachable, DeadlineMissed) as error:
        logger.warning("step %d is decided, but %s could not be told: %s", decision.step, peer, error)
    except PeerError as error:
        logger.warning("step %d is decided, but %s", decision.step, error)
        return str(error)
    return None

"""How a run starts: the founder waits for enough peers, makes the initial weights once, and has the genesis accepted.

The founder is the peer that serves the manifest. After the genesis it is a member like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.errors import EXIT_UNREACHABLE, PeerError, RunEnded
from swarm.ids import PartName, PeerId, RunId
from swarm.optimization.calls import StepCalls
from swarm.optimization.messages import Accepted, Decide, Propose
from swarm.optimization.records import NO_RECORD, CloseRecord
from swarm.optimization.roster import Candidate, Roster, assign_stages
from swarm.optimization.step import announce

logger = logging.getLogger(__name__)

POLL_S, LATER_POLL_S, SOON_S = 0.2, 1.0, 30.0
"""How often the directory is asked for peers, and how often when they take longer than SOON_S to come."""

RETRY_S = 1.0
"""Pause before a member that did not accept the genesis is asked again."""

Candidates = Callable[[], Awaitable[Sequence[Candidate]]]
"""Who has announced itself in the directory."""


def _silent(waiting_for: str) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the founder waits for the last member to accept the genesis (None: for ever), and who is told."""

    clock: Clock
    seconds: float | None = None
    waiting: Callable[[str], None] = _silent


def enough(candidates: Sequence[Candidate], stage_hosts: int, trainers: int) -> tuple[bool, str]:
    """Whether the run can start, and what it waits for."""
    hosts = sum(candidate.role == "stage" for candidate in candidates)
    feeding = sum(candidate.role == "trainer" for candidate in candidates)
    reason = f"{hosts} of {stage_hosts} stage hosts and {feeding} of {trainers} trainers are here"
    return hosts >= stage_hosts and feeding >= trainers, reason


async def gather_candidates(
    candidates: Candidates,
    clock: Clock,
    *,
    stage_hosts: int,
    trainers: int,
    patience_s: float | None,
    waiting: Callable[[str], None] = _silent,
) -> Sequence[Candidate]:
    """Poll the directory until enough peers are there; ``waiting`` is told who is missing. Raises RunEnded, saying the
    same, after ``patience_s`` (None: never)."""
    began = clock.monotonic()
    while True:
        found = await candidates()
        complete, reason = enough(found, stage_hosts, trainers)
        if complete:
            return found
        waiting(reason)
        elapsed = clock.monotonic() - began
        if patience_s is not None and elapsed > patience_s:
            raise RunEnded(f"the run cannot start: after {patience_s:.0f} s {reason}", EXIT_UNREACHABLE)
        await clock.sleep(POLL_S if elapsed < SOON_S else LATER_POLL_S)


def genesis(run: RunId, roster: Roster, digests: Mapping[PartName, str]) -> CloseRecord:
    """Record 0: the digests of the initial weights and who takes part in step 1."""
    return CloseRecord(
        run=run,
        step=0,
        committed=(),
        tokens=0,
        loss_sum=0.0,
        grad_norm=0.0,
        clip=1.0,
        lr=0.0,
        digests={str(part): value for part, value in digests.items()},
        cursors={trainer: (0, 0) for trainer in roster.trainers},
        roster=roster.members,
        previous=NO_RECORD,
    )


async def found(
    calls: StepCalls,
    run: RunId,
    candidates: Sequence[Candidate],
    digests: Mapping[PartName, str],
    patience: Patience,
    *,
    timeout_s: float,
) -> tuple[CloseRecord, dict[PeerId, str]]:
    """Assign stages and have the genesis accepted by everybody, each having downloaded and verified its part.

    A member that fails meanwhile is asked again, and the others wait: who has accepted takes no other genesis, so
    the run starts when that peer, which may have been started again, accepts this one. Returns the record and why each
    stage host got its stage. Raises RunEnded, naming who did not accept, when patience ends, our own PeerError.
    """
    stages = sum(part.startswith("stage-") for part in digests)
    roster, reasons = assign_stages(candidates, stages, private_ends="ends" in digests)
    record = genesis(run, roster, digests)
    decision = await _accepted_by_all(calls, record, patience, timeout_s)
    await announce(calls, decision, roster, timeout_s)
    return record, reasons


async def _accepted_by_all(calls: StepCalls, record: CloseRecord, patience: Patience, timeout_s: float) -> Decide:
    began, propose = patience.clock.monotonic(), Propose(record=record)
    signatures: dict[str, bytes] = {}
    while True:
        missing = [peer for peer in record.members.peers if peer not in signatures]
        asking = (_ask(calls, peer, propose, timeout_s) for peer in missing)
        answers = dict(zip(missing, await asyncio.gather(*asking), strict=True))
        signatures |= {peer: each.signature for peer, each in answers.items() if isinstance(each, Accepted)}
        failed = {peer: each for peer, each in answers.items() if isinstance(each, PeerError)}
        if not failed:
            return Decide(step=record.step, record=record.hash(), acceptances=signatures)
        if calls.me in failed:
            raise failed[calls.me]
        reason = "; ".join(f"{record.members[p].name} ({p}): {error.reason}" for p, error in failed.items())
        logger.warning("the genesis is not accepted by %s", reason)
        patience.waiting(f"all to accept the first record, which is not accepted by {reason}")
        if patience.seconds is not None and patience.clock.monotonic() - began > patience.seconds:
            raise RunEnded(f"the run cannot start: after {patience.seconds:.0f} s {reason}", EXIT_UNREACHABLE)
        await patience.clock.sleep(RETRY_S)


async def _ask(calls: StepCalls, peer: PeerId, propose: Propose, timeout_s: float) -> Accepted | PeerError:
    try:
        return await calls.ask(peer, "step/1/propose", propose, Accepted, timeout_s=timeout_s)
    except PeerError as error:
        return error

"""What ``recovery`` makes of the events of a run and the faults done to it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from peers.chaos.invariants.evidence import Evidence, FaultFact
from swarm.ids import MicrobatchId, PeerId

FAULTS = ("kill", "pause")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one fault did. ``moved`` counts the hops that were sent to another replica in the victim's place while it
    was away. ``reroute_s`` is the longest time until that, from the fault or, where that was later, from when the
    microbatch set out; None when there were none. ``commit_gap_s`` is from the fault to the next closed step, less a
    normal step."""

    kind: str
    moved: int
    reroute_s: float | None
    to_close_s: float
    commit_gap_s: float


def recoveries(evidence: Evidence) -> tuple[list[Recovery], float]:
    """One for each kill and pause after which a step was closed, and the seconds of a normal step."""
    closed = closings(evidence)
    absences = [(fault, back(evidence, fault)) for fault in evidence.faults if fault.kind in FAULTS]
    set_out: dict[tuple[PeerId, int, MicrobatchId], float] = {}
    for fact in evidence.of("JourneyStarted"):
        set_out.setdefault((fact.peer, fact.step, fact.microbatch), fact.wall)
    normal_s = normal(list(closed.values()), [(fault.wall, until) for fault, until in absences])
    found = []
    for fault, until in absences:
        to_close_s = min((wall for wall in closed.values() if wall > fault.wall), default=math.inf) - fault.wall
        if math.isinf(to_close_s):
            continue
        moves = [fact for fact in evidence.of("HopMoved") if str(fact.fields["old"]) == fault.peers[0]]
        waits = [
            fact.wall - max(fault.wall, set_out.get((fact.peer, fact.step, fact.microbatch), 0.0))
            for fact in moves
            if fault.wall < fact.wall < until
        ]
        recovery = Recovery(
            kind=fault.kind,
            moved=len(waits),
            reroute_s=max(waits, default=None),
            to_close_s=to_close_s,
            commit_gap_s=max(0.0, to_close_s - normal_s),
        )
        found.append(recovery)
    return found, normal_s


def closings(evidence: Evidence) -> dict[int, float]:
    """When each step was first closed anywhere, in the order of steps."""
    found: dict[int, float] = {}
    for fact in evidence.of("StepClosed"):
        found[fact.step] = min(fact.wall, found.get(fact.step, math.inf))
    return dict(sorted(found.items()))


def back(evidence: Evidence, fault: FaultFact) -> float:
    """When a victim takes part again: it is ready anew, or was let go on."""
    again = [fact.wall for fact in evidence.of("PeerReady") if fact.peer in fault.peers]
    if fault.kind == "pause":
        again = [other.wall for other in evidence.faults if other.kind == "resume" and other.peers == fault.peers]
        again += [] if fault.seconds is None else [fault.wall + fault.seconds]
    return min((wall for wall in again if wall > fault.wall), default=math.inf)


def normal(closed: Sequence[float], absences: Iterable[tuple[float, float]]) -> float:
    """Median seconds of the steps during which nobody was away. Raises ValueError when there is none."""
    away = list(absences)
    quiet = [
        end - begin
        for begin, end in zip(closed, closed[1:], strict=False)
        if not any(since < end and until > begin for since, until in away)
    ]
    if not quiet:
        raise ValueError("no step was left untouched: nothing to compare with")
    return median(quiet)


def p95(values: Sequence[float]) -> float | None:
    """The smallest of these values that at least 95 % of them do not exceed; None of none."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)] if values else None

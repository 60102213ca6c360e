"""What ``recovery`` makes of the events of a run and the faults done to it. Pure.

A *turn* is the time for which a trainer counts on a replica for one hop: from ``HopBegan`` to ``HopDone``, both ways
out and back. A microbatch is under way on the victim of a fault when it has its turn there, when the victim has
contributed to it and its journey is not over (the contribution died too), or when its turn comes to the victim while
that is away.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from peers.chaos.invariants.evidence import Evidence, Fact, FaultFact

FAULTS = ("kill", "pause")


@dataclass(frozen=True, slots=True)
class Turn:
    """One ``HopBegan`` or (``done``) ``HopDone`` of a hop."""

    wall: float
    replica: str
    done: bool
    back: bool = False


@dataclass(frozen=True, slots=True)
class Affected:
    """A microbatch that was under way on a victim: ``waited_s`` from the fault (or, where that was later, from when its
    turn came) until the replica was asked that then did the hop; None when its journey ended without."""

    step: int
    waited_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one fault did. ``reroute_s`` is the longest wait of all microbatches that were under way on the victim, None
    when there were none; ``commit_gap_s`` is from the fault to the next closed step, less a normal step."""

    kind: str
    peer: str
    wall: float
    affected: int
    abandoned: int
    reroute_s: float | None
    to_close_s: float
    commit_gap_s: float


def recoveries(evidence: Evidence) -> tuple[list[Recovery], float]:
    """One for each kill and pause after which a step was closed, and the seconds of a normal step."""
    closed = closings(evidence)
    absences = [(fault, back(evidence, fault)) for fault in evidence.faults if fault.kind in FAULTS]
    normal_s = normal(list(closed.values()), [(fault.wall, until) for fault, until in absences])
    hops, over = turns(evidence), journeys_over(evidence)
    found = []
    for fault, until in absences:
        to_close_s = min((wall for wall in closed.values() if wall > fault.wall), default=math.inf) - fault.wall
        if math.isinf(to_close_s):
            continue
        hit = [
            one
            for (step, microbatch, _), history in hops.items()
            for one in affected(step, history, fault, until, over.get((step, microbatch), math.inf))
        ]
        waits = [one.waited_s for one in hit if one.waited_s is not None]
        recovery = Recovery(
            kind=fault.kind,
            peer=fault.peers[0],
            wall=fault.wall,
            affected=len(hit),
            abandoned=len(hit) - len(waits),
            reroute_s=max(waits, default=None),
            to_close_s=to_close_s,
            commit_gap_s=max(0.0, to_close_s - normal_s),
        )
        found.append(recovery)
    return found, normal_s


def affected(
    step: int, history: Sequence[Turn], fault: FaultFact, until: float, over: float = math.inf
) -> list[Affected]:
    """What a fault did to one hop of one microbatch: nothing or one. ``until`` is when the victim was back, ``over``
    when the journey ended."""
    victim = fault.peers[0]
    if over <= fault.wall:
        return []
    since = _since(history, victim, fault.wall, until)
    if since is None:
        return []
    asked: dict[str, float] = {}
    for turn in history:
        if not turn.done:
            asked[turn.replica] = turn.wall
        elif turn.wall > since and turn.replica != victim:
            return [Affected(step, max(0.0, asked.get(turn.replica, turn.wall) - since))]
        elif turn.wall > since and (turn.wall > until or fault.kind == "pause"):
            return [Affected(step, turn.wall - since)]  # nobody took it over: it waited for the victim
        elif turn.wall > since:
            return []  # the victim's last words
    contributed = _contributed(history, victim, fault.wall)
    return [] if contributed and over < math.inf else [Affected(step, None)]


def _since(history: Sequence[Turn], victim: str, wall: float, until: float) -> float | None:
    """From when on a microbatch waits because of a fault; None when it does not."""
    before = [turn for turn in history if turn.wall <= wall]
    if before and before[-1].replica == victim and not before[-1].done:
        return wall
    if _contributed(history, victim, wall):
        return wall
    return next((turn.wall for turn in history if wall < turn.wall < until and turn.replica == victim), None)


def _contributed(history: Sequence[Turn], victim: str, wall: float) -> bool:
    counted = [turn for turn in history if turn.wall <= wall and turn.done and turn.back]
    return bool(counted) and counted[-1].replica == victim


def turns(evidence: Evidence) -> Mapping[tuple[int, str, int], list[Turn]]:
    """The turns of every hop in their order, by (step, microbatch, stage)."""
    found: dict[tuple[int, str, int], list[Turn]] = defaultdict(list)
    for fact in evidence.of("HopBegan", "HopDone"):
        fields = fact.fields
        turn = Turn(fact.wall, str(fields["replica"]), fact.kind == "HopDone", bool(fields.get("back", False)))
        found[fact.step, _name(fact), int(fields["stage"])].append(turn)
    for history in found.values():
        history.sort(key=lambda turn: turn.wall)
    return found


def journeys_over(evidence: Evidence) -> Mapping[tuple[int, str], float]:
    """When each microbatch that came home was counted."""
    return {(fact.step, _name(fact)): fact.wall for fact in evidence.of("JourneyCompleted")}


def _name(fact: Fact) -> str:
    return str(fact.microbatch)


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

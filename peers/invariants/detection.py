"""Checkers of who is held for dead: those that were struck, soon; nobody else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from peers.invariants.evidence import Evidence, Fact, FaultFact
from peers.invariants.fault_kinds import ENDED_BY, HARMLESS, PASSING, SLOW
from peers.invariants.findings import Findings, Limits

AFTERMATH_S = 15.0
"""For so long after a fault is over others may still find out that it was: a ping takes seconds to be missed thrice."""


def faults_are_noticed(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I14: some time after a kill or a pause was done no new journey is sent through the victim, until it is ready
    again. Of a fault that is over sooner there is nothing to see."""
    bounds = {"kill": limits.kill_detection_s, "pause": limits.pause_detection_s}
    sent = [(fact.wall, tuple(fact.fields["route"])) for fact in evidence.of("JourneyStarted")]
    sent += [(fact.wall, (fact.fields["new"],)) for fact in evidence.of("HopMoved")]
    for fault in evidence.faults:
        for victim in fault.peers if fault.kind in bounds else ():
            back = _until_back(evidence, fault, victim)
            if back - fault.wall <= bounds[fault.kind]:
                continue
            until = min(back, limits.until)
            used = [wall - fault.done for wall, route in sent if victim in route and fault.done < wall < until]
            late = max(used, default=0.0)
            text = f"journeys still went through it {late:.2f} s after the {fault.kind}"
            found.expect(late <= bounds[fault.kind], text, peer=victim)


def the_slow_are_not_evicted(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I15: where faults are listed, nobody is called lost, nor calls another lost, but while a fault lasts that hit one
    of the two, and shortly after; slowness is no such fault: each that it hits is looked at. Who misses whom when all
    leave does not count."""
    if not evidence.faults:
        return
    found.looked += sum(len(fault.peers) for fault in evidence.faults if fault.kind in SLOW)
    excused = _under_faults(evidence)
    last: dict[str, float] = {}
    for fact in evidence.facts:
        last[fact.peer] = max(fact.wall, last.get(fact.peer, 0.0))
    goodbyes = {(fact.peer, str(fact.fields["reason"])) for fact in evidence.of("PeerStopped")}
    for fact in evidence.of("PeerLost"):
        if fact.wall > limits.until:
            continue
        lost, reason = str(fact.fields["peer"]), str(fact.fields["reason"])
        over = last.get(lost, 0.0) < fact.wall  # it had ended, as all do after the last step
        over |= any(peer == lost and word.endswith(reason) for peer, word in goodbyes)  # or was just saying so
        hit = any(begun <= fact.wall <= ended for peer in (lost, fact.peer) for begun, ended in excused[peer])
        found.expect(hit or over, f"called {lost} lost, which no fault had hit", peer=fact.peer)


def _under_faults(evidence: Evidence) -> Mapping[str, list[tuple[float, float]]]:
    """From when to when each peer may be called lost, and be wrong about others. Who was left behind meanwhile is back
    once it is ready again."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for fault in evidence.faults:
        for peer in () if fault.kind in HARMLESS else fault.peers:
            ended = _over(evidence, fault, peer) + AFTERMATH_S
            for cut in _of(evidence.of("CutOff"), peer):
                if fault.wall < cut.wall < ended:
                    ended = max(ended, _ready_after(evidence, peer, cut.wall) + AFTERMATH_S)
            spans[peer].append((fault.wall, ended))
    return spans


def _over(evidence: Evidence, fault: FaultFact, peer: str) -> float:
    """When a fault is over for one whom it hit: after its seconds, by the fault that ends it, else once the peer is
    ready again."""
    if fault.seconds is not None and fault.kind != "stop":
        return fault.done + fault.seconds
    if fault.kind in PASSING:
        return fault.done
    if fault.kind not in ENDED_BY:
        return _ready_after(evidence, peer, fault.wall)
    ends = (one for one in evidence.faults if one.kind == ENDED_BY[fault.kind] and one.wall > fault.wall)
    return min((one.done for one in ends if peer in one.peers or one.kind == "heal"), default=math.inf)


def _ready_after(evidence: Evidence, peer: str, wall: float) -> float:
    ready = _of(evidence.of("PeerReady", "DaemonRestarted"), peer)
    return min((fact.wall for fact in ready if fact.wall > wall), default=math.inf)


def _until_back(evidence: Evidence, fault: FaultFact, victim: str) -> float:
    """When a victim may be used again: it is ready anew, or was let go on. Others may know of its being let in again
    before it does, by a record after those that it knew itself."""
    ready = list(_of(evidence.of("PeerReady"), victim))
    told = (*ready, *_of(evidence.of("StepClosed", "RosterChanged"), victim))
    known = max((fact.step for fact in told if fact.wall <= fault.done), default=-1)
    ends = [fact.wall for fact in ready]
    for fact in evidence.of("RosterChanged"):
        if fact.step > known:
            ends += [fact.wall for joined in fact.fields["joined"] if joined["peer"] == victim]
    ends += [other.done for other in evidence.faults if other.kind == "resume" and victim in other.peers]
    ends += [] if fault.seconds is None else [fault.done + fault.seconds]
    return min((end for end in ends if end > fault.done), default=math.inf)


def _of(facts: Iterable[Fact], peer: str) -> Iterable[Fact]:
    return (fact for fact in facts if fact.peer == peer)

"""Check steps, the history and detection: one truth, in order, with exact sums, told by all alike.

Detection is who is held for dead: those that were struck, soon; nobody else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from peers.chaos.invariants.evidence import DROPPED, Chain, Evidence, Fact, FaultFact
from peers.chaos.invariants.findings import ENDED_BY, HARMLESS, PASSING, SLOW, Findings, Limits
from swarm.consensus.records import NO_RECORD, CloseRecord

AFTERMATH_S = 15.0
"""For so long after a fault is over others may still find out that it was: a ping takes seconds to be missed thrice."""
NOTICED_STEPS = 2
"""The step that a fault falls into may close with what its victim had done, and with the next one it is left out."""


def denominators(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I4: a record's tokens and loss are the sums over what it commits, everybody used them, and the members of a round
    agree about how many gave."""
    for step, record in evidence.records.items():
        tokens = sum(one.tokens for one in record.committed)
        found.expect(record.tokens == tokens, f"{record.tokens} tokens, the committed sum to {tokens}", step=step)
        loss = math.fsum(one.loss_sum for one in record.committed)
        found.expect(record.loss_sum == loss, f"loss sum {record.loss_sum}, the committed sum to {loss}", step=step)
    for fact in evidence.of("StepClosed"):
        closed = evidence.records.get(fact.step)
        if closed is None:
            continue
        told = (fact.fields["tokens"], fact.fields["microbatches"])
        decided = (closed.tokens, len(closed.committed))
        text = f"(tokens, microbatches) {told}, decided were {decided}"
        found.expect(told == decided, text, step=fact.step, peer=fact.peer)
    last: dict[tuple[int, str], dict[str, Fact]] = defaultdict(dict)
    for fact in evidence.of("RoundDone"):
        last[fact.step, str(fact.fields["part"])][fact.peer] = fact
    swapped = {(fact.step, fact.peer) for fact in evidence.of("StepClosed")}
    for (step, part), facts in sorted(last.items()):
        counts = {f.fields["participating"] for peer, f in facts.items() if (step, peer) in swapped}
        if counts:
            found.expect(len(counts) == 1, f"members of {part} averaged {sorted(counts)} contributions", step=step)


def replicas_agree(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I5: after a step everybody has computed the record's digest of the part that it holds, and nobody found a
    mismatch."""
    for fact in evidence.of("StepClosed"):
        record = evidence.records.get(fact.step)
        wanted: Mapping[str, str] = {} if record is None else dict(record.digests)
        told: Mapping[str, str] = fact.fields["digests"]
        differing = sorted(part for part in {*wanted, *told} if wanted.get(part, told.get(part)) != told.get(part))
        found.expect(not differing, f"other digests of {', '.join(differing)}", step=fact.step, peer=fact.peer)
    for fact in evidence.of("DigestMismatch"):
        text = f"replicas of {fact.fields['part']} did not agree"
        found.expect(False, text, step=fact.step, peer=fact.peer)


def steps_in_order(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I7: each start of a peer closes one step after the other, unless it was cut off or could not write in between,
    and none that no history knows."""
    last: dict[int, int] = {}
    newest = max(evidence.records, default=-1)
    for fact in evidence.of("StepClosed", "CutOff", DROPPED):
        if fact.kind != "StepClosed":
            last.pop(fact.incarnation, None)
            continue
        before = last.get(fact.incarnation)
        last[fact.incarnation] = fact.step
        text = f"closed after step {before}"
        found.expect(before is None or fact.step == before + 1, text, step=fact.step, peer=fact.peer)
        if evidence.chains:
            found.expect(fact.step <= newest, f"the newest record is of {newest}", step=fact.step, peer=fact.peer)


def whole_batches(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I8: every step commits exactly its target of microbatches; a founding record commits none."""
    sizes = {step: len(record.committed) for step, record in evidence.records.items() if not _founding(record)}
    target = limits.target if limits.target is not None else max(sizes.values(), default=0)
    for step, size in sizes.items():
        found.expect(size == target, f"{size} microbatches where {target} make a step", step=step)


def steps_keep_coming(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I13: between two closings, each told by the first to swap, lies no longer gap than allowed; nor after the
    last one, while more were waited for."""
    closed: dict[int, float] = {}
    for fact in evidence.of("StepClosed"):
        closed[fact.step] = min(fact.wall, closed.get(fact.step, math.inf))
    moments = sorted(closed.items())
    for (_, before), (step, at) in zip(moments, moments[1:], strict=False):
        found.expect(at - before <= limits.gap_s, f"{at - before:.2f} s after the one before", step=step)
    until = -math.inf if limits.waited_until is None else limits.waited_until
    if last := [(at, step) for step, at in moments if at <= until]:
        at, step = max(last)
        found.expect(until - at <= limits.gap_s, f"the last for {until - at:.2f} s", step=step)


def one_history(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I20: everybody's record of a step is the same; each chain is unbroken; what was announced is what is written."""
    for chain in evidence.chains:
        _unbroken(chain, found)
        for record in chain.records:
            common = evidence.common(record)
            other = f"has {record.hash()[:12]} where most have {common.hash()[:12]}"
            found.expect(record.hash() == common.hash(), other, step=record.step, peer=chain.peer)
    told: dict[int, set[str]] = defaultdict(set)
    for fact in evidence.of("StepClosed"):
        told[fact.step].add(str(fact.fields["record"]))
    for step, hashes in sorted(told.items()):
        if (decided := evidence.records.get(step)) is not None:
            hashes |= {decided.hash()}
        found.expect(len(hashes) == 1, f"{len(hashes)} different records were announced or written", step=step)


def downloads_are_decided(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I17: what is downloaded is the state of a decided step, and no peer is ready before its step is decided."""
    for fact in evidence.of("StateDownloaded", "PeerReady"):
        if not evidence.records:
            return
        known = min(evidence.records) <= fact.step <= max(evidence.records)
        text = f"{fact.kind} for a step that no history has"
        found.expect(known and fact.step in evidence.records, text, step=fact.step, peer=fact.peer)


def stale_starts_are_fenced(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I21: when a peer was started again and its new start is ready, nothing that the older one did still counts."""
    ready: dict[str, list[Fact]] = defaultdict(list)
    for fact in evidence.of("PeerReady"):
        ready[fact.peer].append(fact)
    counted = ("JourneyCompleted", "Accumulated", "StepClosed", "Committed")
    for fact in evidence.of(*counted):
        if fact.peer not in ready:
            continue
        fenced = any(
            other.incarnation > fact.incarnation and other.wall < fact.wall and other.step < fact.step
            for other in ready[fact.peer]
        )
        found.expect(not fenced, f"{fact.kind} by a start that was replaced", step=fact.step, peer=fact.peer)


def all_finite(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I26: no number of a closed step is infinite or none at all."""
    for fact in evidence.of("StepClosed"):
        for name in ("loss", "grad_norm", "clip", "lr"):
            value = float(fact.fields[name])
            found.expect(math.isfinite(value), f"{name} is {value}", step=fact.step, peer=fact.peer)
    for step, record in evidence.records.items():
        numbers = (record.loss_sum, record.grad_norm, record.clip, record.lr)
        found.expect(all(map(math.isfinite, numbers)), f"loss, norm, clip, rate {numbers}", step=step)


def faults_are_noticed(evidence: Evidence, limits: Limits, found: Findings) -> None:
    """I14: steps after the second that is closed since a kill or a pause was done send nothing new through the victim,
    until it is ready again. Of a fault that is over sooner there is nothing to see."""
    moments = sorted((fact.wall, fact.step) for fact in evidence.of("StepClosed"))
    sent = [(fact, tuple(fact.fields["route"])) for fact in evidence.of("JourneyStarted")]
    sent += [(fact, (fact.fields["new"],)) for fact in evidence.of("HopMoved")]
    for fault in evidence.faults:
        closed = max((step for wall, step in moments if wall <= fault.done), default=0)
        for victim in fault.peers if fault.kind in ("kill", "pause") else ():
            until = min(_until_back(evidence, fault, victim), limits.until)
            if not any(wall < until and step >= closed + NOTICED_STEPS for wall, step in moments):
                continue
            used = (fact.step for fact, route in sent if victim in route and fault.done < fact.wall < until)
            late = max(used, default=0) - closed
            text = f"journeys of the step {late} after the {fault.kind} still went through it"
            found.expect(late <= NOTICED_STEPS, text, peer=victim)


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


def _founding(record: CloseRecord) -> bool:
    return not record.committed


def _unbroken(chain: Chain, found: Findings) -> None:
    for before, record in zip(chain.records, chain.records[1:], strict=False):
        follows = record.previous == before.hash() and record.step == before.step + 1 and record.run == before.run
        resumed = _founding(record) and record.step == before.step and record.previous == before.hash()
        text = f"does not follow the record of {before.step}"
        found.expect(follows or resumed, text, step=record.step, peer=chain.peer)
        found.expect(resumed or not before.ended, "follows one that ended the run", step=record.step, peer=chain.peer)
    for record in chain.records[:1]:
        genesis = record.step > 0 or record.previous == NO_RECORD
        found.expect(genesis, "a first record that follows another", step=record.step, peer=chain.peer)


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
    """Return the end of a fault for one of its peers: after its seconds, by the fault that ends it, else once the peer
    is ready again."""
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
    """Return the time from which a victim may be used again: it is ready anew, or was resumed. Others may know of its
    being let in again before it does, by a record after those that it knew itself."""
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

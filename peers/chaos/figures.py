"""Figures that a play is judged by, from the files of its peers and what was done to them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from peers.chaos.invariants.check import Report
from peers.chaos.invariants.evidence import Evidence, Fact
from peers.chaos.invariants.findings import MARKS
from peers.chaos.lives import PeerLifetime, Span, Struck
from swarm.columns import held_columns, standing_at
from swarm.ids import PartName

Number = float | int | None

FIGURES: Mapping[str, str] = {
    "faults": "strikes that happened, returns not counted",
    "faults_per_hour": "strikes in the struck time, from a stretch's first one to its last step, or the end, as a rate",
    "throughput_retained": "committed tokens a second in the struck time ÷ (those a second in the quiet × capacity)",
    "throughput_retained_error": "standard error of the same by stretch, each beside the quiet around it; 2 or more",
    "throughput_retained_raw": "the same without capacity",
    "stretches": "stretches of struck time, each with quiet before it",
    "capacity": "time-mean, in the struck time, of the smallest number of ready replicas that a stage has ÷ in quiet",
    "baseline_tokens_per_s": "committed tokens a second in the quiet, the first step not counted",
    "tokens_per_s": "committed tokens a second in the struck time, from the last quiet step on, to the end by time",
    "baseline_step_s": "mean length of a step in the quiet",
    "baseline_steps": "steps measured in the quiet: all but the run's first",
    "participation": "replicas in a step's averaging ÷ those live when it closed, since the first strike",
    "digest_mismatches": "comparisons of replicas' digests that failed (I5)",
    "lost": "microbatches issued whose end nobody knows (I2)",
    "duplicated": "microbatches committed twice (I1)",
    "steps": "the newest step that was closed",
    "seconds": "from the first closed step to the last",
    "max_gap_s": "longest time between two closings, each told by the first to swap, or until the end by time",
    "ready_again_s": "longest time from a peer's start to its being ready, after the first step",
    "moves": "hosts that records moved to another stage, lost stages taken over from a copy not counted",
    "recovered_s": "longest time from a strike to the first microbatch of a host that moved to a stage that was hit",
    "recovered_steps": "the same in steps closed meanwhile, the one counted that was open at the strike",
    "committed_by_minority": "steps of the history that only peers who were cut off had closed",
    "rewinds": "times that a peer gave up what it had closed without a majority",
    "steps_given_up": "steps that closed without microbatches because a part was lost",
    "relayed": "peers that were reached through others",
    "punched": "those of them that called another of them directly, through a hole in both their routers",
    "forced_leaves": "peers that were told to leave and were killed, for their time was up before they had",
    "lies": "microbatches and steps about which members lied, all of them together",
    "strangers_answered": "methods, the directory among them, that answered strangers and did not refuse",
    "strangers_kept": "steps a second while strangers attacked peers ÷ those while they attacked a sink, in turns",
    "strangers_s": "for how long strangers attacked peers, all of their processes together",
    "strangers_mb_s": "megabytes a second of large frames that they offered meanwhile",
    "strangers_calls_s": "calls a second that they made meanwhile",
    "unexpected_deaths": "peers that ended, or with a code, as no strike explains",
}
"""Names of the figures, and what each means."""


@dataclass(frozen=True, slots=True)
class ReplicaPresence:
    """A replica of a stage was there from one moment to another."""

    part: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class StepClosing:
    """A step, when the first peer told it closed, and what counted in it."""

    step: int
    wall: float
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """All there is to look at. ``stages`` of the model; ``deaths`` of peers that no strike explains, ``forced`` ends of
    those that were told to leave and had not when their time was up. What was closed after ``ended``, when everybody
    was told to leave, is not measured; a play that ended ``by_clock`` waited for more steps until then. Strikes that
    lie ``quiet_s`` apart or more have quiet between them. ``strangers`` are the reports of theirs, ``lies``
    about how much members lied, by name."""

    evidence: Evidence
    report: Report
    strikes: Sequence[Struck]
    lives: Sequence[PeerLifetime]
    stages: int
    deaths: int = 0
    forced: int = 0
    ended: float = math.inf
    by_clock: bool = False
    quiet_s: float = math.inf
    strangers: Sequence[Mapping[str, Any]] = ()
    lies: Mapping[str, int] = field(default_factory=dict)


def closings(evidence: Evidence) -> tuple[StepClosing, ...]:
    """Every step in order, at the time when the first peer told it."""
    first: dict[int, StepClosing] = {}
    for fact in evidence.of("StepClosed"):
        known = first.get(fact.step)
        if known is None or fact.wall < known.wall:
            first[fact.step] = StepClosing(fact.step, fact.wall, int(fact.fields["tokens"]), float(fact.fields["loss"]))
    return tuple(first[step] for step in sorted(first))


def figures(played: Played) -> dict[str, Number]:
    """All figures; None where there was nothing to measure one by."""
    closed = [one for one in closings(played.evidence) if one.wall <= played.ended]
    struck = [strike for strike in played.strikes if counts(strike)]
    moments = [one.wall for one in closed] + ([played.ended] if played.by_clock and closed else [])
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    return {
        "faults": len(struck),
        **_throughput(played, closed, struck),
        "participation": _participation(played.evidence, struck, closed),
        "digest_mismatches": len(played.report.of("I5")),
        "lost": len(played.report.of("I2")),
        "duplicated": len(played.report.of("I1")),
        "steps": closed[-1].step if closed else 0,
        "seconds": round(closed[-1].wall - closed[0].wall, 2) if closed else 0,
        "max_gap_s": round(max(gaps), 2) if gaps else None,
        "ready_again_s": _ready_again(played.lives, closed),
        **recovery(played.evidence, sorted(struck, key=lambda one: one.wall), played.lives, played.ended),
        "committed_by_minority": closed_by_minority(played),
        "rewinds": sum(fact.wall <= played.ended for fact in played.evidence.of("LineageGivenUp")),
        "steps_given_up": len({fact.step for fact in played.evidence.of("StepGivenUp")} & {one.step for one in closed}),
        **_of_relayed(played.evidence),
        "forced_leaves": played.forced,
        "lies": sum(played.lies.values()) if played.lies else None,
        **_of_strangers(played.strangers, closed),
        "unexpected_deaths": played.deaths,
    }


def _of_relayed(evidence: Evidence) -> dict[str, Number]:
    relayed = {fact.peer for fact in evidence.of("Reachability") if fact.fields["how"] == "relayed"}
    direct = {fact.peer for fact in evidence.of("LinkUpgraded") if {fact.peer, fact.fields["target"]} <= relayed}
    return {"relayed": len(relayed), "punched": len(direct)}


def _of_strangers(found: Sequence[Mapping[str, Any]], closed: Sequence[StepClosing]) -> dict[str, Number]:
    turns = [(str(side), float(from_s), float(to_s)) for one in found for side, from_s, to_s in one["turns"]]
    seconds = sum(to_s - from_s for side, from_s, to_s in turns if side == "peers")
    rates = {side: _rate([turn[1:] for turn in turns if turn[0] == side], closed) for side in ("peers", "sink")}
    sent = {"mb_s": sum(one["bytes"] for one in found) / 1e6, "calls_s": sum(one["calls"] for one in found)}
    return {
        "strangers_kept": round(rates["peers"] / rates["sink"], 4) if rates["peers"] and rates["sink"] else None,
        "strangers_answered": len({method for one in found for method in one["answered"]}) if found else None,
        "strangers_s": round(seconds, 2) if found else None,
        **{f"strangers_{name}": round(count / seconds, 3) if seconds else None for name, count in sent.items()},
    }


def _rate(spans: Sequence[tuple[float, float]], closed: Sequence[StepClosing]) -> float:
    """Return the steps a second from the first that was closed in each span to the last."""
    steps = seconds = 0.0
    for from_s, to_s in spans:
        there = [one.wall for one in closed if from_s <= one.wall <= to_s]
        if len(there) > 1:
            steps, seconds = steps + len(there) - 1, seconds + there[-1] - there[0]
    return steps / seconds if seconds else 0.0


def counts(strike: Struck) -> bool:
    """Return whether it is a fault, and not the end of one or a return."""
    return not strike.back and strike.kind not in MARKS and strike.kind != "start"


def by_kind(strikes: Iterable[Struck]) -> dict[str, int]:
    """Return the number of faults of each kind."""
    return dict(Counter(strike.kind for strike in strikes if counts(strike)))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Time between two closings, of which the first is not in it: what was committed, and the time-mean of the smallest
    number of ready replicas that a stage has. ``since`` is its first strike, if it has one."""

    from_s: float
    to_s: float
    tokens: int
    steps: int
    share: float
    since: float | None

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s

    @property
    def rate(self) -> float:
        """Tokens a second for each replica."""
        return self.tokens / (self.seconds * self.share) if self.share and self.seconds else 0.0


def _throughput(played: Played, closed: Sequence[StepClosing], struck: Sequence[Struck]) -> dict[str, Number]:
    """Retained: committed tokens a second in the struck stretches, each from the last step closed before its first
    strike until all are ready again, to the last step of the play (to its end, where that was a matter of time), ÷
    those in the quiet, from the run's first step on; and ÷ the share of capacity that was left meanwhile."""
    none: dict[str, Number] = dict.fromkeys(_RATES)
    if not struck or not closed:
        return none
    first = min(strike.wall for strike in struck)
    calm = [one for one in closed if one.wall <= first]
    if closed[-1].wall <= first and not played.by_clock:
        return none
    ended = played.ended if played.by_clock else closed[-1].wall
    rate = 3600.0 * len(struck) / max(1e-9, ended - first)
    told = none | {"faults_per_hour": round(rate, 1), "baseline_steps": max(0, len(calm) - 1)}
    if len(calm) < 3:
        return told
    stretches = _stretches(played, closed, sorted(strike.wall for strike in struck), ended)
    quiet, rough = ([one for one in stretches if (one.since is None) is calmly] for calmly in (True, False))
    before, after = _together(quiet), _together(rough)
    share = after.share / before.share if before.share else 0.0
    raw = (after.tokens / after.seconds) / (before.tokens / before.seconds)
    struck_s = sum(one.to_s - one.since for one in rough if one.since is not None)
    return told | {
        "faults_per_hour": round(3600.0 * len(struck) / max(1e-9, struck_s), 1),
        "baseline_steps": before.steps,
        "baseline_step_s": round(before.seconds / before.steps, 2) if before.steps else None,
        "baseline_tokens_per_s": round(before.tokens / before.seconds, 1),
        "tokens_per_s": round(after.tokens / after.seconds, 1),
        "capacity": round(share, 4),
        "stretches": len(rough),
        "throughput_retained_raw": round(raw, 4),
        "throughput_retained": round(raw / share, 4) if share else None,
        "throughput_retained_error": _error(stretches),
    }


_RATES = (
    "faults_per_hour",
    "baseline_step_s",
    "baseline_steps",
    "baseline_tokens_per_s",
    "tokens_per_s",
    "capacity",
    "stretches",
    "throughput_retained_raw",
    "throughput_retained",
    "throughput_retained_error",
)


def _stretches(played: Played, closed: Sequence[StepClosing], strikes: Sequence[float], ended: float) -> list[_Stretch]:
    """Quiet and struck stretches by turns, without a gap; the first is quiet. ``strikes`` are moments, in order."""
    ready = sorted(span.from_s for span in _ready_spans(played))
    borders, firsts = [closed[0].wall, _last(closed, strikes[0])], [strikes[0]]
    for one, other in zip(strikes, strikes[1:], strict=False):
        if other - one < played.quiet_s:
            continue
        settled = max([one, *(moment for moment in ready if one < moment < other)])
        begins = next((closing.wall for closing in closed if closing.wall >= settled), math.inf)
        ends = _last(closed, other)
        if sum(begins < closing.wall <= ends for closing in closed) >= 2:  # else it was struck all the time
            borders += [begins, ends]
            firsts.append(other)
    since = [None, *(first for pair in zip(firsts, [None] * len(firsts), strict=True) for first in pair)]
    pairs = zip(borders, [*borders[1:], ended], since, strict=False)
    return [_stretch(played, closed, from_s, to_s, strike) for from_s, to_s, strike in pairs]


def _last(closed: Sequence[StepClosing], wall: float) -> float:
    return max(closing.wall for closing in closed if closing.wall <= wall)


def _stretch(
    played: Played, closed: Sequence[StepClosing], from_s: float, to_s: float, since: float | None
) -> _Stretch:
    there = [closing for closing in closed if from_s < closing.wall <= to_s]
    spans = [ReplicaPresence(span.part, span.from_s, span.to_s) for span in _ready_spans(played)]
    share = capacity(spans, played.stages, 1.0, from_s, to_s) / max(1e-9, to_s - from_s)
    return _Stretch(from_s, to_s, sum(closing.tokens for closing in there), len(there), share, since)


def _together(stretches: Sequence[_Stretch]) -> _Stretch:
    """All of them as one, as long as they are together."""
    seconds = sum(one.seconds for one in stretches)
    share = sum(one.share * one.seconds for one in stretches) / seconds
    return _Stretch(
        0.0, seconds, sum(one.tokens for one in stretches), sum(one.steps for one in stretches), share, None
    )


def _error(stretches: Sequence[_Stretch]) -> float | None:
    """The standard error of what the struck stretches retain, each beside the quiet ones around it."""
    kept = [
        one.rate / base
        for index, one in enumerate(stretches)
        if one.since is not None and (base := fmean(two.rate for two in stretches[index - 1 : index + 2 : 2]))
    ]
    return round(stdev(kept) / math.sqrt(len(kept)), 4) if len(kept) > 1 else None


def capacity(presences: Iterable[ReplicaPresence], stages: int, rate: float, from_s: float, to_s: float) -> float:
    """Microbatches that a run could have computed in the window: a replica takes ``rate`` a second, and a run what the
    stage with the fewest replicas at that moment takes. O(n log n)."""
    changes: list[tuple[float, int, str]] = []
    for presence in presences:
        if presence.from_s < to_s and presence.to_s > from_s:
            changes.append((max(from_s, presence.from_s), 1, presence.part))
            changes.append((min(to_s, presence.to_s), -1, presence.part))
    there: Counter[str] = Counter()
    total, since = 0.0, from_s
    for at_s, change, part in sorted(changes):  # nobody is left after the last
        total += (at_s - since) * rate * (min(there.values()) if len(there) == stages else 0)
        there[part] += change
        since = at_s
    return total


def _ready_spans(played: Played) -> list[Span]:
    """Return when a replica of a stage was ready, all of them."""
    return [span for life in played.lives for span in life.spans if span.state in ("ready", "leaving") and span.hosts]


def _participation(evidence: Evidence, struck: Sequence[Struck], closed: Sequence[StepClosing]) -> float | None:
    """Return the turnout of each part and step closed since the first strike, as the member that saw most replicas live
    told it."""
    first = min((strike.wall for strike in struck), default=-math.inf)
    since = {one.step for one in closed if one.wall > first}
    told: dict[tuple[int, str], tuple[int, int]] = {}
    for fact in evidence.of("Participation"):
        if fact.step in since:
            seen = int(fact.fields["live"]), int(fact.fields["participating"])
            key = fact.step, str(fact.fields["part"])
            told[key] = max(seen, told.get(key, (0, 0)))
    live = sum(seen[0] for seen in told.values())
    return round(sum(min(seen) for seen in told.values()) / live, 4) if live else None


def _ready_again(lives: Sequence[PeerLifetime], closed: Sequence[StepClosing]) -> float | None:
    """The longest span of joining that ended with being ready, of those that began in the run."""
    began = closed[0].wall if closed else math.inf
    found = [
        span.to_s - span.from_s
        for life in lives
        for span, after in zip(life.spans, life.spans[1:], strict=False)
        if span.state == "joining" and after.state == "ready" and span.from_s > began
    ]
    return round(max(found), 2) if found else None


def closed_by_minority(played: Played) -> int:
    """Steps of the common history that, while a cut lasted, those cut off told closed and nobody else had."""
    names = {life.player.name: life.player.identity for life in played.lives}
    found: set[int] = set()
    for strike in played.strikes:
        if strike.kind not in ("partition", "disconnect"):
            continue
        few = {names[name] for name in strike.peers if name in names}
        ends = _healed(played.strikes, strike)
        theirs, others = set[tuple[int, str]](), set[tuple[int, str]]()
        for fact in played.evidence.of("StepClosed"):
            told = fact.step, str(fact.fields["record"])
            if fact.peer not in few and fact.wall < ends:
                others.add(told)
            elif fact.peer in few and strike.wall < fact.wall < ends:
                theirs.add(told)
        kept = {(step, record.hash()) for step, record in played.evidence.records.items()}
        found |= {step for step, record in (theirs - others) & kept}
    return len(found)


def _healed(strikes: Sequence[Struck], cut: Struck) -> float:
    if cut.seconds is not None:
        return cut.wall + cut.seconds
    ends = "heal" if cut.kind == "partition" else "reconnect"
    return min((one.wall for one in strikes if one.kind == ends and one.wall > cut.wall), default=math.inf)


def missed(told: Mapping[str, Number], at_least: Mapping[str, float], at_most: Mapping[str, float]) -> list[str]:
    """Return the missed bars, in words; a figure that could not be measured keeps none."""
    problems = []
    for name, bar in at_least.items():
        value = told[name]
        if value is None or value < bar:
            problems.append(f"{name} is {'not measured' if value is None else value}, at least {bar:g} was expected")
    for name, bar in at_most.items():
        value = told[name]
        if value is None or value > bar:
            problems.append(f"{name} is {'not measured' if value is None else value}, at most {bar:g} was expected")
    return problems


@dataclass(frozen=True, slots=True)
class _Move:
    """The record of ``step`` names a host at another part; its leader told so at ``wall``."""

    wall: float
    step: int
    peer: str
    part: str


def recovery(
    evidence: Evidence, strikes: Sequence[Struck], lives: Sequence[PeerLifetime], ended: float
) -> dict[str, float | int | None]:
    """Return how long a starved stage waits until a host that moves there works for it; None where no strike was
    followed by a move to a stage that it hit.

    A strike starves a stage when it hits replicas of it. Where a record then moves a host there, before the next
    strike, the stage has recovered with the first microbatch that came home through that host there. ``strikes`` are
    those that count, in order; what was told after ``ended`` does not. Cost: the journeys, once for each move.
    """
    moves = [one for fact in evidence.of("HostsMoved") if fact.wall <= ended for one in _moves(fact)]
    waits = []
    for strike, until in zip(strikes, [*(one.wall for one in strikes), ended][1:], strict=True):
        parts = _parts_hit(strike, lives)
        works = [
            work
            for move in moves
            if move.part in parts and strike.wall < move.wall <= until
            if (work := _first_work(evidence, move)) is not None
        ]
        if works:
            work = min(works, key=lambda fact: fact.wall)
            waits.append((work.wall - strike.wall, work.step - _open_step(evidence, strike.wall)))
    return {
        "moves": len({(move.step, move.peer) for move in moves}),
        "recovered_s": round(max(seconds for seconds, _ in waits), 2) if waits else None,
        "recovered_steps": max(steps for _, steps in waits) if waits else None,
    }


def _moves(fact: Fact) -> Iterator[_Move]:
    for peer, part in fact.fields["moves"].items():
        yield _Move(fact.wall, fact.step, str(peer), str(part))


def _parts_hit(strike: Struck, lives: Sequence[PeerLifetime]) -> set[str]:
    """Return what those held that it was meant for."""
    return {
        span.part
        for life in lives
        if life.player.name in strike.peers
        for span in life.spans
        if span.from_s < strike.wall <= span.to_s and span.hosts
    }


def _first_work(evidence: Evidence, move: _Move) -> Fact | None:
    """The first journey that a host made possible where it is since this move."""
    (column,) = held_columns((PartName(move.part),))
    came = (
        fact
        for fact in evidence.of("JourneyCompleted")
        if fact.step > move.step and standing_at(fact.fields["route"], column, "") == move.peer
    )
    return min(came, key=lambda fact: fact.wall, default=None)


def _open_step(evidence: Evidence, wall: float) -> int:
    closed = (fact.step for fact in evidence.of("StepClosed") if fact.wall <= wall)
    return max(closed, default=-1) + 1

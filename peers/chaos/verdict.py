"""Judge a play by figures, invariants and bars; as JSON and as lines. Pure but for reading the evidence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers.chaos.figures import Number, Played, StepClosing, by_kind, closings, figures, missed
from peers.chaos.invariants.check import CHECKERS, USUAL, Report, check, meaning
from peers.chaos.invariants.evidence import Evidence, gather
from peers.chaos.invariants.findings import Limits
from peers.chaos.liars.orders import read_lies
from peers.chaos.lives import End, PeerLifetime, Player, Struck, lives
from peers.chaos.play import PlayOutcome
from peers.chaos.scenario import Scenario
from peers.chaos.strangers.findings import read_findings
from peers.chaos.world import PlayWorld
from swarm.parsing import parse_toml

SCHEMA = 1
FAULTS = "faults.jsonl"
MANIFEST = "manifest.toml"
"""Not run.toml: what a play leaves is no run to sample from or to go on with."""
MAX_FAILURES = 5
"""Of each invariant in the report."""
_PEER_ID = re.compile(r"\b12D3Koo\w{45}\b")
_INVARIANT = re.compile(r"^I\d+\b", re.MULTILINE)
_SHOWN: Mapping[str, str] = {
    "steps": "",
    "seconds": " s",
    "faults": "",
    "faults_per_hour": "",
    "throughput_retained": " × in the quiet, capacity counted",
    "throughput_retained_error": " standard error of it",
    "stretches": " struck, with quiet between them",
    "throughput_retained_raw": " × in the quiet",
    "capacity": " × in the quiet",
    "participation": " of the live replicas",
    "digest_mismatches": "",
    "lost": " microbatches",
    "duplicated": " microbatches",
    "max_gap_s": " s",
    "ready_again_s": " s",
    "moves": " to another stage",
    "lies": " microbatches and steps",
    "strangers_kept": " × while they attacked a sink",
    "strangers_answered": " methods",
    "strangers_mb_s": " MB/s",
    "strangers_calls_s": " calls/s",
    "recovered_s": " s",
    "recovered_steps": "",
}
"""Figures that a person is told, with their units."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The data of the report and the picture. ``problems`` empty: the verdict is ``kept``."""

    scenario: Scenario
    world: str
    figures: Mapping[str, Number]
    report: Report | None
    strikes: tuple[Struck, ...]
    lives: tuple[PeerLifetime, ...]
    closings: tuple[StepClosing, ...]
    problems: tuple[str, ...]
    interrupted: bool
    ends: tuple[End, ...] = ()
    to_come: str = ""
    compared: Mapping[str, Number] = field(default_factory=dict)
    """Tokens a second of this play and of the one that it is compared with, by name, and how many ``times`` those of
    the other this play has."""
    strangers: tuple[Mapping[str, Any], ...] = ()
    """The reports of strangers, if some attacked."""

    @property
    def verdict(self) -> str:
        """``kept``, ``broken`` or ``interrupted``."""
        return "interrupted" if self.interrupted else "broken" if self.problems else "kept"


def judge(
    scenario: Scenario, world_name: str, world: PlayWorld, players: Sequence[Player], outcome: PlayOutcome
) -> Judged:
    """Read what the play left, and judge it. Never raises for evidence that is not there: that is a problem too."""
    strikes = read_strikes(world.root / FAULTS)
    evidence = _evidence(world)
    report = None if evidence is None else check(evidence, _limits(scenario, outcome, world.root))
    ends: dict[str, list[float]] = {}
    for end in outcome.ends:
        ends.setdefault(end.name, []).append(end.wall)
    there = evidence or Evidence((), ())
    life = lives(there, players, strikes, ends, outcome.ended)
    strangers = read_findings(world.homes(), world.stamps.offset or 0.0)
    lies = read_lies(world.homes())
    told: dict[str, Number] = {}
    if report is not None:
        deaths = sum(not end.struck for end in outcome.ends)
        forced = sum(end.forced for end in outcome.ends)
        quiet_s = scenario.schedule.quiet_s if scenario.schedule is not None else 0.0
        told = figures(Played(evidence=there, report=report, strikes=strikes, lives=life,
                              stages=scenario.swarm.stages, deaths=deaths, forced=forced, ended=outcome.ended,
                              by_clock=outcome.by_clock, quiet_s=quiet_s or math.inf, strangers=strangers,
                              lies=lies))  # fmt: skip
    problems = list(outcome.problems) + _of_strangers(strikes, strangers)
    if not outcome.interrupted and any(strike.kind == "lie" for strike in strikes) and not any(lies.values()):
        problems.append("nobody has lied: what the lie replaces was not called, or the liar was killed")
    if report is not None:
        problems += _broken(scenario, report, told)
    elif not outcome.interrupted:
        problems.append("no peer left any event: there is nothing to judge by")
    if report is not None and not outcome.interrupted:
        problems += _not_reached(scenario, report, told, outcome.happened)
        silent = [one.name for one in players if one.name in outcome.started and one.identity not in there.peers]
        problems += [f"{name} was started and left no event: nobody knows what it did" for name in silent]
    called = {player.identity: player.name for player in players if player.identity}
    problems = [_PEER_ID.sub(lambda found: called.get(found[0], found[0]), problem) for problem in problems]
    closed = tuple(one for one in closings(there) if one.wall <= outcome.ended)
    ends_seen = tuple(outcome.ends)
    return Judged(
        scenario, world_name, told, report, strikes, life, closed, tuple(problems), outcome.interrupted, ends_seen,
        outcome.to_come, strangers=tuple(strangers),
    )  # fmt: skip


def _of_strangers(strikes: Sequence[Struck], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what went wrong with attacks by strangers: what did not attack proves nothing."""
    began = sum(strike.kind == "strangers" for strike in strikes)
    silent = [f"{began - len(found)} of {began} processes of strangers left no report: see their logs"]
    return (silent if len(found) < began else []) + [
        f"{one['name']}: {problem}" for one in found for problem in one["problems"]
    ]


def compare(judged: Judged, other: Judged) -> Judged:
    """Return the play with what it is compared with: whatever was wrong there is a problem here."""
    ours, theirs = (_tokens_per_s(one.closings) for one in (judged, other))
    times = round(ours / theirs, 3) if ours and theirs else None
    problems = [*judged.problems, *(f"{other.scenario.name}: {problem}" for problem in other.problems)]
    wanted = None if judged.scenario.compare is None else judged.scenario.compare.at_least
    if wanted is not None and not judged.interrupted and (times is None or times < wanted):
        problems.append(f"{_shown(times, ' times')} the tokens a second of {other.scenario.name}, not {wanted:g}")
    told = {judged.scenario.name: ours, other.scenario.name: theirs, "times": times}
    return replace(judged, compared=told, problems=tuple(problems))


def _tokens_per_s(closed: Sequence[StepClosing]) -> float | None:
    """Committed tokens a second behind the first step, which begins before all are there."""
    seconds = closed[-1].wall - closed[0].wall if closed else 0.0
    return round(sum(one.tokens for one in closed[1:]) / seconds, 1) if seconds > 0 else None


def _broken(scenario: Scenario, report: Report, told: Mapping[str, Number]) -> list[str]:
    """Return broken invariants and problems, which even a short play must not have."""
    problems = []
    for invariant in dict.fromkeys(failure.invariant for failure in report.failures):
        failures = report.of(invariant)
        problems += [str(failure) for failure in failures[:MAX_FAILURES]]
        problems += [f"{invariant}: {len(failures) - MAX_FAILURES} more"] if len(failures) > MAX_FAILURES else []
    measured = {name: bar for name, bar in scenario.expect.at_most.items() if told[name] is not None}
    return problems + missed(told, {}, measured)


def _not_reached(
    scenario: Scenario, report: Report, told: Mapping[str, Number], happened: Mapping[str, int]
) -> list[str]:
    """Return the missed targets of a play that was not cut short."""
    wanted = dict.fromkeys((*USUAL, *scenario.expect.looked_at))
    problems = [f"{name}: nothing to look at" for name in wanted if not report.looked.get(name)]
    unmeasured = {name: bar for name, bar in scenario.expect.at_most.items() if told[name] is None}
    problems += missed(told, scenario.expect.at_least, unmeasured)
    for kind, times in scenario.expect.happened.items():
        if happened.get(kind, 0) < times:
            problems.append(f"{kind} happened {happened.get(kind, 0)} times, at least {times} was expected")
    return problems


def _limits(scenario: Scenario, outcome: PlayOutcome, root: Path) -> Limits:
    expect = scenario.expect
    return Limits(
        target=_target(root / MANIFEST),
        gap_s=expect.gap_s,
        waited_until=outcome.ended if outcome.by_clock else None,
        until=outcome.ended,
    )


def _target(manifest: Path) -> int | None:
    """Microbatches that make a step, where the manifest of the run is here and says how many."""
    if not manifest.exists():
        return None
    document = parse_toml(manifest.read_text(encoding="utf-8"))
    target = document.get("batch", {}).get("microbatches_per_step")
    return None if target is None else int(target)


def _evidence(world: PlayWorld) -> Evidence | None:
    homes = [home for home in world.homes() if not home.is_relative_to(world.root)]
    try:
        return gather([world.root, *homes], offset=world.stamps.offset)
    except FileNotFoundError:
        return None


def read_strikes(path: Path) -> tuple[Struck, ...]:
    """Return the strikes in order; none without the file."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(sorted((Struck.read(json.loads(line)) for line in lines), key=lambda one: one.wall))


def document(judged: Judged) -> dict[str, Any]:
    """The report as JSON has it; keys are added, never renamed."""
    report = judged.report
    return {
        "schema": SCHEMA,
        "scenario": judged.scenario.name,
        "proves": judged.scenario.proves,
        "world": judged.world,
        "seed": judged.scenario.seed,
        "verdict": judged.verdict,
        "problems": list(judged.problems),
        "to_come": judged.to_come,
        **judged.figures,
        "compared": dict(judged.compared),
        "strangers": list(judged.strangers),
        "ends": [
            {"peer": end.name, "exit_code": end.code, "struck": end.struck, "wall": round(end.wall, 3)}
            for end in judged.ends
        ],
        "faults_by_kind": by_kind(judged.strikes),
        "invariants": {} if report is None else {name: _invariant(report, name) for name in CHECKERS},
    }


def _invariant(report: Report, name: str) -> dict[str, int]:
    return {"looked": report.looked[name], "failures": len(report.of(name))}


def lines(judged: Judged) -> list[str]:
    """The same for a person."""
    told = [f"{_label(name):<24} {_shown(judged.figures.get(name), unit)}" for name, unit in _SHOWN.items()]
    report = judged.report
    if report is not None:
        looked = [name for name in CHECKERS if report.looked[name]]
        failed = [name for name in looked if report.of(name)]
        told.append(
            f"{'invariants':<24} {len(looked) - len(failed)} of {len(looked)} that had something to look at hold"
        )
    told += [
        f"{name:<24} {_shown(value, '' if name == 'times' else ' tokens/s')}" for name, value in judged.compared.items()
    ]
    if judged.interrupted:
        told.append(f"{'interrupted before':<24} {judged.to_come or 'the end'}; what had to be reached is not judged")
    told += [f"BROKEN: {problem}" for problem in judged.problems]
    named = dict.fromkeys(_INVARIANT.findall("\n".join(judged.problems)))
    told += [f"{name}: {meaning(name)}" for name in named if name in CHECKERS]
    return [*told, f"{judged.scenario.name}: {judged.verdict}"]


def _label(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")


def _shown(value: Number, unit: str) -> str:
    return "not measured" if value is None else f"{value:g}{unit}"

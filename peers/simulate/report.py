"""A simulation as plain data for scripts, as lines for people, and as pictures. Pure.

The report of equal arguments is equal, byte for byte; its hash says so. How long it took to compute is no part of it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peers.console.words import count, listed
from peers.local.plot import Axis, line, text, ticks
from swarm.columns import takes
from swarm.ids import PartName, variant_of
from swarm.planning.predict import StepForecast
from swarm.sim.simulation import MOST_STEPS, SimulationCase, SimulationResult, quantile

SCHEMA, HOUR = 1, 3600.0
DIGITS = 9
"""To which figures are rounded: sums may differ in the last bits between machines."""
LATE = 0.95
"""Of steps, in lines for people: so many take no longer than the second figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What was played and what came of it; ``undisturbed`` is a step with everybody there, as it is reckoned."""

    name: str
    model: str
    case: SimulationCase
    result: SimulationResult
    undisturbed: StepForecast

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(step.seconds for step in self.result.steps)

    @property
    def microbatches_s(self) -> float:
        """Of closed steps, over the whole time."""
        return len(self.result.steps) * self.case.microbatches / self.result.ended_s

    def document(self) -> dict[str, Any]:
        """Return all of it, in seconds, with its hash."""
        case, result = self.case, self.result
        body = {
            "schema": SCHEMA,
            "name": self.name,
            "model": self.model,
            "fidelity": result.fidelity,
            "seed": case.seed,
            "peers": case.peers,
            "trainers": len(case.trainers),
            "classes": [one.name for one in case.classes],
            "stages": list(case.stages),
            "rows": case.rows,
            "microbatches": case.microbatches,
            "rebalance": case.turnover.rule,
            "parts": [{"part": part, "load": self._load(part), "hosts": hosts} for part, hosts in result.held.items()],
            "removed": sum(len(removal.places) for removal in case.trace if removal.at_s < result.ended_s),
            **self._figures(),
            "counts": {name: result.counts.get(name, 0) for name in ("joins", "moves", "given up")},
            "reckoned": {"step_s": self.undisturbed.step_s, "microbatches_s": self.undisturbed.rate,
                         "binding": asdict(self.undisturbed.limits[0])},
            "problems": sorted(set(self._problems())),
            **({"more": dict(result.more)} if result.more else {}),
            "steps": [asdict(step) for step in result.steps],
        }  # fmt: skip
        rounded = _rounded(body)
        text = json.dumps(rounded, sort_keys=True, allow_nan=False)
        return {**rounded, "hash": hashlib.sha256(text.encode()).hexdigest()}

    def _load(self, part: PartName) -> float:
        """Return which share of microbatches passed a part."""
        return sum(share for choice, share in enumerate(self.result.kinds) if takes(part, choice))

    def _figures(self) -> dict[str, Any]:
        steps = self.result.steps
        known = {"ended_s": self.result.ended_s, "closed": len(steps)}
        if not steps:
            return known
        return {
            **known,
            "step_s": self.step_s,
            "step_s_95": quantile([step.seconds for step in steps], LATE),
            "microbatches_s": self.microbatches_s,
            "tokens_s": self.microbatches_s * self.case.rows * self.case.work.context,
            "of_reckoned": self.microbatches_s * self.undisturbed.step_s / self.case.microbatches,
            "fewest": min(step.fewest for step in steps),
        }

    def _problems(self) -> Iterator[str]:
        """What of memory does not fit, and is played as if it did; how many peers are where is the swarm's own choice.
        And when steps that were asked for were not closed."""
        for problem in self.undisturbed.problems:
            if "placed" not in problem:
                yield f"{problem}; it is played as if that fitted"
        closed, wanted = len(self.result.steps), self.case.steps
        if closed < wanted and self.result.ended_s >= self.case.until_s and wanted < MOST_STEPS:
            yield f"it ended after {_time(self.case.until_s)}, before step {closed + 1} of {wanted} was closed"

    def lines(self) -> Iterator[str]:
        """Yield what people read."""
        case, result, told = self.case, self.result, self.document()
        classes = listed([f"{one.count:,} x {one.name}" for one in case.classes])
        cut = f"{min(case.stages)}" if len(set(case.stages)) == 1 else f"{min(case.stages)}-{max(case.stages)}"
        yield f"{self.name} ({result.fidelity}): {self.model}"
        yield (
            f"  {count(case.peers, 'peer')} ({classes}; {count(len(case.trainers), 'trainer')}),"
            f" {count(len(case.stages), 'stage')} of {cut} layers, {case.microbatches:,} microbatches of"
            f" {count(case.rows, 'row')} a step"
        )
        yield from (f"  note: {problem}" for problem in told["problems"])
        if not result.steps:
            yield f"no step was closed in {_time(result.ended_s)}"
        else:
            yield (
                f"{count(len(result.steps), 'step')} in {_time(result.ended_s)}: {self.step_s:.4g} s a step"
                f" (median; {LATE:.0%} in {told['step_s_95']:.4g} s), {self.microbatches_s:.4g} microbatches/s,"
                f" {told['tokens_s']:,.0f} tokens/s"
            )
            binding = self.undisturbed.limits[0].name
            yield (
                f"  reckoned with everybody there: {self.undisturbed.step_s:.4g} s, bound by {binding};"
                f" {told['of_reckoned']:.1%} of that pace was kept"
            )
        counts = told["counts"]
        yield (
            f"  machines taken {told['removed']}, joined {counts['joins']}; moved {counts['moves']}"
            f" (rule {case.turnover.rule}); steps given up {counts['given up']}"
            + (f"; fewest peers at a stage when a step closed {told['fewest']}" if result.steps else "")
        )
        yield from _variants(told["parts"])
        yield from (f"  {name}: {value:.4g}" for name, value in result.more.items())
        yield f"hash {told['hash']}"


def _variants(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what passes each variant, and how many hosts it has; nothing where no stage has any."""
    for one in parts:
        if variant_of(PartName(one["part"]))[1] > 1:
            each = f", {one['load'] / one['hosts']:.1%} at each" if one["hosts"] else ""
            hosts = count(one["hosts"], "host")
            yield f"  {one['part']}: {one['load']:.1%} of the microbatches passed it; {hosts} at the end{each}"


def _time(seconds: float) -> str:
    return f"{seconds / HOUR:.3g} h" if seconds >= HOUR / 10 else f"{seconds:.3g} s"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 72, 24, 64, 52
COLOURS = ("#2a6fbb", "#c2571a", "#4f9d69")
INK, GRID = "#333333", "#dddddd"
HOUR, SHORT_H = 3600.0, 0.05
MOST_POINTS = 1_000
"""Of a curve: of more steps each point is the mean of several."""

Curve = Sequence[tuple[float, float]]


def pictures(title: str, result: SimulationResult) -> dict[str, str]:
    """Return file name → SVG document; none of a simulation that closed no step."""
    if not result.steps:
        return {}
    unit, name = (HOUR, "hours") if result.ended_s / HOUR > SHORT_H else (1.0, "seconds")
    times = [step.closed_s / unit for step in result.steps]
    seconds = {"a step": list(zip(times, (step.seconds for step in result.steps), strict=True))}
    peers = {
        "stage hosts that are there": list(zip(times, (float(step.peers) for step in result.steps), strict=True)),
        "at the stage that has fewest": list(zip(times, (float(step.fewest) for step in result.steps), strict=True)),
    }
    return {
        "steps.svg": curves_svg(f"{title}: seconds of a step", seconds, name, "seconds"),
        "peers.svg": curves_svg(f"{title}: peers", peers, name, "peers"),
    }


def curves_svg(title: str, curves: Mapping[str, Curve], across: str, up: str) -> str:
    """A complete SVG document: curves over the same axes, both from 0 on, each with its name."""
    curves = {name: _thinned(points) for name, points in curves.items()}
    points = [point for curve in curves.values() for point in curve]
    x = Axis(0.0, max(at for at, _ in points) or 1.0, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 1.08 * max(value for _, value in points) or 1.0, HEIGHT - BOTTOM, TOP)
    body = [text(WIDTH / 2, 26, title, size=15), *_axes(x, y, across, up)]
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x.place(at):.1f},{y.place(value):.1f}" for at, value in curve)
        left = LEFT + 8 + number * 230
        body += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            line(left, 46, left + 22, 46, colour, 2),
            text(left + 30, 50, name, anchor="start"),
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _thinned(curve: Curve) -> Curve:
    each = -(-len(curve) // MOST_POINTS)
    groups = [curve[at : at + each] for at in range(0, len(curve), each)]
    return [
        (sum(at for at, _ in group) / len(group), sum(value for _, value in group) / len(group)) for group in groups
    ]


def _axes(x: Axis, y: Axis, across: str, up: str) -> list[str]:
    drawn = []
    for value in ticks(y.low, y.high):
        at = y.place(value)
        drawn += [line(x.start, at, x.end, at, GRID), text(x.start - 8, at + 4, f"{value:g}", anchor="end")]
    for value in ticks(x.low, x.high):
        at = x.place(value)
        drawn += [line(at, y.start, at, y.start + 5, INK), text(at, y.start + 19, f"{value:g}")]
    middle = (y.start + y.end) / 2
    return [
        *drawn,
        line(x.start, y.start, x.end, y.start, INK),
        line(x.start, y.start, x.start, y.end, INK),
        text((x.start + x.end) / 2, HEIGHT - 12, across),
        f'<g transform="rotate(-90 18 {middle:.1f})">{text(18, middle, up)}</g>',
    ]

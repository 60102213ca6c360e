"""The pictures of a simulation, as SVG files: seconds of each step, and peers over time. Drawn by hand, as the loss
curve of ``swarm quickstart`` is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peers.local.plot import Axis, line, text, ticks
from swarm.sim.simulation import SimulationResult

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

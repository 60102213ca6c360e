"""The loss curve as an SVG file and as lines of text, drawn by hand: no plotting library for one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[int, float]
"""(step, loss)."""

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 48, 52
_TRAINED, _HELD_OUT, _INK, _GRID = "#2a6fbb", "#c2571a", "#333333", "#dddddd"


@dataclass(frozen=True, slots=True)
class Axis:
    """Data from ``low`` to ``high`` on pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def loss_svg(title: str, trained: Sequence[Point], held_out: Sequence[Point]) -> str:
    """A complete SVG document: training loss as a line, held-out losses as dots with their values.

    Losses that are not finite are left out. An empty run gives an empty frame.
    """
    trained = [point for point in trained if math.isfinite(point[1])]
    points = [*trained, *held_out]
    x = Axis(0, max([1, *(step for step, _ in points)]), _LEFT, _WIDTH - _RIGHT)
    losses = [loss for _, loss in points] or [0.0, 1.0]
    low, high = min(losses), max(losses)
    margin = 0.08 * (high - low) or 0.5
    y = Axis(low - margin, high + margin, _HEIGHT - _BOTTOM, _TOP)
    body = [*_frame(title, x, y), *_curve(trained, x, y), *_dots(held_out, x, y), *_legend(bool(held_out))]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def loss_text(points: Sequence[Point], columns: int = 60, rows: int = 8) -> list[str]:
    """Return the curve as lines for a terminal, in plain ASCII: each column the mean of its steps. Nothing for fewer
    than two losses that are finite."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return []
    first, last = points[0][0], points[-1][0]
    columns = min(columns, last - first + 1)
    x = Axis(first, last, 0, columns - 1)
    by_column: dict[int, list[float]] = {}
    for step, loss in points:
        by_column.setdefault(round(x.place(step)), []).append(loss)
    means = {column: sum(losses) / len(losses) for column, losses in by_column.items()}
    low, high = min(means.values()), max(means.values())
    y = Axis(low, max(high, low + 1e-3), rows - 1, 0)
    lines = []
    for row in range(rows):
        label = {0: f"{high:.2f}", rows - 1: f"{low:.2f}"}.get(row, "")
        marks = ("*" if c in means and round(y.place(means[c])) == row else " " for c in range(columns))
        lines.append(f"{label:>7} |{''.join(marks)}".rstrip())
    return [*lines, f"{'':7} +{'-' * columns}", f"{'step':>7}  {first:<{max(1, columns - len(str(last)))}}{last}"]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between ``low`` and ``high``, 1, 2 or 5 times a power of ten apart, at most about ``most``."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / distance)
    return [number * distance for number in range(first, math.floor(high / distance) + 1)]


def _frame(title: str, x: Axis, y: Axis) -> list[str]:
    lines = [text(_WIDTH / 2, 26, title, size=15)]
    for value in ticks(y.low, y.high):
        at = y.place(value)
        lines.append(line(x.start, at, x.end, at, _GRID))
        lines.append(text(x.start - 8, at + 4, f"{value:g}", anchor="end"))
    for value in ticks(x.low, x.high):
        if value == int(value):
            at = x.place(value)
            lines.append(line(at, y.start, at, y.start + 5, _INK))
            lines.append(text(at, y.start + 19, f"{value:g}"))
    lines.append(line(x.start, y.start, x.end, y.start, _INK))
    lines.append(line(x.start, y.start, x.start, y.end, _INK))
    lines.append(text((x.start + x.end) / 2, _HEIGHT - 12, "step"))
    middle = (y.start + y.end) / 2
    lines.append(f'<g transform="rotate(-90 18 {middle:.1f})">{text(18, middle, "loss (nats per token)")}</g>')
    return lines


def _curve(points: Sequence[Point], x: Axis, y: Axis) -> list[str]:
    path = " ".join(f"{x.place(step):.1f},{y.place(loss):.1f}" for step, loss in points)
    return [f'<polyline points="{path}" fill="none" stroke="{_TRAINED}" stroke-width="2"/>'] if points else []


def _dots(points: Sequence[Point], x: Axis, y: Axis) -> list[str]:
    lines = []
    for step, loss in points:
        at_x, at_y = x.place(step), y.place(loss)
        anchor, beside = ("start", 9) if at_x < (x.start + x.end) / 2 else ("end", -9)
        lines.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{_HELD_OUT}"/>')
        lines.append(text(at_x + beside, at_y - 8, f"{loss:.2f}", anchor=anchor, colour=_HELD_OUT))
    return lines


def _legend(held_out: bool) -> list[str]:
    left = _WIDTH - _RIGHT - 150
    lines = [line(left, 62, left + 22, 62, _TRAINED, 2), text(left + 30, 66, "training batch", anchor="start")]
    if held_out:
        lines.append(f'<circle cx="{left + 11}" cy="82" r="5" fill="{_HELD_OUT}"/>')
        lines.append(text(left + 30, 86, "held-out text", anchor="start"))
    return lines


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, colour: str = _INK) -> str:
    """Words at a place, any characters."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )

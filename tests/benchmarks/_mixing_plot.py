"""Curves of disagreement over rounds as an SVG file, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from peers.local.plot import Axis, ticks

WIDTH, HEIGHT = 720, 420
LEAST = 1e-12
"""What is below is drawn there: exact up to rounding."""
COLOURS = ("#2a6fbb", "#c2571a", "#3a8a4d", "#8650a8", "#666666", "#b8860b", "#a03050")


def mixing_svg(title: str, curves: Mapping[str, Sequence[float]]) -> str:
    """A complete SVG document: for each name the mean squared distance after 0, 1, 2 … rounds."""
    rounds = max(len(curve) for curve in curves.values()) - 1
    x, y = Axis(0, rounds, 64, WIDTH - 150), Axis(log10(LEAST), 0.5, HEIGHT - 52, 48)
    body = [_text(WIDTH / 2, 26, title, "middle")]
    for power in range(round(log10(LEAST)), 1, 2):
        at = y.place(power)
        body.append(f'<path d="M{x.start} {at:.1f}H{x.end}" stroke="#dddddd"/>')
        body.append(_text(x.start - 8, at + 4, f"1e{power}", "end"))
    body += [_text(x.place(value), y.start + 19, f"{value:g}", "middle") for value in ticks(0, rounds)]
    body.append(_text((x.start + x.end) / 2, HEIGHT - 12, "round", "middle"))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{x.place(round):.1f},{y.place(log10(max(LEAST, left))):.1f}" for round, left in enumerate(curve)
        )
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = 60 + 18 * number
        body.append(f'<path d="M{x.end + 14} {at}h20" stroke="{colour}" stroke-width="2"/>')
        body.append(_text(x.end + 40, at + 4, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

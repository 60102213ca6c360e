"""Draw the picture of a play: each peer's life as a bar with what struck it, above the loss, on the same axis of time.

    open("picture.svg", "w").write(picture_svg("kill-storm: …", lives, strikes, closings))

Drawn by hand, as the loss curve is; seconds count from the first closed step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from peers.chaos.figures import StepClosing, counts
from peers.chaos.lives import PeerLifetime, Span, State, Struck
from peers.local.plot import Axis, line, text, ticks

WIDTH, LEFT, RIGHT, TOP = 1080, 132, 28, 84
ROW, BAR, GROUP_GAP = 19, 11, 10
LOSS_HEIGHT, BELOW, BETWEEN = 170, 46, 34
LEAD_S = 4.0
"""How much is shown of the time before the first step closed."""
LONGEST = 118
"""Characters of the title that fit."""
COLOURS: Mapping[State, str] = {
    "joining": "#f2c14e",
    "ready": "#4f9d69",
    "leaving": "#9cc5a1",
    "away": "#8e7cc3",
    "cut off": "#d98032",
}
WORDS: Mapping[State, str] = {
    "joining": "joining",
    "ready": "ready",
    "leaving": "leaving in order",
    "away": "paused",
    "cut off": "cut off",
}
INK, GRID, FAINT, LOSS, STRUCK = "#222222", "#e3e3e3", "#8a8a8a", "#2a6fbb", "#c0272d"


@dataclass(frozen=True, slots=True)
class _Row:
    life: PeerLifetime
    y: float


def picture_svg(
    title: str, lives: Sequence[PeerLifetime], strikes: Sequence[Struck], closed: Sequence[StepClosing]
) -> str:
    """A complete SVG document. Peers are grouped by region, in their order; losses that are not finite are left out."""
    trained = [one.wall for one in closed if one.tokens]
    zero = trained[0] if trained else min((span.from_s for life in lives for span in life.spans), default=0.0)
    last = max([zero + 1.0, *(span.to_s for life in lives for span in life.spans), *(one.wall for one in closed)])
    rows, groups, bottom = _rows(lives)
    x = Axis(-LEAD_S, last - zero, LEFT, WIDTH - RIGHT)
    top = bottom + BETWEEN
    height = top + LOSS_HEIGHT + BELOW
    body = [
        text(LEFT, 26, title if len(title) <= LONGEST else f"{title[: LONGEST - 1]}…", anchor="start", size=15),
        *_legend(),
        *_times(x, rows, top),
        *_groups(groups),
        *(one for row in rows for one in _life(row, x, zero)),
        *_struck(strikes, rows, x, zero, (TOP - 8, top + LOSS_HEIGHT)),
        *_loss(closed, x, zero, top),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12" role="img">\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _rows(lives: Sequence[PeerLifetime]) -> tuple[list[_Row], list[tuple[str, float, float]], float]:
    """(rows, (region, from, to) of each group, where they end)."""
    regions = sorted({life.player.region for life in lives})
    rows, groups, y = list[_Row](), list[tuple[str, float, float]](), float(TOP)
    for region in regions:
        began = y
        for life in lives:
            if life.player.region == region:
                rows.append(_Row(life, y))
                y += ROW
        groups.append((region, began, y))
        y += GROUP_GAP if len(regions) > 1 else 0
    return rows, groups, y


def _groups(groups: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    if len(groups) < 2:
        return
    for region, began, ended in groups:
        if region:
            yield line(26, began, 26, ended - 8, FAINT, 2)
            middle = (began + ended) / 2 - 4
            yield f'<g transform="rotate(-90 18 {middle:.1f})">{text(18, middle, region, size=12)}</g>'


def _life(row: _Row, x: Axis, zero: float) -> Iterator[str]:
    yield text(LEFT - 8, row.y + BAR - 1, row.life.player.name, anchor="end")
    if row.life.spans:
        began = max(x.low, row.life.spans[0].from_s - zero)
        middle = row.y + BAR / 2
        yield line(x.place(min(began, x.high)), middle, x.end, middle, GRID, 1)
    for span in row.life.spans:
        from_s, to_s = max(span.from_s - zero, x.low), min(span.to_s - zero, x.high)
        if to_s > from_s:
            yield _bar(span, x.place(from_s), x.place(to_s), row.y)


def _bar(span: Span, from_x: float, to_x: float, y: float) -> str:
    said = f"{WORDS[span.state]}{f', {span.part}' if span.part else ''}, {span.to_s - span.from_s:.1f} s"
    return (
        f'<rect x="{from_x:.1f}" y="{y:.1f}" width="{max(1.0, to_x - from_x):.1f}" height="{BAR}" rx="2" '
        f'fill="{COLOURS[span.state]}"><title>{escape(said)}</title></rect>'
    )


def _struck(
    strikes: Sequence[Struck], rows: Sequence[_Row], x: Axis, zero: float, over: tuple[float, float]
) -> Iterator[str]:
    """A thin line over everything where something struck, and a mark on each peer that it hit."""
    heights = {row.life.player.name: row.y for row in rows}
    for strike in strikes:
        at = x.place(min(max(strike.wall - zero, x.low), x.high))
        if counts(strike):
            yield (
                f'<line x1="{at:.1f}" y1="{over[0]}" x2="{at:.1f}" y2="{over[1]:.1f}" stroke="{STRUCK}" '
                f'stroke-width="1" stroke-dasharray="2 3" opacity="0.45"/>'
            )
        for name in strike.peers:
            if name in heights:
                yield _mark(strike, at, heights[name] + BAR / 2)


def _mark(strike: Struck, at: float, y: float) -> str:
    kind = strike.kind.replace("_", " ")
    said = f"<title>{escape(f'{kind}: {strike.label}' if strike.label else kind)}</title>"
    if not counts(strike):
        points = f"{at - 3:.1f},{y - 5:.1f} {at + 5:.1f},{y:.1f} {at - 3:.1f},{y + 5:.1f}"
        return f'<polygon points="{points}" fill="#ffffff" stroke="{INK}" stroke-width="1">{said}</polygon>'
    if strike.kind in ("kill", "limit_memory"):
        return (
            f'<path d="M{at - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" stroke="{STRUCK}" stroke-width="2.4" '
            f'fill="none">{said}</path>'
        )
    return (
        f'<circle cx="{at:.1f}" cy="{y:.1f}" r="4.5" fill="#ffffff" stroke="{STRUCK}" stroke-width="2">{said}</circle>'
    )


def _times(x: Axis, rows: Sequence[_Row], top: float) -> Iterator[str]:
    bottom = top + LOSS_HEIGHT
    for value in ticks(x.low, x.high, 10):
        at = x.place(value)
        yield line(at, TOP - 8, at, bottom, GRID)
        yield line(at, bottom, at, bottom + 5, INK)
        yield text(at, bottom + 19, f"{value:g}")
    yield text((x.start + x.end) / 2, bottom + 38, "seconds since the first step closed")


def _loss(closed: Sequence[StepClosing], x: Axis, zero: float, top: float) -> Iterator[str]:
    points = [(one.wall - zero, one.loss) for one in closed if math.isfinite(one.loss) and one.tokens]
    losses = [loss for _, loss in points] or [0.0, 1.0]
    margin = 0.08 * (max(losses) - min(losses)) or 0.5
    y = Axis(min(losses) - margin, max(losses) + margin, top + LOSS_HEIGHT, top)
    for value in ticks(y.low, y.high, 4):
        yield line(x.start, y.place(value), x.end, y.place(value), GRID)
        yield text(x.start - 8, y.place(value) + 4, f"{value:g}", anchor="end")
    yield line(x.start, y.start, x.end, y.start, INK)
    yield line(x.start, y.start, x.start, y.end, INK)
    middle = (y.start + y.end) / 2
    yield f'<g transform="rotate(-90 84 {middle:.1f})">{text(84, middle, "loss (nats per token)")}</g>'
    if points:
        path = " ".join(f"{x.place(at):.1f},{y.place(loss):.1f}" for at, loss in points)
        yield f'<polyline points="{path}" fill="none" stroke="{LOSS}" stroke-width="1.6"/>'
        for at, loss in points:  # one dot for each step: where they are far apart, nothing was closed
            yield f'<circle cx="{x.place(at):.1f}" cy="{y.place(loss):.1f}" r="1.8" fill="{LOSS}"/>'


def _legend() -> Iterator[str]:
    at, y = float(LEFT), 48
    for state, colour in COLOURS.items():
        yield f'<rect x="{at:.1f}" y="{y - 10}" width="18" height="{BAR}" rx="2" fill="{colour}"/>'
        yield text(at + 24, y, WORDS[state], anchor="start")
        at += 42 + 5.8 * len(WORDS[state])
    for kind, label, said in (
        ("kill", "", "killed"),
        ("pause", "", "struck otherwise"),
        ("start", "", "started again"),
    ):
        yield _mark(Struck(0.0, kind, label, ()), at + 6, y - 4)
        yield text(at + 18, y, said, anchor="start")
        at += 38 + 5.8 * len(said)
    yield line(at + 2, y - 4, at + 20, y - 4, LOSS, 2)
    yield text(at + 26, y, "loss, one dot a step", anchor="start")

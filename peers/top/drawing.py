"""Draw a run's state (:meth:`peers.dashboard.overview.Overview.document`) as lines of text of a given size. Pure.

Names and reasons come from other peers: all text goes through :func:`fitted`, which leaves no control character and no
more than its columns, and is never read as markup. Nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.cells import cell_len, set_cell_size
from textual.content import Content

from peers.console.event_words import harmless
from peers.console.words import amount, count, learnt_text
from swarm.clock import moment
from swarm.disk import size_text

State = Mapping[str, Any]
Drawing = Callable[[State, int, int], Content]
"""Gets a state, columns and rows; a pane scrolls through more rows."""

BUSY, WAITING, IDLE = "█", "▒", "·"
MARKS = {"lost": "!", "left": "-", "joined": "+", "moved": "~", "silent": "?", "back": "*"}
"""Of churn under the curve, the first of them where several fall on one column."""
MAX_HAPPENED = 300
WIDE = 100
"""From so many columns on there is room for what is seldom asked."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_BOLD, _DIM, _GOOD, _WARN, _BAD = "bold", "dim", "$text-success", "$text-warning", "$text-error"
_STATES = {
    "training": _GOOD, "back": _GOOD, "stalled": _BAD, "away": _BAD, "silent": _BAD, "lost": _BAD, "draining": _WARN,
    "waiting": _WARN, "left": _DIM,
}  # fmt: skip
_Piece = str | tuple[str, str]


TOLD = 6
"""Rows of a text that a person should know, at most."""


def fitted(text: object, width: int, *, right: bool = False) -> str:
    """Return text of others in exactly ``width`` columns, cut or padded."""
    return _cut(harmless(str(text)), width, right=right)


def _cut(text: str, width: int, *, right: bool = False) -> str:
    """Return harmless text so wide."""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return " " * (width - size) + text if right else text + " " * (width - size)


def _lines(rows: Iterable[Sequence[_Piece]]) -> Content:
    """Return rows of pieces, each a text and maybe its style, as one text."""
    pieces: list[_Piece] = []
    for row in rows:
        pieces += (*row, "\n")
    return Content.assemble(*pieces[:-1])


def duration(seconds: float) -> str:
    """Return a time to wait in words of two units at most: ``3 d 4 h``, ``1 h 03 min``, ``20 s``."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60:02} min"
    return f"{minutes} min {whole % 60:02} s" if minutes else f"{whole} s"


def seconds_left(state: State) -> float | None:
    """Return how long the rest of the run takes at the speed of its newest steps; None where that is not known."""
    steps = state["run"]["steps"]
    timed = [(row[0], row[5]) for row in state["steps"][-16:] if row[5] is not None]
    if steps is None or state["state"] != "training" or len(timed) < 2:
        return None
    (first, began), (last, ended) = timed[0], timed[-1]
    return (steps - state["step"]) * (ended - began) / (last - first) if ended > began else None


# --- header ----------------------------------------------------------------------------------------------------------


def header(state: State, width: int, *, paused: bool = False) -> Content:
    """Return what is asked first: which run, how it stands and how far it is, and below what a person should know."""
    said = "PAUSED" if paused else moment(state["at"])[:8]
    source = state["source"].get("label", "")
    name, standing = harmless(state["run"]["name"]) or "(no name yet)", state["state"]
    room = width - len(said) - 1
    left = fitted(name, min(cell_len(name), max(8, room - 40)))
    middle = f"  {standing}"
    seen = _cut(f"   seen by {harmless(source)}" if source else "", max(0, room - cell_len(left) - len(middle)))
    first: list[_Piece] = [
        (left, _BOLD),
        (middle, _STATES.get(standing, "")),
        (seen, _DIM),
        " ",
        (said, _WARN if paused else ""),
    ]
    rows: list[Sequence[_Piece]] = [first, [_that_fit(_facts(state), width)]]
    rows += _told(state["why"], width, _STATES.get(standing, _DIM)) if state["why"] else []
    for note in state["notes"][:2]:
        rows += _told(note, width, _WARN)
    return _lines(rows)


def _told(text: str, width: int, style: str) -> list[Sequence[_Piece]]:
    """Return what a person should know, in as many rows as it takes: what to do next comes last."""
    return [[(fitted(line, width), style)] for line in wrap(f"! {text}", max(8, width), subsequent_indent="  ")[:TOLD]]


def _facts(state: State) -> list[str]:
    """Return the figures of a run, the most important first."""
    steps, loss, speed, left = state["run"]["steps"], state["loss"], state["tokens_per_s"], seconds_left(state)
    facts = [f"step {state['step']:,}" + ("" if steps is None else f"/{steps:,}")]
    facts.append("loss –" if loss is None else f"loss {loss:.4f}")
    if state.get("held_out"):
        facts.append(f"held out {state['held_out'][1]:.4f} after step {state['held_out'][0]:,}")
    facts.append("– tokens/s" if speed is None else f"{amount(speed)} tokens/s")
    facts.append(count(state["members"], "member"))
    if left is not None:
        facts.append(f"ETA {duration(left)}")
    since = f"since step {state['since_step']:,}" if state["since_step"] > 1 else "so far"
    sends = [f"sends {state['run']['codecs']}"] if state["run"].get("codecs") else []
    return [*facts, f"{learnt_text(state['tokens'], state['computed_tokens'], amount)} {since}", *sends]


def _that_fit(facts: Sequence[str], width: int) -> str:
    line = ""
    for fact in facts:
        longer = f"{line}   {fact}" if line else fact
        if cell_len(longer) > width:
            break
        line = longer
    return line


# --- replicas by part ------------------------------------------------------------------------------------------------


def grid(state: State, width: int, height: int) -> Content:
    """Return each part with its replicas: what each does, what waits for it, and how it spends its time."""
    peers = state["peers"]
    name, bar, rest, wide = _layout(width)
    rates = f"{'out/s':>7} {'in/s':>7} {'ping':>8} " if wide else ""
    title = f"  {'replica':<{name}} {'state':<9} {'queue':>5} {'busy':<{bar + 5}} {'link':<8} {rates}{'':<{rest}}"
    rows: list[Sequence[_Piece]] = [[(title, _DIM)]]
    shown: set[str] = set()
    for part in state["parts"]:
        rows.append(_part_heading(part, width))
        rows += [row for peer in part["peers"] for row in _replica(peers[peer], width)]
        shown.update(part["peers"])
    others = [one for peer, one in peers.items() if peer not in shown]
    for heading, found in (
        ("without a part", [one for one in others if one["here"]]),
        ("waiting to be let in", [one for one in others if one["state"] == "waiting"]),
        ("left and lost", [one for one in others if one["state"] in ("left", "lost")]),
    ):
        if found:
            rows.append([(fitted(f"{heading}: {len(found)}", width), _BOLD)])
            rows += [row for one in found for row in _replica(one, width)]
    if len(rows) == 1:
        rows.append([(fitted("No member is known yet.", width), _DIM)])
    return _lines(rows)


def _part_heading(part: Mapping[str, Any], width: int) -> Sequence[_Piece]:
    told = [f"{part['live']} live"]
    if part["participating"] is not None:
        told += [f"{part['participating']} took part", f"{part['averaged']} averaged in the last step"]
    told += [harmless(part["said"])] if part["said"] else []
    why = "; ".join(f"{name}: {reason}" for name, reason in part["why"].items())
    name = harmless(part["part"])
    return [(name, _BOLD), "  ", fitted(", ".join(told) + (f" ({why})" if why else ""), width - cell_len(name) - 2)]


def _layout(width: int) -> tuple[int, int, int, bool]:
    """Return the columns of a name, of a bar and of what is left, and whether a row also has rates."""
    wide = width >= WIDE
    name, bar = (24, 16) if wide else (16, 10)
    return name, bar, max(0, width - name - bar - (62 if wide else 36)), wide


def _replica(one: Mapping[str, Any], width: int) -> Iterable[Sequence[_Piece]]:
    """Yield a peer's row, and a second where what is to be said beside it has no room."""
    name, bar, rest, wide = _layout(width)
    standing, queued = one["state"], one["queued"]
    pieces: list[_Piece] = [
        f"  {fitted(one['name'], name)} ",
        (fitted(standing, 9), _STATES.get(standing, "")),
        f" {fitted('–' if queued is None else queued, 5, right=True)} ",
        *_bar(one, bar),
        f" {fitted(one['link'], 8)} ",
    ]
    if wide:
        speeds = (_bytes(one["sent_per_s"]), _bytes(one["received_per_s"]))
        ping = "–" if one["round_trip_ms"] is None else f"{one['round_trip_ms']:.0f} ms"
        pieces.append(f"{speeds[0]:>7} {speeds[1]:>7} {ping:>8} ")
    note = "; ".join(f"on probation by {one['by']} {one['left_s']:.0f} s: {one['why']}" for one in one["probation"])
    note, style = harmless(note or one["why"]), _WARN if note else _DIM
    if cell_len(note) <= rest:
        yield [*pieces, (_cut(note, rest), style)]
        return
    yield pieces
    yield ["      ", (_cut(note, width - 6), style)]


def _bar(one: Mapping[str, Any], width: int) -> Sequence[_Piece]:
    """Return the shares of a peer's time, and the first of them in figures."""
    if one["busy"] is None:
        return [("–" + " " * (width + 4), _DIM)]
    busy = min(width, round(one["busy"] * width))
    waits = min(width, round((one["busy"] + one["waiting"]) * width)) - busy
    idle = width - busy - waits
    return [(BUSY * busy, _GOOD), (WAITING * waits, _WARN), (IDLE * idle, _DIM), f" {one['busy']:>4.0%}"]


def _bytes(per_s: float | None) -> str:
    return "–" if per_s is None else size_text(per_s).replace(" ", "")


# --- loss ------------------------------------------------------------------------------------------------------------


def spark(state: State, width: int) -> Content:
    """Return the curve in one line, with marks of churn in a second."""
    columns = max(1, width - 16)
    curve = curve_of(state["steps"], columns)
    if not curve:
        return Content("loss  no step is closed yet: the curve begins with the first\n")
    low, high = min(curve), max(curve)
    bars = "".join(_EIGHTHS[1 + _level(loss, low, high, 7)] for loss in curve)
    told = f"{curve[0]:>6.2f} ", f" {curve[-1]:.2f}"
    return _lines([["loss", told[0], (bars, "$primary"), told[1]], ["   ", " " * 8, *_marks(state, columns)]])


def plot(state: State, width: int, height: int) -> Content:
    """Return the curve with its axes, and under it who came and went."""
    columns, rows = max(1, width - 9), max(2, height - 3)
    curve = curve_of(state["steps"], columns)
    if not curve:
        return Content("No step is closed yet.")
    low, high = min(curve), max(curve)
    levels = [1 + _level(loss, low, high, 8 * rows - 1) for loss in curve]
    drawn: list[Sequence[_Piece]] = []
    for row in range(rows - 1, -1, -1):
        label = f"{low + (high - low) * row / (rows - 1):8.3f} " if row in (0, rows // 2, rows - 1) else " " * 9
        cells = "".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels)
        drawn.append([(label, _DIM), (cells, "$primary")])
    first, last = state["steps"][0][0], state["steps"][-1][0]
    axis = f"step {first:,}".ljust(max(0, columns - len(f"{last:,}"))) + f"{last:,}"
    legend = "   ".join(f"{mark} {what}" for what, mark in MARKS.items())
    drawn += [["         ", *_marks(state, columns)], [(f"         {axis[:columns]}", _DIM)]]
    drawn.append([(_cut(f"         churn: {legend}", width), _DIM)])
    return _lines(drawn)


def curve_of(rows: Sequence[Sequence[Any]], columns: int) -> list[float]:
    """Return a loss for each column: the mean of the steps that fall on it, else that of the column before."""
    known = [(row[0], row[1]) for row in rows if row[1] is not None and math.isfinite(row[1])]
    if not known:
        return []
    first, last = rows[0][0], rows[-1][0]
    sums: dict[int, tuple[float, int]] = {}
    for step, loss in known:
        column = _column(step, first, last, columns)
        total, number = sums.get(column, (0.0, 0))
        sums[column] = total + loss, number + 1
    curve, newest = [], known[0][1]
    for column in range(columns):
        if column in sums:
            newest = sums[column][0] / sums[column][1]
        curve.append(newest)
    return curve


def _column(step: int, first: int, last: int, columns: int) -> int:
    """Return the first column of a step, or the one that it shares with others."""
    return (step - first) * columns // (last - first + 1)


def _level(value: float, low: float, high: float, most: int) -> int:
    return most if high <= low else round((value - low) / (high - low) * most)


def _marks(state: State, columns: int) -> Sequence[_Piece]:
    """Return the line of marks; each says the gravest of what happened on its column."""
    first, last = state["steps"][0][0], state["steps"][-1][0]
    kinds, found = list(MARKS), dict[int, str]()
    for entry in state["churn"]:
        if entry["what"] in MARKS and first <= entry["step"] <= last:
            column = _column(entry["step"], first, last, columns)
            if column not in found or kinds.index(entry["what"]) < kinds.index(found[column]):
                found[column] = entry["what"]
    end = max(found, default=-1) + 1
    styles = {"lost": _BAD, "left": _WARN, "joined": _GOOD, "moved": "", "silent": _BAD, "back": _GOOD}
    return [(MARKS[found[at]], styles[found[at]]) if at in found else " " for at in range(end)]


# --- contributions, and what happened --------------------------------------------------------------------------------


def contributions(state: State, width: int, height: int) -> Content:
    """Return what of each peer's work counts by the close records, the largest first, of who has left too."""
    peers = [one for one in state["peers"].values() if one["tokens"] or one["trained_tokens"]]
    held, brought = (sum(one[key] for one in peers) for key in ("tokens", "trained_tokens"))
    name = max(8, min(24, width - 64))
    bar = max(0, width - name - 64)
    title = (
        f"{'peer':<{name}} {'state':<9} {'computed':>10} {'tokens':>8} {'share':>6} {'brought':>9} {'tokens':>8}  share"
    )
    rows: list[Sequence[_Piece]] = [[(_cut(title, width), _DIM)]]
    for one in sorted(peers, key=lambda one: (-one["tokens"] - one["trained_tokens"], one["name"])):
        share, lent = (one["tokens"] / (held or 1), one["trained_tokens"] / (brought or 1))
        computed = f"{one['microbatches']:>10,} {amount(one['tokens']):>8} {share:>6.1%}"
        fed = f"{one['trained_microbatches']:>9,} {amount(one['trained_tokens']):>8} {lent:>6.1%}"
        fed = fed if one["trained_microbatches"] else " " * len(fed)
        computed = computed if one["microbatches"] else " " * len(computed)
        style = "" if one["here"] else _DIM
        line = f"{fitted(one['name'], name)} {fitted(one['state'], 9)} {computed} {fed} "
        rows.append([(line, style), (BUSY * round(max(share, lent) * bar), "$primary")])
    if len(rows) > 1 and state["since_step"] > 1:
        rows.append([(fitted(f"Counted since step {state['since_step']:,}.", width), _DIM)])
    if len(rows) == 1:
        rows.append([(fitted("No work is committed yet, or there is no history to read it from.", width), _DIM)])
    return _lines(rows)


def happened(state: State, width: int, height: int) -> Content:
    """Return who came and went, what moved, and the events, the newest first."""
    told = [
        *((entry.get("at"), entry["what"], _of_churn(entry)) for entry in state["churn"]),
        *((entry.get("at"), "moved", _of_move(entry)) for entry in state["moves"]),
        *((entry.get("at"), entry["label"], f"{entry['who']}: {entry['text']}") for entry in state["events"]),
    ]
    told.sort(key=lambda one: one[0] or 0.0, reverse=True)
    rows: list[Sequence[_Piece]] = []
    for at, label, text in told[:MAX_HAPPENED]:
        time = moment(at)[:8] if at is not None else "–"
        style = _STATES.get(label, _BOLD)
        rows.append([(f"{time:>8} ", _DIM), (fitted(label, 12), style), f" {fitted(text, max(0, width - 22))}"])
    return _lines(rows) if rows else Content("Nothing has happened yet.")


def _of_churn(entry: Mapping[str, Any]) -> str:
    why = f": {entry['why']}" if entry["why"] else ""
    part = f", {entry['part']}" if entry["part"] else ""
    return f"{entry['name']}{part}, with step {entry['step']}{why}"


def _of_move(entry: Mapping[str, Any]) -> str:
    times = f" ({entry['times']} times)" if entry.get("times", 1) > 1 else ""
    if entry["what"] == "part":
        return f"{entry['who']} from {entry['old']} to {entry['new']}: {entry['why']}{times}"
    where = f"microbatch of stage {entry['stage']}, {entry['way']}"
    return f"{where}: from {entry['old']} to {entry['new']}: {entry['why']}{times}"

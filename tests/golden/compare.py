"""What two checkouts made of the same stories, side by side: pure, from what :mod:`tests.golden.side` wrote.

Weights, faults and how often each thing happened are always compared; of events all fields, with their virtual times,
but for the bytes that went over the wire (:data:`SIZES`), on which nothing else depends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from tests.golden.expected import Expected

SIZES: frozenset[tuple[str, str]] = frozenset({("LinkUsage", "bytes_sent"), ("LinkUsage", "bytes_received")})
"""(kind, field) that count framing and encoded messages."""
NUMBERS = frozenset({"clip", "digests", "grad_norm", "loss", "loss_sum"})
"""Fields of events and records, at any depth, that follow from weights: left out where those are meant to differ."""
NOTHING = "(nothing more)"
LONGEST = 600

Runs = Mapping[tuple[str, int], Mapping[str, Any]]
"""What one checkout made of stories, by name and seed."""


@dataclass(slots=True)
class Row:
    """A story with all its seeds: how many were equal, and how much was compared."""

    story: str
    seeds: int = 0
    equal: int = 0
    events: int = 0
    digests: int = 0
    faults: int = 0


@dataclass(slots=True)
class Report:
    """All rows, and every difference in words; the first of a story with its lines."""

    rows: list[Row] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def compare(base: Runs, ours: Runs, expected: Sequence[Expected] = (), *, whole: bool = True) -> Report:
    """Every difference that is not ``expected``; of ``whole`` runs, and every line of that which allows for none."""
    report = Report()
    rows: dict[str, Row] = {}
    needed: set[Expected] = set()
    for story, seed in dict.fromkeys([*base, *ours]):
        row = rows.setdefault(story, Row(story))
        row.seeds += 1
        one, other = base.get((story, seed)), ours.get((story, seed))
        if one is None or other is None:
            found = ["was not run by both"]
        else:
            about = [line for line in expected if line.is_of(story)]
            found = _differences(one, other, about)
            needed |= {
                line for line in about if _differences(one, other, [each for each in about if each != line]) != found
            }
        row.equal += not found
        if other is not None:
            row.events += sum(map(len, other["events"].values()))
            row.digests += sum(digest is not None for digest in other["digests"].values())
            row.faults += len(other["faults"])
        report.differences += [f"{story}, seed {seed}: {what}" for what in found]
    report.rows = list(rows.values())
    for line in expected:
        if whole and line not in needed and any(line.is_of(story) for story in rows):
            what = f"{line.what} of {line.name} in {line.story}"
            report.differences.append(f"expected.py: nothing differs in {what}: take this line out")
    return report


def _differences(base: Mapping[str, Any], ours: Mapping[str, Any], expected: Sequence[Expected]) -> list[str]:
    """Of one story with one seed: what decides most comes first."""
    found = []
    for side, run in (("base", base), ("this checkout", ours)):
        if run["error"]:
            found.append(f"{side} failed: {run['error'].strip().splitlines()[-1]}\n{run['error']}")
        found += [f"{side} did not do what the story tells: {what}" for what in run["missing"]]
    if not any(digest for side in (base, ours) for digest in side["digests"].values()):
        found.append("neither side has weights that could be compared")
    for peer in sorted({*base["digests"], *ours["digests"]}):
        one, other = base["digests"].get(peer), ours["digests"].get(peer)
        part = (one or other or [""])[0]
        if one != other and not any(line.covers("weights", part) for line in expected):
            hint = "if that is meant, name the part in tests/golden/expected.py with the commit and why"
            found.append(f"weights of {peer} differ\n  base: {one}\n  this: {other}\n  {part}: {hint}.")
            break
    if base["faults"] != ours["faults"]:
        found.append(f"other faults fired\n  base: {base['faults']}\n  this: {ours['faults']}")
    found += _first_event(base["events"], ours["events"], expected)
    return found + _changed(base["counts"], ours["counts"], expected)


def _first_event(base: Mapping[str, Any], ours: Mapping[str, Any], expected: Sequence[Expected]) -> Iterator[str]:
    """The earliest event that differs, of whichever peer: what comes after it may only follow from it."""
    found = []
    for peer in sorted({*base, *ours}):
        sides = [list(_compared(side.get(peer, ()), expected)) for side in (base, ours)]
        for number, (one, other) in enumerate(zip_longest(*sides)):
            if one != other:
                times = [event["t"] for event in (one, other) if event and "t" in event]
                found.append((min(times, default=float("inf")), peer, number, one, other))
                break
    if not found:
        return
    _, peer, number, one, other = min(found, key=lambda each: each[:3])
    peers = f", and {len(found) - 1} other peers" if len(found) > 1 else ""
    lines = f"  base: {_line(one)}\n  this: {_line(other)}\n  {_hint(one, other)}"
    yield f"event {number} of {peer} differs{peers}\n{lines}"


def _compared(events: Iterable[dict[str, Any]], expected: Sequence[Expected]) -> Iterator[dict[str, Any]]:
    numbers = any(line.what == "weights" for line in expected)
    for event in events:
        kind = event["kind"]
        if not any(line.covers("events", kind) for line in expected):
            told = {key: value for key, value in event.items() if (kind, key) not in SIZES}
            yield _without_numbers(told) if numbers else told


def _without_numbers(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _without_numbers(value) for key, value in told.items() if key not in NUMBERS}
    return [_without_numbers(one) for one in told] if isinstance(told, list) else told


def _line(event: Mapping[str, Any] | None) -> str:
    if event is None:
        return NOTHING
    text = json.dumps(event, separators=(",", ":"))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _hint(base: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> str:
    meant = "if that is meant, name it in tests/golden/expected.py with the commit and why"
    if base is None or ours is None or base["kind"] != ours["kind"]:
        return f"Another sequence; {meant}."
    keys = [key for key in {**base, **ours} if base.get(key) != ours.get(key)]
    told = "\n".join(f"    {key}: {base.get(key)!r} → {ours.get(key)!r}" for key in keys)
    return f"The same event with other {', '.join(keys)}; {meant}.\n{told}"


def _changed(base: Mapping[str, int], ours: Mapping[str, int], expected: Sequence[Expected]) -> list[str]:
    """What there is more or less of, and should not be."""
    return [
        f"{name}: {base.get(name, 0)} → {ours.get(name, 0)}"
        for name in sorted({*base, *ours})
        if base.get(name, 0) != ours.get(name, 0) and not any(line.covers("counts", name) for line in expected)
    ]


def table(rows: Iterable[Row]) -> str:
    """For people."""
    lines = [("story", "seeds equal", "events", "digests", "faults")]
    lines += [(r.story, f"{r.equal} of {r.seeds}", f"{r.events}", f"{r.digests}", f"{r.faults}") for r in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join([line[0].strip().ljust(widths[0]), *line[1:]]) for line in padded)

"""The log of measurements: ``log.jsonl``, one JSON object a line, and the page ``LOG.md`` that is made of it.

A run has date, name, size, command, commit, seconds, machine, columns, rows, tables, summary and notes. ``again`` is
the commit at which a benchmark that is gone can be run; ``text`` is what somebody added. An entry without a name is
prose, with date, title and text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LOG = Path(__file__).with_name("log.jsonl")
PAGE = Path(__file__).with_name("LOG.md")
HEAD = """# Log of measurements

Made of [log.jsonl](log.jsonl) by `python -m tests.benchmarks --page`: do not edit it. Of each benchmark here are the
newest run of each size with its table, and one line for each older one. The data have the tables, notes and machines of
all runs, bad ones too, and the text of what is a title here. A study that is over says at which commit it can be run.
"""
LONGEST_VALUE = 60

Entry = Mapping[str, Any]


def read(log: Path = LOG) -> list[Entry]:
    """Return all entries, oldest first."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def append(entry: Entry, log: Path = LOG, page: Path = PAGE) -> None:
    """Add a run to the data and renew the page."""
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
    renew(log, page)


def renew(log: Path = LOG, page: Path = PAGE) -> None:
    """Write the page anew."""
    page.write_text(page_of(read(log)), encoding="utf-8")


def page_of(entries: Sequence[Entry]) -> str:
    """Return the page, in Markdown."""
    runs: dict[str, list[Entry]] = {}
    for entry in entries:
        if "name" in entry:
            runs.setdefault(entry["name"], []).append(entry)
    over = sorted(name for name, found in runs.items() if "again" in found[-1])
    lines = [HEAD]
    for name in [*sorted(runs.keys() - {*over}), *over]:
        lines += _benchmark(name, runs[name])
    lines += ["## Remarks", ""]
    for entry in entries:
        if "title" in entry:
            again = f" (can be run again at {entry['again']})" if "again" in entry else ""
            lines.append(f"- {entry['date']}: {entry['title']}{again}")
    return "\n".join(lines) + "\n"


def _benchmark(name: str, found: Sequence[Entry]) -> Iterator[str]:
    again = found[-1].get("again")
    yield from (f"## {name}", "")
    if again:
        yield from (f"This study is over; it can be run again at {again}.", "")
    newest = {entry["size"]: entry for entry in found}
    for entry in newest.values():
        yield from _whole(entry)
    older = [entry for entry in found if entry not in newest.values()]
    if older:
        yield from ("Older:", "")
        yield from (f"- {e['date']} ({e['size']}, {e['commit']}): {_summary(e)}" for e in reversed(older))
        yield ""


def _whole(entry: Entry) -> Iterator[str]:
    seconds = "" if entry["seconds"] is None else f", {entry['seconds']:.0f} s"
    yield f"**{entry['date']}**, `{entry['command']}` at {entry['commit']}{seconds}, on {entry['machine']}"
    for table in ({"title": "", **entry}, *entry["tables"]):
        yield from ("", f"{table['title']}:", "") if table["title"] else ("",)
        yield from markdown(table["columns"], table["rows"])
    yield from ("", f"Summary: {_summary(entry)}", "")
    yield from (f"- {note}" for note in entry["notes"])
    yield from ["", entry["text"], ""] if "text" in entry else [""]


def _summary(entry: Entry) -> str:
    """Return its figures; what is long, mostly a dict, is in the data only."""
    said = [f"{key} {shown(value)}" for key, value in entry["summary"].items()]
    return ", ".join(one for one in said if len(one) <= LONGEST_VALUE)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(map(shown, row)) + " |" for row in rows)]


def shown(value: Any) -> str:
    """Return a figure as tables show it."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

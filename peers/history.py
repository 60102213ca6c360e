"""``swarm history``: a history read once, its rows collected and, if asked for, each record checked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.history_rows import Row, row_lines, row_of
from peers.history_source import HistorySource
from peers.history_verify import ChainCheck
from peers.words import another_path, count
from swarm.errors import ConfigError, StateError
from swarm.optimization.history_file import HistoryReader, earlier
from swarm.optimization.roster import Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a history says. ``rows`` are its last ones, ``records`` how many it has and ``steps`` its first and last.

    ``torn``: an unfinished line lies behind them. ``broken`` says what ends the reading early, path and line in it;
    empty for a history that is in order. ``check`` is None unless it was verified.
    """

    source: HistorySource
    run: str
    rows: tuple[Row, ...]
    records: int
    steps: tuple[int, int]
    torn: bool
    broken: str
    check: ChainCheck | None
    earlier: tuple[Path, ...]


def read(source: HistorySource, *, last: int | None, verify: bool) -> Told:
    """Read a history; of its rows the ``last`` are kept (None: all). Costs a parse and a hash of every record, and with
    ``verify`` 0.1 ms for each signature. Raises ConfigError for a file that cannot be opened or has no record; what is
    wrong with a record is in the answer."""
    reader, rows = HistoryReader(source.path), deque[Row](maxlen=last)
    check = _checker() if verify else None
    before: Roster | None = None
    run, broken, number, first, newest = "", "", 0, 0, 0
    try:
        for line in reader:
            if check is not None:
                check.take(line)
            rows.append(row_of(line, before))
            first, newest = (first if number else line.record.step), line.record.step
            run, before, number = line.record.run, line.record.members, number + 1
    except StateError as error:
        placed = str(error).startswith(str(source.path))
        broken = str(error) if placed else f"{source.path}, line {number + 1} (step {line.record.step}): {error}"
        if placed and not number:
            raise _unusable(source.path, "its first line is no close record") from error
    except OSError as error:
        raise _unusable(source.path, error.strerror or str(error)) from error
    if not number and not broken:
        raise _unusable(source.path, "it has no record yet")
    return Told(
        source=source, run=run, rows=tuple(rows), records=number, steps=(first, newest), torn=reader.torn,
        broken=broken, check=check, earlier=tuple(earlier(source.path)),
    )  # fmt: skip


def lines(told: Told) -> list[str]:
    """All that there is to say but what is broken, for people."""
    if not told.records:
        return []
    found = [_title(told), *row_lines(told.rows)]
    if told.torn:
        found.append("an unfinished line behind it is left out: it is being written, or its peer ended meanwhile")
    if told.earlier:
        found.append(f"before it: {', '.join(path.name for path in told.earlier)} beside it (--file)")
    if told.check is not None and not told.broken:
        found.append(_verified(told.check))
    return found


def document(told: Told) -> dict[str, Any]:
    """The same as plain data for ``--json``."""
    verified = None
    if told.check is not None:
        verified = {"ok": not told.broken, "records": told.check.records, "microbatches": told.check.microbatches,
                    "trusted": told.check.trusted}  # fmt: skip
    return {
        "path": str(told.source.path.absolute()),
        "run": told.run,
        "records": told.records,
        "rows": [row.document() for row in told.rows],
        "torn": told.torn,
        "earlier": [str(path.absolute()) for path in told.earlier],
        "verified": verified,
        "broken": told.broken,
    }


def _checker() -> ChainCheck:
    from swarm.security.signing import verify  # cryptography, which who only reads does without

    return ChainCheck(verify)


def _title(told: Told) -> str:
    first, newest = told.steps
    name = f"{told.source.run_name} " if told.source.run_name else ""
    keeper = f", as {told.source.keeper} keeps it" if told.source.keeper else ""
    shown = f", the last {len(told.rows)} shown" if len(told.rows) < told.records else ""
    return f"run {name}({told.run[:12]}), steps {first} to {newest}{keeper}{shown}: {told.source.path}"


def _verified(check: ChainCheck) -> str:
    trust = "" if check.trusted is None else (
        f"; the first, of step {check.trusted}, is taken on trust: the record before it is not here"
    )  # fmt: skip
    trust += "" if check.provisional is None else f"; provisional since step {check.provisional}: no majority yet"
    return (f"verified: {count(check.records, 'record')}, each follows the one before it and is signed by those who "
            f"decide; {check.microbatches} microbatches, none twice{trust}")  # fmt: skip


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError("history", str(path), "a history with a record in it", another_path(path), why=why)

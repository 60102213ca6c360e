"""``swarm plan --table``: models on several kinds of machines and links, a row for each. Pure, but it reads a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from peers.console.words import another_path
from peers.plan.peers_file import HOUR, MBIT, PeersEntry, Positive, class_of, explained
from swarm.config import Manifest
from swarm.disk import read_named
from swarm.errors import ConfigError
from swarm.parsing import parse_toml
from swarm.planning.alternatives import alone
from swarm.planning.search import search
from swarm.planning.workload import PeerClass
from swarm.schema import Section

SCHEMA = 1
NONE = "–"
COLUMNS = ("model", "machines", "link", "stages", "tokens/s foretold", "measured", "one alone", "hours", "cost")
MAX_ROWS = 200

Text = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._,/-]{0,60}$")]


class ModelEntry(Section):
    """A model: a preset's name or a RUN.toml, with values of a manifest that replace some of its own; and on how many
    tokens it is to be trained."""

    name: Text
    run: str
    manifest: dict[str, Any] = {}
    tokens: Positive


class MachinesEntry(PeersEntry):
    """A kind of machines, as in a file of peers, in the numbers of ``counts``, on these ``links``; what an hour of one
    costs."""

    counts: Annotated[tuple[Annotated[int, Field(ge=2, le=10_000)], ...], Field(min_length=1, max_length=16)]
    links: Annotated[tuple[Text, ...], Field(min_length=1, max_length=16)]
    models: tuple[Text, ...] = ()
    price_hour: Positive | None = None


class LinkEntry(Section):
    """A kind of link of every machine, and the profile that suits a run to it."""

    name: Text
    down_mbit: Positive
    up_mbit: Positive
    round_trip_ms: Annotated[float, Field(ge=0, le=60_000)]
    profile: Literal["lan", "wan", "thin"]


class MeasuredEntry(Section):
    """Tokens a second that a run had: of that row."""

    model: Text
    machines: Text
    count: int
    link: Text
    tokens_s: Positive


class TableFile(Section):
    """The whole file. ``currency`` is what prices are in."""

    currency: Annotated[str, StringConstraints(max_length=8)] = ""
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1, max_length=32)]
    machines: Annotated[tuple[MachinesEntry, ...], Field(min_length=1, max_length=32)]
    links: Annotated[tuple[LinkEntry, ...], Field(min_length=1, max_length=16)]
    measured: tuple[MeasuredEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row; without a figure where no layout fits, nothing was measured, no machine holds the model, or no price is
    given. ``hours`` and ``cost`` are of all tokens, at the pace that is foretold with all machines there; machines for
    which the plan has no place cost nothing."""

    model: str
    machines: str
    count: int
    link: str
    stages: tuple[int, ...] | None = None
    """Replicas of each, and of each of their variants."""
    tokens_s: float | None = None
    measured_tokens_s: float | None = None
    alone_tokens_s: float | None = None
    hours: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """A table for people, in Markdown, and for scripts."""

    rows: Sequence[TableRow]
    currency: str

    def lines(self) -> Iterator[str]:
        """Yield the table in Markdown, which is aligned for terminals, too."""
        cells = [COLUMNS, *(self._cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
        for at, row in enumerate(cells):
            yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
            if at == 0:
                yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"

    def document(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {"schema": SCHEMA, "currency": self.currency, "rows": [asdict(row) for row in self.rows]}

    def _cells(self, row: TableRow) -> tuple[str, ...]:
        stages = NONE if row.stages is None else f"{len(row.stages)} × {_span(row.stages)}"
        cost = NONE if row.cost is None else f"{self.currency}{_figure(row.cost)}"
        figures = (row.tokens_s, row.measured_tokens_s, row.alone_tokens_s, row.hours)
        return row.model, f"{row.count} × {row.machines}", row.link, stages, *map(_figure, figures), cost


def read_table(path: Path, measured: Sequence[Mapping[str, Any]] = ()) -> TableFile:
    """Return what a file asks for, with what was ``measured`` beside what it says itself. Raises ConfigError naming
    --table, or the key of the file."""
    try:
        document = parse_toml(read_named(path))
    except OSError as error:
        why = (error.strerror or "unreadable").lower()
        raise ConfigError("--table", str(path), "a readable TOML file", another_path(path), why=why) from None
    except ValueError as error:
        raise ConfigError("--table", str(path), "valid TOML", f"Fix that line in {path}.", why=str(error)) from None
    for key in TableFile.model_fields.keys() & document.keys() - {"currency"}:
        document[key] = _tuples(document[key])
    document["measured"] = (*document.get("measured", ()), *measured)
    try:
        table = TableFile.model_validate(document)
    except ValidationError as error:
        raise explained(error, TableFile, path) from None
    _check(table, path)
    return table


def _check(table: TableFile, path: Path) -> None:
    """Raises ConfigError for names that are not there, and for a table without end."""
    models, links = ([one.name for one in entries] for entries in (table.models, table.links))
    for entry in table.machines:
        for key, named, known in (("links", entry.links, links), ("models", entry.models, models)):
            if strange := [name for name in named if name not in known]:
                raise ConfigError(f"machines.{key}", strange[0], f"one of {', '.join(known)}", f"Correct it in {path}.")
    if (rows := sum(1 for _ in _asked(table))) > MAX_ROWS:
        raise ConfigError("--table", str(path), f"at most {MAX_ROWS} rows", "Leave some out.", why=f"it has {rows}")


def plan_table(table: TableFile, manifest_of: Callable[[ModelEntry, str], Manifest], path: Path) -> PlanTable:
    """Return the rows that a file asks for; ``manifest_of`` a model and a profile is its manifest. Cost: a plan for
    each row, which is a tenth of a second to some seconds."""
    rows = []
    for model, machines, link, count in _asked(table):
        manifest = manifest_of(model, link.profile)
        measured = (
            one.tokens_s
            for one in table.measured
            if (one.model, one.machines, one.count, one.link) == (model.name, machines.name, count, link.name)
        )
        row = TableRow(model=model.name, machines=machines.name, count=count, link=link.name,
                       measured_tokens_s=next(measured, None))  # fmt: skip
        each = _class(machines, link, count, manifest, path)
        rows.append(_planned(row, manifest, each, model.tokens, machines.price_hour))
    return PlanTable(rows=rows, currency=table.currency)


def _asked(table: TableFile) -> Iterator[tuple[ModelEntry, MachinesEntry, LinkEntry, int]]:
    for model in table.models:
        for machines in table.machines:
            for link in table.links:
                if link.name in machines.links and (not machines.models or model.name in machines.models):
                    for count in machines.counts:
                        yield model, machines, link, count


def _class(machines: MachinesEntry, link: LinkEntry, count: int, manifest: Manifest, path: Path) -> PeerClass:
    one = class_of(machines, manifest.model.compute, path)
    return replace(one, count=count, down=link.down_mbit * MBIT, up=link.up_mbit * MBIT,
                   round_trip_s=link.round_trip_ms / 1e3)  # fmt: skip


def _planned(row: TableRow, manifest: Manifest, each: PeerClass, tokens: float, price: float | None) -> TableRow:
    from peers.plan.work import workload_of  # torch: after the file is known to be right

    work = workload_of(manifest)
    plans = search(work, (each,))
    if not plans:
        return row
    best = plans[0]
    by_itself = alone(work, each, best)
    hours = tokens / best.tokens_s / HOUR
    return replace(
        row,
        stages=tuple(sum(here) for here in best.layout.places[:-1]),
        tokens_s=best.tokens_s,
        alone_tokens_s=best.tokens / by_itself.step_s if by_itself.way != "none" else None,
        hours=hours,
        cost=None if price is None else hours * price * sum(map(sum, best.layout.places)),
    )


def _tuples(value: Any) -> Any:
    """Return a document's lists as validation takes them, but for those of a manifest."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {key: one if key == "manifest" else _tuples(one) for key, one in value.items()}
    return value


def _span(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


def _figure(value: float | None) -> str:
    if value is None:
        return NONE
    digits = max(0, 1 - math.floor(math.log10(value))) if 0 < value < 10 else 0
    rounded = round(value, -(math.floor(math.log10(value)) - 2)) if value >= 1000 else value
    return f"{rounded:,.{digits}f}"

"""The page ``docs/plans.md``, made of ``docs/plans.toml`` by ``swarm plan --table`` and of the log of measurements:

``python -m tests.harness.plan_page``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers.commands.plan import make_table
from tests.benchmarks._log import Entry, read
from tests.harness.sources import ROOT

TABLE, PAGE = ROOT / "docs" / "plans.toml", ROOT / "docs" / "plans.md"
MEASURED = {
    "small-model": (
        "tokens_per_s",
        {"model": "4M", "machines": "peers on one H100", "count": 3, "link": "one machine"},
    ),
}
"""By benchmark: the figure in the summary of its newest run on a GPU, and the row that it belongs to."""
HEAD = """# What it takes to train a model

Made of [plans.toml](plans.toml) by `python -m tests.harness.plan_page`: do not edit it. `swarm plan --table FILE` makes
such a table of your models, machines, links and prices.

The pace is predicted with all machines there, by [a model](engineer/costs.md) that knows nothing of what a step costs
besides computing and sending: of small models it promises too much. *Measured* is from the
[log](engineer/benchmarks.md#the-log); – where nothing was. *Stages* is their number, and replicas of each. *One alone*
is one such machine with the whole model, without a swarm; – where its memory does not hold it. Hours and cost are of
all tokens: 20 a parameter, of 4M those of the run that was measured, which had two stages. Prices are assumed.
"""


def measured(log: Sequence[Entry]) -> list[Mapping[str, Any]]:
    """Return what was measured of rows, by the newest run of each benchmark that has the figure."""
    found: dict[str, Mapping[str, Any]] = {}
    for entry in log:
        figure, row = MEASURED.get(entry.get("name", ""), ("", {}))
        if (value := entry.get("summary", {}).get(figure)) and "H100" in entry["machine"]:
            found[entry["name"]] = {**row, "tokens_s": float(value)}
    return list(found.values())


def page() -> str:
    """Return the page as it has to be."""
    table = make_table(TABLE, measured(read()))
    return "\n".join((HEAD, *table.lines(), ""))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

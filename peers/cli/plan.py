"""``swarm plan``: who should do what, before anybody begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.options import AsJson
from swarm.errors import ConfigError


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A RUN.toml or a preset (as of swarm new); with --swarm by default the run's own.",
        ),
    ] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", metavar="FILE", help="Plan for the peers in this TOML file: see below.")
    ] = None,
    swarm: Annotated[
        str | None,
        typer.Option("--swarm", metavar="INVITE", help="Plan for the peers of this run, as measured; -: from stdin."),
    ] = None,
    memory_gib: Annotated[
        str | None,
        typer.Option("--memory-gib", metavar="N", help="With --swarm: the memory of each member.  [default: 16]"),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            "--table", metavar="FILE", help="Plan the models, machines and links of this file, a row for each."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show each formula with its numbers, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run: who does what, how long a step takes, and what limits it.

    Searches the stages, their sizes, who is where, the rows of a microbatch, and whether activations are computed
    again. No plan takes more memory than its peers have. Starts nothing.

    FILE has a table for each kind of peers:

    \b
    # kinds = [60, 40]      where stages have variants: how much text of each kind
    [[peers]]
    name = "home"
    count = 8
    device = "rtx4090"    # or flops = 6e13 and memory_gib = 24
    host_memory_gib = 64  # of the machine, where the device has its own
    down_mbit = 200
    up_mbit = 100
    round_trip_ms = 40
    stay_hours = 4        # how long one stays, if it does not stay to the end

    Example: swarm plan medium --peers peers.toml --explain

    With --table FILE (docs/plans.toml is one) it prints a table in Markdown: tokens a second, hours and cost of each
    model on each kind and number of machines and links, beside what was measured.

    Example: swarm plan --swarm swarm1:eyJydW4…
    """  # fmt: skip
    from peers.commands.plan import make_plan, make_table

    if table is not None:
        if any(one is not None for one in (model, peers, swarm, memory_gib)) or explain:
            raise ConfigError("--table", table, "no other option but --json", "Leave the others out: the file says it.")
        made = make_table(Path(table))
        print(json.dumps(made.document()) if as_json else "\n".join(made.lines()), flush=True)
        return
    report = make_plan(model, peers, swarm, memory_gib, (lambda line: None) if as_json else _progress)
    if as_json:
        print(json.dumps(report.document()), flush=True)
        return
    print("\n".join([*report.lines(), *(report.explained() if explain else ())]), flush=True)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

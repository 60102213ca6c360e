"""``swarm simulate``: how a swarm would fare, before there is one."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from peers.cli.options import AsJson


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", show_default=False, help="What is played, as TOML: see below.")
    ] = None,
    fidelity: Annotated[
        str | None,
        typer.Option("--fidelity", metavar="NAME", help="flow, journeys or full, in place of the file's."),
    ] = None,
    seed: Annotated[str | None, typer.Option("--seed", metavar="N", help="Use this seed, not the file's.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Write report.json and pictures (SVG) there, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a swarm of many peers, with machines that come and go. Starts nothing.

    The same file and seed give the same report, and the same hash of it.

    SCENARIO has:

    \b
    model = "small"       # a preset or a RUN.toml, as of swarm plan
    hours = 8             # or steps = 100
    fidelity = "flow"     # shares are calculated; journeys, full: slower, exacter
    rebalance = "ours"    # who moves: none, swarm, ours
    # kinds = [60, 40]      where stages have variants: how much text of each kind
    [[peers]]             # as of swarm plan --peers, and:
    name = "home"
    count = 40
    train = 4             # of them as trainers, who stay
    flops = 5e12
    memory_gib = 16
    stay_hours = 4        # machines are taken as on the spot market
    [churn]               # or: shape = "none"
    file = "trace.csv"    # lines: at second, how many, back after seconds

    Example: swarm simulate scenario.toml --out pictures
    """  # fmt: skip
    from peers.commands.simulate import AskedSimulation, write_report
    from peers.commands.simulate import simulate as simulated

    report = simulated(AskedSimulation(scenario, fidelity, seed))
    written = write_report(report, out) if out is not None else []
    if as_json:
        print(json.dumps(report.document()), flush=True)
        return
    print("\n".join([*report.lines(), *(f"wrote {path}" for path in written)]), flush=True)

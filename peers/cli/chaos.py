"""``swarm chaos``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.options import AsJson


class WorldChoice(StrEnum):
    """The kind of peers in a play."""

    containers = "containers"
    processes = "processes"


def chaos(
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO.toml", show_default=False, help="The scenario to play.")
    ] = None,
    on: Annotated[
        WorldChoice | None,
        typer.Option(
            "--on",
            help="Run peers as these.  [default: containers if a Docker engine answers; with links: processes]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write everything to this new directory.  [default: out/chaos-<name>-<time>]"),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON report here.")] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Image of the containers.  [default: the one made here]")
    ] = None,
    upgrade: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Image after an upgrade.  [default: the same]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Seed of the draws, instead of the scenario's.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep homes and logs also when nothing broke.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the scenarios in docker/scenarios.")] = False,
    as_json: AsJson = False,
) -> None:
    """Inject faults into a swarm, and check that every invariant holds.

    Founds a run, starts its peers on this machine, strikes as the scenario says, and checks the files that the peers
    wrote: no microbatch lost or counted twice, replicas alike, one history. Leaves a report and a picture.

    Exit code 0: all invariants held; 1: an invariant or an expectation broke, or a fault did not happen; 2: the
    scenario cannot be used; 130: Ctrl-C.

    Example: swarm chaos docker/scenarios/kill-storm.toml
    """
    from swarm.errors import ConfigError

    if listed:
        _list()
        return
    if scenario is None:
        raise ConfigError("SCENARIO.toml", None, "a file", "swarm chaos --list shows those here.")
    from peers.chaos.run_scenario import Options
    from peers.chaos.run_scenario import chaos as run_chaos
    from peers.chaos.worlds import Images
    from swarm.clock import SystemClock

    options = Options(
        scenario=scenario,
        on=None if on is None else on.value,
        out=out,
        report=report,
        images=Images(image or Images().image, upgrade),
        seed=seed,
        keep=keep,
        json=as_json,
    )
    raise typer.Exit(run_chaos(options, SystemClock()))


def _list() -> None:
    from peers.chaos.run_scenario import scenarios

    found = scenarios()
    width = max((len(path) for path, _, _ in found), default=0)
    for path, long, proves in found:
        typer.echo(f"{path:<{width}}  {long:>8}  {proves}")
    if found:
        typer.echo("Minutes count from the first closed step; a start takes one or two more.")
    if not found:
        typer.echo("none here: docker/scenarios is part of the project's directory")

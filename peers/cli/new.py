"""``swarm new``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peers.cli.options import Home
from peers.cli.peer_options import (
    Announce,
    AsEvents,
    Config,
    Grace,
    InviteFile,
    Listen,
    Place,
    Port,
    Preemption,
    PreemptionUrl,
    Quiet,
    Relay,
)


def new(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml", help="The run's manifest; with --resume its directory, or a checkpoint's in it."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run whose peers are all gone, from its newest checkpoint.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instead of a file: tiny, small or medium.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What people call the run.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Optimizer steps; then the run is over.")] = None,
    stages: Annotated[int | None, typer.Option(metavar="N", help="Pieces the blocks are cut into.")] = None,
    hosts: Annotated[int | None, typer.Option(metavar="N", help="Start when so many stage hosts are here.")] = None,
    trainers: Annotated[int | None, typer.Option(metavar="N", help="… and so many trainers.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the initial weights.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json.  [default: beside RUN.toml, or a new one]")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to make a tokenizer from; repeat for more.  [default: Python's own]"),
    ] = None,
    place: Place = None,
    home: Home = None,
    listen: Listen = None,
    port: Port = None,
    announce: Announce = None,
    relay: Relay = None,
    grace: Grace = None,
    preemption: Preemption = None,
    preemption_url: PreemptionUrl = None,
    invite_file: InviteFile = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: AsEvents = False,
) -> None:
    """Start a run that others join, and serve it in the foreground until it is over.

    Prints the invite and what to type elsewhere, waits for the peers that the run needs, and starts it. Listens on all
    interfaces: whoever can reach this machine and has the invite can join.

    With --resume it is the run kept in a directory, or whose id begins like what is given, or the newest here. It
    goes on from its newest whole checkpoint, or from the one whose directory is given (DIR/checkpoints/step-…).

    For supervisors that start it again after a crash: with --invite-file it founds one run only. When the file holds an
    invite, it goes back to that run: as a stage host, the same peer as before, if the run has begun.

    Example: swarm new --preset tiny --steps 100
    """
    from peers.join_settings import listen_on, load_join_settings
    from peers.presets import refuse_as_file

    if not resume:
        refuse_as_file(run)
    settings = load_join_settings(
        {
            "home": home,
            "place": place,
            "listen": listen_on(listen, port),
            "announce": tuple(announce) if announce else None,
            "relay": None if relay is None else relay.value,
            "grace": grace,
            "preemption": preemption,
            "preemption_url": preemption_url,
            "invite_file": invite_file,
        },
        config,
    )
    changes = {
        "run.name": name,
        "run.steps": steps,
        "run.seed": seed,
        "split.stages": stages,
        "run.start_when.stage_hosts": hosts,
        "run.start_when.trainers": trainers,
    }
    from peers.commands.new import new as run_new
    from peers.founding_files import Foundation

    foundation = Foundation(
        preset=preset, file=run, changes=changes, tokenizer=tokenizer, texts=tuple(text or ()), resume=resume
    )
    raise typer.Exit(run_new(foundation, settings, words=not quiet and not as_json, json_lines=as_json))

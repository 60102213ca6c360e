"""``swarm join``."""

from __future__ import annotations

from enum import StrEnum
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
    PeerName,
    Place,
    Port,
    Preemption,
    PreemptionUrl,
    Quiet,
    Relay,
)


class Role(StrEnum):
    """What a peer does in a run."""

    auto = "auto"
    stage = "stage"
    trainer = "trainer"


def join(
    invite: Annotated[
        list[str] | None,
        typer.Argument(metavar="INVITE", help="What swarm new or swarm invite printed, or multiaddrs of peers."),
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(help="stage: hold a slice of the model; trainer: feed text; auto: trainer if there is --data."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A trainer's text (a file, a directory) or a shard; it stays here."),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(metavar="N", help="Stage to hold.  [default: where it is needed most]")
    ] = None,
    name: PeerName = None,
    place: Place = None,
    home: Home = None,
    listen: Listen = None,
    port: Port = None,
    announce: Announce = None,
    relay: Relay = None,
    region: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where this peer is: a run whose strategy is hierarchy averages within regions first.",
        ),
    ] = None,
    dial_out_only: Annotated[
        bool | None,
        typer.Option(
            "--dial-out-only",
            help="Others shall not call this peer for averaging, where the run's strategy is server.  "
            "[default: found out]",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: cpu]")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads.  [default: 1]")] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the run here: manifest, tokenizer, checkpoints of its part.  [default: runs/ in the home]",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps between checkpoints.  [default: a tenth of the run]")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(metavar="N", help="Most microbatches a trainer has on their way.")
    ] = None,
    grace: Grace = None,
    preemption: Preemption = None,
    preemption_url: PreemptionUrl = None,
    invite_file: InviteFile = None,
    config: Config = None,
    quiet: Quiet = False,
    as_json: AsEvents = False,
) -> None:
    """Join a run, in the foreground, until it is over.

    Needs an invite, or --invite-file. A trainer without --data trains with text that comes with Python. Ctrl-C leaves
    in order, Ctrl-C again at once.

    Options but --port, --config, --quiet and --json can also come from the environment (SWARM_DATA, SWARM_LISTEN, …) or
    from a file (--config, keys like the options'): an option wins over the environment, which wins over the file.

    Example: swarm join swarm1:eyJydW4… --role trainer --data texts/
    """
    from peers.commands.join import join as run_join
    from peers.join_settings import listen_on, load_join_settings

    settings = load_join_settings(
        {
            "home": home,
            "place": place,
            "name": name,
            "role": None if role is None else role.value,
            "stage": stage,
            "data": data,
            "listen": listen_on(listen, port),
            "announce": tuple(announce) if announce else None,
            "relay": None if relay is None else relay.value,
            "region": region,
            "dial_out_only": dial_out_only,
            "device": device,
            "threads": threads,
            "checkpoints": checkpoints,
            "checkpoint_every": checkpoint_every,
            "max_in_flight": max_in_flight,
            "grace": grace,
            "preemption": preemption,
            "preemption_url": preemption_url,
            "invite_file": invite_file,
        },
        config,
    )
    words = not quiet and not as_json
    raise typer.Exit(run_join(invite or (), settings, words=words, json_lines=as_json))

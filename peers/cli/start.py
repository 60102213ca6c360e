"""``swarm join``, ``swarm new`` and ``swarm relay``: their options are made from :mod:`peers.options`."""

from __future__ import annotations

from typing import Any

import typer

from peers.cli.options import offer
from peers.options.foundation import Foundation, Invocation
from peers.options.model import PeerOptions
from peers.options.relay import RelayOptions


@offer("join", PeerOptions, Invocation)
def join(**typed: Any) -> None:
    """Join a run, in the foreground, until it is over.

    Needs an invite, or --invite-file. A trainer without --data trains with text that comes with Python. Ctrl-C leaves
    in order. A second Ctrl-C leaves at once.

    With --pause-when it leaves in order while a condition holds, and comes back by itself. With --retry it comes back
    after a crash, and when nobody could be reached. It waits longer each time, ten minutes at most.

    All options but --port, --config, --quiet and --json also come from the environment (SWARM_DATA, SWARM_LISTEN, …) or
    from the --config file, whose keys are named like the options. An option comes before the environment, and that
    before the file.

    Example: swarm join swarm1:eyJydW4… --role trainer --data texts/
    """
    from peers.commands.start import run, to_join

    raise typer.Exit(run(to_join(typed)))


@offer("relay", RelayOptions)
def relay(**typed: Any) -> None:
    """Relay for peers behind routers, on a machine that everybody can reach.

    Belongs to no run and holds nothing of one. Prints the address with which a peer behind NAT founds a run (swarm new
    --through) or joins one; after a restart at the same home it is the same. Ctrl-C and SIGTERM end it in order.

    Example: swarm relay --announce relay.example.org
    """
    from peers.commands.relay import relay as run_relay
    from peers.options.reading import read_relay_options

    raise typer.Exit(run_relay(read_relay_options(typed)))


@offer("new", Foundation, PeerOptions, Invocation)
def new(**typed: Any) -> None:
    """Start a run that others join, and serve it in the foreground until it is over.

    Prints the invite and the commands for other terminals. Waits for the peers that the run needs, and starts it.
    Listens on all interfaces: anybody who can reach this machine and has the invite can join.

    With --resume it continues a run from its newest complete checkpoint. It takes the run in the given directory, or
    whose id begins so, or the newest here. DIR/checkpoints/step-… names one checkpoint. It refuses if a peer of the run
    answers. It does not ask where a checkpoint is named. With --stages that checkpoint is cut into so many stages,
    exactly. It then goes on as a run of its own.

    With --invite-file it suits supervisors that restart it after a crash. If the file holds an invite, the same peer
    returns to that run, and keeps copies of its parts as before. swarm new FILES/run.toml does the same without it:
    FILES is the directory in the founder's line `files`, which swarm status shows. It ends with exit code 3 if nobody
    of the run answers. Another --name founds another run. --retry comes back to its run by itself after a crash, and
    when nobody could be reached.

    With --print-config it founds nothing. It prints a RUN.toml with every key, to change and to found a run with.

    Example: swarm new --preset tiny --steps 100
    """
    from peers.commands.start import run, to_found

    order = to_found(typed)
    if order.foundation is not None and order.foundation.print_config and not order.foundation.resume:
        from peers.commands.new import print_config

        print_config(order.foundation, as_json=order.json_lines)
        return
    raise typer.Exit(run(order))

"""``swarm join`` and ``swarm new``: their options are those of :mod:`peers.options.model`."""

from __future__ import annotations

from typing import Any

import typer

from peers.cli.options import offer
from peers.options.model import Foundation, Invocation, PeerOptions


@offer("join", PeerOptions, Invocation)
def join(**typed: Any) -> None:
    """Join a run, in the foreground, until it is over.

    Needs an invite, or --invite-file. A trainer without --data trains with text that comes with Python. Ctrl-C leaves
    in order, Ctrl-C again at once.

    Options but --port, --config, --quiet and --json can also come from the environment (SWARM_DATA, SWARM_LISTEN, …) or
    from a file (--config, keys like the options'): an option wins over the environment, which wins over the file.

    Example: swarm join swarm1:eyJydW4… --role trainer --data texts/
    """
    from peers.commands.join import join as run_join
    from peers.options.reading import blaming, read_invocation, read_peer_options

    invocation = read_invocation("join", typed)
    options = read_peer_options("join", typed, invocation)
    with blaming(options):
        raise typer.Exit(run_join(options, words=invocation.words, json_lines=invocation.json))


@offer("new", Foundation, PeerOptions, Invocation)
def new(**typed: Any) -> None:
    """Start a run that others join, and serve it in the foreground until it is over.

    Prints the invite and what to type elsewhere, waits for the peers that the run needs, and starts it. Listens on all
    interfaces: whoever can reach this machine and has the invite can join.

    With --resume it is the run kept in a directory, or whose id begins like what is given, or the newest here. It
    goes on from its newest whole checkpoint, or from the one whose directory is given (DIR/checkpoints/step-…).

    For supervisors that start it again after a crash: with --invite-file it founds one run only. When the file holds an
    invite, it goes back to that run: as a stage host, the same peer as before, if the run has begun.

    Example: swarm new --preset tiny --steps 100
    """
    from peers.options.reading import blaming, read_foundation, read_invocation, read_peer_options
    from peers.presets import refuse_as_file

    foundation = read_foundation(typed)
    if not foundation.resume:
        refuse_as_file(foundation.file)
    invocation = read_invocation("new", typed)
    options = read_peer_options("new", typed, invocation)
    from peers.commands.new import new as run_new

    with blaming(options):
        raise typer.Exit(run_new(foundation, options, words=invocation.words, json_lines=invocation.json))

"""``swarm history``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from peers.cli.options import AsJson, Home

SCHEMA = 1


def history(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="PEER",
            show_default=False,
            help="Name, place or beginning of the id of a peer.  [default: a peer of the only run here]",
        ),
    ] = None,
    peer: Annotated[str | None, typer.Option("--peer", "--place", metavar="PEER", help="The same as PEER.")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="FILE", help="Read this history.jsonl, or the one in this directory."),
    ] = None,
    last: Annotated[int | None, typer.Option("--last", metavar="N", min=1, help="Show only the newest N.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check hashes, signatures, counts and cursors.")] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help="Show who was proven wrong, and the evidence, verified anew.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the decision about each step of a run.

    Prints a line for each close record that a peer keeps, of a run in progress or a finished one: term, loss, tokens,
    leader, and the peers that came and went.

    --verify checks that every record follows the one before and is signed by a majority of the voters, that cursors
    never go back, that no microbatch is committed twice, and that whom it bars it proves wrong. It exits with 1, naming
    the first record that fails.

    Example: swarm history --last 20 --verify
    """
    from peers.commands.history import document, lines, read
    from peers.commands.history_source import find_history
    from peers.console.words import command_name, print_error
    from swarm.errors import ConfigError

    if place is not None and peer is not None:
        raise ConfigError("--peer", peer, f"only one of --peer and {place!r}", "Leave one of them out.")
    told = read(find_history(place or peer, file, home), last=last, verify=verify)
    if as_json:
        print(json.dumps({"schema": SCHEMA, **document(told)}))
    elif told.records:
        print("\n".join(lines(told, faults=faults)))
    sys.stdout.flush()
    if told.broken:
        print_error(told.broken, check="what other peers of the run keep: the longest history that holds is the run's",
                    next_=f"{command_name()} history --verify there, or here with --file and a copy of it")  # fmt: skip
        raise typer.Exit(1)

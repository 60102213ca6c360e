"""``swarm drain``."""

from __future__ import annotations

from typing import Annotated

import typer

from peers.cli.options import Home, Peer


def drain(
    peer: Peer = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has left, or only tell it to.")] = True,
    home: Home = None,
) -> None:
    """Have a peer leave its run in order.

    No new work, hand over, leave at the end of a step. Exit code 0 when it
    has left. Ctrl-C ends the waiting; the peer goes on leaving.

    Example: swarm drain --peer brave-otter
    """
    from peers.choose import choose_live
    from peers.control_client import ask
    from peers.farewell import follow
    from peers.interrupt import Interrupted
    from peers.places import home_directory
    from peers.words import command_name

    place = choose_live(home_directory(home), peer, command="drain")
    print(f"{place.title}: {ask(place.control, 'drain', who=place.described)}", flush=True)
    if not wait:
        return
    try:
        code = follow(place, lambda line: print(line, flush=True))
    except Interrupted:
        print(f"{place.title}: goes on leaving; how far it is: {command_name()} status --peer {place.name}", flush=True)
        raise
    raise typer.Exit(code)

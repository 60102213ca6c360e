"""``swarm drain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.options import Home, Peer
from peers.exit_codes import EXIT_OK, EXIT_USAGE

if TYPE_CHECKING:
    from peers.complaint import Complaint


def drain(
    peer: Peer = None,
    everyone: Annotated[bool, typer.Option("--all", help="All peers of this machine.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has left, or only tell it to.")] = True,
    home: Home = None,
) -> None:
    """Have a peer leave its run in order.

    No new work, hand over, leave at the end of a step. Who cannot be spared
    waits for another. When all peers of the run have been asked, on whatever
    machines, and nobody comes, the run ends in order: nothing is lost, and
    `swarm new --resume` goes on with it. Exit code 0 when it has left; with
    --all the worst of all, and who does not answer keeps nobody from being
    told. Ctrl-C ends the waiting; the peer goes on leaving.

    Example: swarm drain --peer brave-otter

    Example: swarm drain --all
    """
    from peers.choose import choose_all_live, choose_live
    from peers.complaint import Complaint
    from peers.control_client import ask
    from peers.farewell import follow
    from peers.interrupt import Interrupted
    from peers.places import home_directory
    from peers.words import command_name

    if everyone and peer is not None:
        raise Complaint("--all is every peer, --peer is one", next_="Leave one of them out.", exit_code=EXIT_USAGE)
    root = home_directory(home)
    places = choose_all_live(root) if everyone else [choose_live(root, peer, command="drain")]
    told, codes = [], [EXIT_OK]
    for place in places:
        try:
            print(f"{place.title}: {ask(place.control, 'drain', who=place.described)}", flush=True)
            told.append(place)
        except Complaint as trouble:  # the others are to hear of it all the same
            codes.append(_reported(trouble))
    for place in told if wait else ():
        try:
            codes.append(follow(place, lambda line: print(line, flush=True)))
        except Complaint as trouble:
            codes.append(_reported(trouble))
        except Interrupted:
            look = f"{command_name()} status{'' if everyone else f' --peer {place.name}'}"
            print(f"{place.title}: goes on leaving; how far it is: {look}", flush=True)
            raise
    raise typer.Exit(max(codes))


def _reported(trouble: Complaint) -> int:
    from peers.words import report_error

    report_error(trouble)
    return trouble.exit_code
